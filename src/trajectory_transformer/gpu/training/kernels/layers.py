"""Linear layers with fused epilogues (dropout, residual connection, layer norm or GELU), and their backward kernels."""

import triton
import triton.language as tl

from trajectory_transformer.gpu.training.kernels.dropout import hash_columns, hash_rows, kept


@triton.jit
def _norm(x, gain, shift, columns, width: tl.constexpr):
    """Layer norm of every row."""
    x = x - (tl.sum(x, 1) / width)[:, None]
    x = x * tl.rsqrt(tl.sum(x * x, 1) / width + 1e-5)[:, None]
    return x * tl.load(gain + columns)[None, :] + tl.load(shift + columns)[None, :]


@triton.jit
def norm_forward(
    x, gain, shift, seeds, out, normed, index, num_rows, threshold, scale_kept,
    width: tl.constexpr, block_rows: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Dropout, and the layer norm of its result: x [M, width] -> two tensors like x."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    place = rows[:, None].to(tl.int64) * width + columns[None, :]
    new = tl.load(x + place, mask=inside, other=0.0)
    if drops:
        words = hash_rows(tl.load(seeds + index), rows)
        survives = kept(words[:, None], hash_columns(columns)[None, :], threshold)
        new = tl.where(survives, new.to(tl.float32) * scale_kept, 0.0).to(out.dtype.element_ty)
    tl.store(out + place, new, mask=inside)
    new = _norm(new.to(tl.float32), gain, shift, columns, width)  # uses the rounded value, as the backward pass does
    tl.store(normed + place, new.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_forward(
    a, weight, bias, x, gain, shift, seeds, out, normed, index, num_rows, threshold, scale_kept,
    inner: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr, block_inner: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Linear layer, dropout and residual connection: a [M, inner] -> [M, width], and the layer norm of the result."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    branch = tl.zeros([block_rows, width], tl.float32)
    for start in range(0, inner, block_inner):
        dims = start + tl.arange(0, block_inner)
        left = tl.load(a + rows[:, None].to(tl.int64) * inner + dims[None, :], mask=inside, other=0.0)
        right = tl.load(weight + columns[:, None] * inner + dims[None, :])
        branch = tl.dot(left, tl.trans(right), branch, input_precision="ieee")
    branch += tl.load(bias + columns).to(tl.float32)[None, :]
    if drops:
        words = hash_rows(tl.load(seeds + index), rows)
        survives = kept(words[:, None], hash_columns(columns)[None, :], threshold)
        branch = tl.where(survives, branch * scale_kept, 0.0)
    place = rows[:, None].to(tl.int64) * width + columns[None, :]
    old = tl.load(x + place, mask=inside, other=0.0)
    new = (old.to(tl.float32) + branch).to(old.dtype)
    tl.store(out + place, new, mask=inside)
    new = _norm(new.to(tl.float32), gain, shift, columns, width)  # uses the rounded value, as the backward pass does
    tl.store(normed + place, new.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    out, grad_normed, grad_out, gain, seeds, grad_x, grad_branch, sums, index, num_rows, threshold, scale_kept,
    width: tl.constexpr, block_rows: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Backward of layer norm, residual connection and dropout, and partial sums for gain, shift and bias."""
    columns = tl.arange(0, width)
    scale = tl.load(gain + columns)[None, :]
    seed = tl.load(seeds + index)
    # Reduce over rows only once, after the loop: until then every thread accumulates in its own registers.
    grad_gain = tl.zeros([block_rows, width], tl.float32)
    grad_shift = tl.zeros([block_rows, width], tl.float32)
    grad_bias = tl.zeros([block_rows, width], tl.float32)
    for start in range(tl.program_id(0) * block_rows, num_rows, tl.num_programs(0) * block_rows):
        rows = start + tl.arange(0, block_rows)
        inside = (rows < num_rows)[:, None]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        x = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        x = x - (tl.sum(x, 1) / width)[:, None]
        spread = tl.rsqrt(tl.sum(x * x, 1) / width + 1e-5)[:, None]
        x = x * spread
        grad_gain += given * x
        grad_shift += given
        given = given * scale
        inner = (tl.sum(given * x, 1) / width)[:, None]
        grad = (given - (tl.sum(given, 1) / width)[:, None] - x * inner) * spread + past
        tl.store(grad_x + place, grad.to(grad_x.dtype.element_ty), mask=inside)
        if drops:
            survives = kept(hash_rows(seed, rows)[:, None], hash_columns(columns)[None, :], threshold)
            grad = tl.where(survives, grad * scale_kept, 0.0)
        grad_bias += grad
        tl.store(grad_branch + place, grad.to(grad_branch.dtype.element_ty), mask=inside)
    target = sums + tl.program_id(0) * 3 * width + columns
    tl.store(target, tl.sum(grad_gain, 0))
    tl.store(target + width, tl.sum(grad_shift, 0))
    tl.store(target + 2 * width, tl.sum(grad_bias, 0))


@triton.jit
def _gelu(x):
    """GELU and its derivative; the normal CDF has an error of 1e-7 (Abramowitz and Stegun, 7.1.26)."""
    density = tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361593)
    part = tl.rsqrt(1.0 + 0.23164190 * tl.abs(x))
    part = part * part  # cheaper than a division
    tail = 1.781477937 + part * (-1.821255979 + part * 1.330274430)
    tail = part * (0.319381530 + part * (-0.356563781 + part * tail))
    tail = tail * density
    mass = tl.where(x >= 0, 1.0 - tail, tail)
    return x * mass, mass + x * density


@triton.jit
def gelu_forward(
    x, weight, bias, slope, after, num_rows, num_columns,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Linear layer and GELU: x [M, width] -> derivative and value of the GELU [M, N]. Weights stay in registers."""
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, width)
    right = tl.load(weight + columns[:, None] * width + dims[None, :])
    added = tl.load(bias + columns).to(tl.float32)[None, :]
    for start in range(tl.program_id(1) * block_rows, num_rows, tl.num_programs(1) * block_rows):
        rows = start + tl.arange(0, block_rows)
        inside = (rows < num_rows)[:, None]
        left = tl.load(x + rows[:, None].to(tl.int64) * width + dims[None, :], mask=inside, other=0.0)
        hidden, steep = _gelu(tl.dot(left, tl.trans(right), input_precision="ieee") + added)
        place = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        tl.store(after + place, hidden.to(left.dtype), mask=inside)
        tl.store(slope + place, steep.to(left.dtype), mask=inside)


@triton.jit
def gelu_backward(
    grad, weight, slope, grad_before, sums, num_rows, num_columns,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Gradient of the GELU's input, given that of the next layer's output: [M, width], weight [width, N] -> [M, N]."""
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, width)
    right = tl.load(weight + dims[:, None] * num_columns + columns[None, :])
    total = tl.zeros([block_columns], tl.float32)
    for start in range(tl.program_id(1) * block_rows, num_rows, tl.num_programs(1) * block_rows):
        rows = start + tl.arange(0, block_rows)
        inside = (rows < num_rows)[:, None]
        left = tl.load(grad + rows[:, None].to(tl.int64) * width + dims[None, :], mask=inside, other=0.0)
        place = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        steep = tl.load(slope + place, mask=inside, other=0.0).to(tl.float32)
        given = tl.dot(left, right, input_precision="ieee") * steep
        total += tl.sum(given, 0)
        tl.store(grad_before + place, given.to(left.dtype), mask=inside)
    tl.store(sums + tl.program_id(1) * num_columns + columns, total)
