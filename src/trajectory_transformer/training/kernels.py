"""What a training step in bfloat16 is made of on a GPU: Triton kernels as torch operations, with their gradients.

They fuse what a compiler leaves apart: attention with unreadable columns and dropout; a linear layer with dropout,
residual connection and layer norm; a linear layer with gelu. Nothing is added up by atomics, so results repeat bit by
bit. Only `training.fast` imports this file, and only where there is a GPU.

Dropout hashes a row's number and a column's with the step's seed: cheaper than a counter-based generator, and the
backward pass draws the same again instead of keeping masks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.0 / math.log(2.0)


@triton.jit
def _mix(x):
    """A hash of 32 bits."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, rows, columns, threshold):
    """Whether each element of a block survives dropout: hashes of its row and column, mixed once more."""
    words = (_mix(rows ^ seed) ^ _mix(columns + 0x3C6EF372)) * 0x9E3779B1
    return (words >> 8).to(tl.int32) >= threshold


@triton.jit
def _below(x):
    """The normal distribution's mass below x and its density at x; the mass to 1e-7 (Abramowitz and Stegun, 7.1.26)."""
    density = tl.exp2(x * x * -0.7213475204444817)
    part = 1.0 / (1.0 + 0.23164190 * tl.abs(x))
    tail = 0.7107068705 + part * (-0.7265760135 + part * 0.5307027145)
    tail = part * (0.127414796 + part * (-0.142248368 + part * tail))
    tail = tail * density
    return tl.where(x >= 0, 1.0 - tail, tail), density * 0.3989422804014327


@triton.jit
def _attention_forward(
    qkv, readable, seeds, out, weight, index, length, scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    width: tl.constexpr = heads * dim
    batch, own = head // heads, head % heads
    base = qkv + batch.to(tl.int64) * length * 3 * width + own * dim
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, dim)
    inside = rows < length
    query = tl.load(base + rows[:, None] * 3 * width + dims[None, :], mask=inside[:, None], other=0.0)
    seed = tl.load(seeds + index)
    highest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    found = tl.zeros([block_rows, dim], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * block_rows, length), block_columns):
        columns = start + tl.arange(0, block_columns)
        there = columns < length
        place = columns[:, None] * 3 * width + dims[None, :]
        key = tl.load(base + width + place, mask=there[:, None], other=0.0)
        value = tl.load(base + 2 * width + place, mask=there[:, None], other=0.0)
        seen = tl.load(readable + columns, mask=there, other=0) != 0
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((columns[None, :] <= rows[:, None]) & seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # nothing readable so far
        shares = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(shares, 1)
        if drops:
            kept = _kept(seed, (head * length + rows)[:, None], columns[None, :], threshold)
            shares = tl.where(kept, shares * scale_kept, 0.0)
        found = found * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        highest = higher
    total = tl.where(total > 0, total, 1.0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    place = (batch.to(tl.int64) * length + rows[:, None]) * width + own * dim + dims[None, :]
    tl.store(out + place, (found / total[:, None]).to(query.dtype), mask=inside[:, None])
    tl.store(weight + head * length + rows, highest + tl.log2(total), mask=inside)


@triton.jit
def _attention_backward_rows(
    qkv, readable, seeds, out, weight, grad, common, grad_qkv, index, length, scale, plain_scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and for the next kernel what all scores of a row have in common."""
    head = tl.program_id(1)
    width: tl.constexpr = heads * dim
    batch, own = head // heads, head % heads
    first = batch.to(tl.int64) * length * 3 * width + own * dim
    base = qkv + first
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, dim)
    inside = rows < length
    query = tl.load(base + rows[:, None] * 3 * width + dims[None, :], mask=inside[:, None], other=0.0)
    place = (batch.to(tl.int64) * length + rows[:, None]) * width + own * dim + dims[None, :]
    found = tl.load(out + place, mask=inside[:, None], other=0.0)
    given = tl.load(grad + place, mask=inside[:, None], other=0.0)
    shift = tl.sum(found.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(common + head * length + rows, shift, mask=inside)
    total = tl.load(weight + head * length + rows, mask=inside, other=0.0)
    seed = tl.load(seeds + index)
    grad_query = tl.zeros([block_rows, dim], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * block_rows, length), block_columns):
        columns = start + tl.arange(0, block_columns)
        there = columns < length
        source = columns[:, None] * 3 * width + dims[None, :]
        key = tl.load(base + width + source, mask=there[:, None], other=0.0)
        value = tl.load(base + 2 * width + source, mask=there[:, None], other=0.0)
        seen = tl.load(readable + columns, mask=there, other=0) != 0
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (columns[None, :] <= rows[:, None]) & seen[None, :]
        shares = tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
        grad_shares = tl.dot(given, tl.trans(value), input_precision="ieee")
        if drops:
            kept = _kept(seed, (head * length + rows)[:, None], columns[None, :], threshold)
            grad_shares = tl.where(kept, grad_shares * scale_kept, 0.0)
        grad_scores = shares * (grad_shares - shift[:, None])
        grad_query += tl.dot(grad_scores.to(key.dtype), key, input_precision="ieee")
    target = grad_qkv + first + rows[:, None] * 3 * width + dims[None, :]
    tl.store(target, (grad_query * plain_scale).to(query.dtype), mask=inside[:, None])


@triton.jit
def _attention_backward_columns(
    qkv, readable, seeds, weight, grad, common, grad_qkv, index, length, scale, plain_scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values."""
    head = tl.program_id(1)
    width: tl.constexpr = heads * dim
    batch, own = head // heads, head % heads
    first = batch.to(tl.int64) * length * 3 * width + own * dim
    base = qkv + first
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, dim)
    there = columns < length
    place = columns[:, None] * 3 * width + dims[None, :]
    key = tl.load(base + width + place, mask=there[:, None], other=0.0)
    value = tl.load(base + 2 * width + place, mask=there[:, None], other=0.0)
    seen = tl.load(readable + columns, mask=there, other=0) != 0
    seed = tl.load(seeds + index)
    grad_key = tl.zeros([block_columns, dim], tl.float32)
    grad_value = tl.zeros([block_columns, dim], tl.float32)
    for start in range((tl.program_id(0) * block_columns) // block_rows * block_rows, length, block_rows):
        rows = start + tl.arange(0, block_rows)
        inside = rows < length
        query = tl.load(base + rows[:, None] * 3 * width + dims[None, :], mask=inside[:, None], other=0.0)
        source = grad + (batch.to(tl.int64) * length + rows[:, None]) * width + own * dim + dims[None, :]
        given = tl.load(source, mask=inside[:, None], other=0.0)
        total = tl.load(weight + head * length + rows, mask=inside, other=0.0)
        shift = tl.load(common + head * length + rows, mask=inside, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
        visible = (columns[:, None] <= rows[None, :]) & seen[:, None] & inside[None, :]
        shares = tl.where(visible, tl.exp2(scores - total[None, :]), 0.0)
        grad_shares = tl.dot(value, tl.trans(given), input_precision="ieee")
        dropped = shares
        if drops:
            kept = _kept(seed, (head * length + rows)[None, :], columns[:, None], threshold)
            dropped = tl.where(kept, shares * scale_kept, 0.0)
            grad_shares = tl.where(kept, grad_shares * scale_kept, 0.0)
        grad_value += tl.dot(dropped.to(given.dtype), given, input_precision="ieee")
        grad_scores = shares * (grad_shares - shift[None, :])
        grad_key += tl.dot(grad_scores.to(query.dtype), query, input_precision="ieee")
    target = grad_qkv + first + place
    tl.store(target + width, (grad_key * plain_scale).to(key.dtype), mask=there[:, None])
    tl.store(target + 2 * width, grad_value.to(key.dtype), mask=there[:, None])


@triton.jit
def _add_norm_forward(
    a, weight, bias, x, gain, shift, seeds, out, normed, index, num_rows, threshold, scale_kept,
    inner: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr, block_inner: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    branch = tl.zeros([block_rows, width], tl.float32)
    for start in range(0, inner, block_inner):
        dims = start + tl.arange(0, block_inner)
        left = tl.load(a + rows[:, None].to(tl.int64) * inner + dims[None, :], mask=inside, other=0.0)
        right = tl.load(weight + columns[:, None] * inner + dims[None, :])
        branch += tl.dot(left, tl.trans(right), input_precision="ieee")
    branch += tl.load(bias + columns).to(tl.float32)[None, :]
    if drops:
        kept = _kept(tl.load(seeds + index), rows[:, None], columns[None, :], threshold)
        branch = tl.where(kept, branch * scale_kept, 0.0)
    place = rows[:, None].to(tl.int64) * width + columns[None, :]
    old = tl.load(x + place, mask=inside, other=0.0)
    new = (old.to(tl.float32) + branch).to(old.dtype)
    tl.store(out + place, new, mask=inside)
    new = new.to(tl.float32)  # as the backward pass will read it
    new = new - (tl.sum(new, 1) / width)[:, None]
    new = new * tl.rsqrt(tl.sum(new * new, 1) / width + 1e-5)[:, None]
    new = new * tl.load(gain + columns)[None, :] + tl.load(shift + columns)[None, :]
    tl.store(normed + place, new.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    out, grad_normed, grad_out, gain, seeds, grad_x, grad_branch, sums, index, num_rows, threshold, scale_kept,
    width: tl.constexpr, block_rows: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, width)
    scale = tl.load(gain + columns)[None, :]
    seed = tl.load(seeds + index)
    # Added up over rows at the end alone: until then each thread keeps its own.
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
            grad = tl.where(_kept(seed, rows[:, None], columns[None, :], threshold), grad * scale_kept, 0.0)
        grad_bias += grad
        tl.store(grad_branch + place, grad.to(grad_branch.dtype.element_ty), mask=inside)
    target = sums + tl.program_id(0) * 3 * width + columns
    tl.store(target, tl.sum(grad_gain, 0))
    tl.store(target + width, tl.sum(grad_shift, 0))
    tl.store(target + 2 * width, tl.sum(grad_bias, 0))


@triton.jit
def _gelu_forward(
    x, weight, bias, before, after, num_rows, num_columns,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    left = tl.load(x + rows[:, None].to(tl.int64) * width + dims[None, :], mask=inside, other=0.0)
    right = tl.load(weight + columns[:, None] * width + dims[None, :])
    hidden = tl.dot(left, tl.trans(right), input_precision="ieee") + tl.load(bias + columns).to(tl.float32)[None, :]
    hidden = hidden.to(left.dtype)
    place = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(before + place, hidden, mask=inside)
    hidden = hidden.to(tl.float32)
    mass, _ = _below(hidden)
    tl.store(after + place, (hidden * mass).to(left.dtype), mask=inside)


@triton.jit
def _gelu_backward(
    grad, weight, before, grad_before, sums, num_rows, num_columns,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The gradient before gelu from that of the layer after it: grad [M, width], weight [width, N] -> [M, N]."""
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    left = tl.load(grad + rows[:, None].to(tl.int64) * width + dims[None, :], mask=inside, other=0.0)
    right = tl.load(weight + dims[:, None] * num_columns + columns[None, :])
    given = tl.dot(left, right, input_precision="ieee")
    place = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    hidden = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
    mass, density = _below(hidden)
    given = given * (mass + hidden * density)
    tl.store(grad_before + place, given.to(left.dtype), mask=inside)
    tl.store(sums + tl.program_id(1) * num_columns + columns, tl.sum(given, 0))


# Block sizes (rows, columns, warps), the fastest of those tried on an H200 at width 128, 4 heads, 160 tokens.
_FORWARD, _ROWS, _COLUMNS = (32, 32, 1), (32, 32, 2), (32, 64, 4)
_ADD_NORM = (64, 64, 8)
_ADD_NORM_BACKWARD = (4, 2, 1320)  # rows, warps, programs
_GELU = (64, 128, 8)
_GELU_BACKWARD = (64, 64, 4)


def _dropping(dropout: float) -> tuple[int, float]:
    """Numbers a kernel draws with: the threshold below which an element is dropped, and how the others grow."""
    return round(dropout * 2**24), 1.0 / (1.0 - dropout)


@torch.library.custom_op("trajectory_transformer::attention", mutates_args=())
def attention(
    qkv: Tensor, readable: Tensor, seeds: Tensor, index: int, heads: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Causal attention over readable columns: qkv [B, L, 3 * width] -> [B, L, width], and its weights' logarithms."""
    batch, length, triple = qkv.shape
    width = triple // 3
    out, weight = qkv.new_empty(batch, length, width), qkv.new_empty(batch, heads, length, dtype=torch.float32)
    rows, columns, warps = _FORWARD
    _attention_forward[(triton.cdiv(length, rows), batch * heads)](
        qkv, readable, seeds, out, weight, index, length, _LOG2_E / math.sqrt(width // heads), *_dropping(dropout),
        heads=heads, dim=width // heads, block_rows=rows, block_columns=columns, drops=dropout > 0, num_warps=warps,
    )  # fmt: skip
    return out, weight


@attention.register_fake
def _(qkv, readable, seeds, index, heads, dropout):
    batch, length, triple = qkv.shape
    return qkv.new_empty(batch, length, triple // 3), qkv.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("trajectory_transformer::attention_backward", mutates_args=())
def _attention_backward(
    qkv: Tensor, readable: Tensor, seeds: Tensor, out: Tensor, weight: Tensor, grad: Tensor,
    index: int, heads: int, dropout: float,
) -> Tensor:  # fmt: skip
    batch, length, triple = qkv.shape
    dim = triple // 3 // heads
    grad, common, grad_qkv = grad.contiguous(), torch.empty_like(weight), torch.empty_like(qkv)
    sizes = {"heads": heads, "dim": dim, "drops": dropout > 0}
    scales = (_LOG2_E / math.sqrt(dim), 1.0 / math.sqrt(dim), *_dropping(dropout))
    rows, columns, warps = _ROWS
    _attention_backward_rows[(triton.cdiv(length, rows), batch * heads)](
        qkv, readable, seeds, out, weight, grad, common, grad_qkv, index, length, *scales,
        **sizes, block_rows=rows, block_columns=columns, num_warps=warps,
    )  # fmt: skip
    rows, columns, warps = _COLUMNS
    _attention_backward_columns[(triton.cdiv(length, columns), batch * heads)](
        qkv, readable, seeds, weight, grad, common, grad_qkv, index, length, *scales,
        **sizes, block_rows=rows, block_columns=columns, num_warps=warps,
    )  # fmt: skip
    return grad_qkv


@_attention_backward.register_fake
def _(qkv, readable, seeds, out, weight, grad, index, heads, dropout):
    return torch.empty_like(qkv)


def _keep_attention(ctx, inputs, output):
    qkv, readable, seeds, *ctx.settings = inputs
    ctx.save_for_backward(qkv, readable, seeds, *output)


def _differentiate_attention(ctx, grad, _):
    return _attention_backward(*ctx.saved_tensors, grad, *ctx.settings), None, None, None, None, None


attention.register_autograd(_differentiate_attention, setup_context=_keep_attention)


@torch.library.custom_op("trajectory_transformer::linear_add_norm", mutates_args=())
def linear_add_norm(
    a: Tensor, weight: Tensor, bias: Tensor, x: Tensor, gain: Tensor, shift: Tensor,
    seeds: Tensor, index: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A linear layer, dropout, the residual connection and a layer norm: a [B, L, K], x [B, L, width] -> two like x."""
    out, normed = torch.empty_like(x), torch.empty_like(x, dtype=a.dtype)
    num_rows = x.numel() // x.shape[-1]
    rows, inner, warps = _ADD_NORM
    _add_norm_forward[(triton.cdiv(num_rows, rows),)](
        a, weight, bias, x, gain, shift, seeds, out, normed, index, num_rows, *_dropping(dropout),
        inner=a.shape[-1], width=x.shape[-1], block_rows=rows, block_inner=min(inner, a.shape[-1]), drops=dropout > 0,
        num_warps=warps,
    )  # fmt: skip
    return out, normed


@linear_add_norm.register_fake
def _(a, weight, bias, x, gain, shift, seeds, index, dropout):
    return torch.empty_like(x), torch.empty_like(x, dtype=a.dtype)


def _programs(num_rows: int) -> int:
    """Over how many programs rows are spread evenly."""
    tiles = triton.cdiv(num_rows, _ADD_NORM_BACKWARD[0])
    return triton.cdiv(tiles, triton.cdiv(tiles, _ADD_NORM_BACKWARD[2]))


@torch.library.custom_op("trajectory_transformer::add_norm_backward", mutates_args=())
def _norm_backward(
    out: Tensor, grad_out: Tensor, grad_normed: Tensor, gain: Tensor, seeds: Tensor, index: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = out.numel() // out.shape[-1], out.shape[-1]
    grad_x, grad_branch = torch.empty_like(out), torch.empty_like(out, dtype=grad_normed.dtype)
    rows, warps, _ = _ADD_NORM_BACKWARD
    programs = _programs(num_rows)
    sums = out.new_empty(programs, 3, width, dtype=torch.float32)
    _add_norm_backward[(programs,)](
        out, grad_normed.contiguous(), grad_out.contiguous(), gain, seeds, grad_x, grad_branch, sums, index, num_rows,
        *_dropping(dropout), width=width, block_rows=rows, drops=dropout > 0, num_warps=warps,
    )  # fmt: skip
    return grad_x, grad_branch, sums


@_norm_backward.register_fake
def _(out, grad_out, grad_normed, gain, seeds, index, dropout):
    programs = _programs(out.numel() // out.shape[-1])
    sums = out.new_empty(programs, 3, out.shape[-1], dtype=torch.float32)
    return torch.empty_like(out), torch.empty_like(out, dtype=grad_normed.dtype), sums


def _keep_add_norm(ctx, inputs, output):
    a, weight, bias, _, gain, _, seeds, *ctx.settings = inputs
    ctx.save_for_backward(a, weight, bias, gain, seeds, output[0])


def _differentiate_add_norm(ctx, grad_out, grad_normed):
    a, weight, bias, gain, seeds, out = ctx.saved_tensors
    grad_x, grad_branch, sums = _norm_backward(out, grad_out, grad_normed, gain, seeds, *ctx.settings)
    grad_gain, grad_shift, grad_bias = sums.sum(0)
    rows = grad_branch.flatten(0, 1)
    grad_weight = rows.t() @ a.flatten(0, 1)
    grad_a = (rows @ weight).view_as(a)
    return grad_a, grad_weight, grad_bias.to(bias.dtype), grad_x, grad_gain, grad_shift, None, None, None


linear_add_norm.register_autograd(_differentiate_add_norm, setup_context=_keep_add_norm)


@torch.library.custom_op("trajectory_transformer::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer, and gelu after it: x [B, L, width], weight [N, width] -> two of [B, L, N]."""
    num_rows, width, num_columns = x.numel() // x.shape[-1], x.shape[-1], len(weight)
    before = x.new_empty(*x.shape[:-1], num_columns)
    after = torch.empty_like(before)
    rows, columns, warps = _GELU
    columns = min(columns, width)  # of 4 * width columns a whole number of blocks
    _gelu_forward[(num_columns // columns, triton.cdiv(num_rows, rows))](
        x, weight, bias, before, after, num_rows, num_columns,
        width=width, block_rows=rows, block_columns=columns, num_warps=warps,
    )  # fmt: skip
    return before, after


@_linear_gelu.register_fake
def _(x, weight, bias):
    hidden = x.new_empty(*x.shape[:-1], len(weight))
    return hidden, torch.empty_like(hidden)


@torch.library.custom_op("trajectory_transformer::gelu_backward", mutates_args=())
def _gelu_backward_op(grad: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width, num_columns = grad.numel() // grad.shape[-1], grad.shape[-1], before.shape[-1]
    rows, columns, warps = _GELU_BACKWARD
    columns = min(columns, width)
    grad_before = torch.empty_like(before)
    sums = grad.new_empty(triton.cdiv(num_rows, rows), num_columns, dtype=torch.float32)
    _gelu_backward[(num_columns // columns, triton.cdiv(num_rows, rows))](
        grad.contiguous(), weight, before, grad_before, sums, num_rows, num_columns,
        width=width, block_rows=rows, block_columns=columns, num_warps=warps,
    )  # fmt: skip
    return grad_before, sums


@_gelu_backward_op.register_fake
def _(grad, weight, before):
    num_rows = grad.numel() // grad.shape[-1]
    sums = grad.new_empty(triton.cdiv(num_rows, _GELU_BACKWARD[0]), before.shape[-1], dtype=torch.float32)
    return torch.empty_like(before), sums


@torch.library.custom_op("trajectory_transformer::perceptron", mutates_args=())
def perceptron(
    h: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, x: Tensor, gain: Tensor, shift: Tensor,
    seeds: Tensor, index: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Both linear layers around gelu, dropout, the residual connection and a layer norm: h, x -> two like x.

    The last two are kept for the backward pass: [B, L, N] before and after gelu.
    """
    before, after = _linear_gelu(h, up, up_bias)
    out, normed = linear_add_norm(after, down, down_bias, x, gain, shift, seeds, index, dropout)
    return out, normed, before, after


@perceptron.register_fake
def _(h, up, up_bias, down, down_bias, x, gain, shift, seeds, index, dropout):
    hidden = h.new_empty(*h.shape[:-1], len(up))
    return torch.empty_like(x), torch.empty_like(h), hidden, torch.empty_like(hidden)


def _keep_perceptron(ctx, inputs, output):
    h, up, up_bias, down, down_bias, _, gain, _, seeds, *ctx.settings = inputs
    out, _, before, after = output
    ctx.save_for_backward(h, up, up_bias, down, down_bias, gain, seeds, out, before, after)


def _differentiate_perceptron(ctx, grad_out, grad_normed, _, __):
    h, up, up_bias, down, down_bias, gain, seeds, out, before, after = ctx.saved_tensors
    grad_x, grad_branch, sums = _norm_backward(out, grad_out, grad_normed, gain, seeds, *ctx.settings)
    grad_gain, grad_shift, grad_down_bias = sums.sum(0)
    grad_before, up_sums = _gelu_backward_op(grad_branch, down, before)
    grad_down = grad_branch.flatten(0, 1).t() @ after.flatten(0, 1)
    hidden = grad_before.flatten(0, 1)
    grad_up = hidden.t() @ h.flatten(0, 1)
    grad_h = (hidden @ up).view_as(h)
    return (
        grad_h, grad_up, up_sums.sum(0).to(up_bias.dtype), grad_down, grad_down_bias.to(down_bias.dtype), grad_x,
        grad_gain, grad_shift, None, None, None,
    )  # fmt: skip


perceptron.register_autograd(_differentiate_perceptron, setup_context=_keep_perceptron)
