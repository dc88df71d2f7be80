"""What a training step in bfloat16 is made of on a GPU, in Triton.

The kernels fuse what a compiler leaves apart: attention with unreadable columns and dropout; a linear layer with
dropout, residual connection and layer norm; a linear layer with gelu. Nothing is added up by atomics, so results repeat
bit by bit. Only `training.operations` imports this file.

Dropout hashes a row's number and a column's with the step's seed: cheaper than a counter-based generator, and the
backward pass draws the same again instead of keeping masks.
"""

import math

import triton
import triton.language as tl

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
def attention_forward(
    qkv, readable, seeds, out, weight, index, length, scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """What every token finds in the readable columns up to its own, and the logarithm of its weights' sum."""
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
def attention_backward_rows(
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
def attention_backward_columns(
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
def add_norm_forward(
    a, weight, bias, x, gain, shift, seeds, out, normed, index, num_rows, threshold, scale_kept,
    inner: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr, block_inner: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """A linear layer, dropout and the residual connection: a [M, inner] -> [M, width], and the layer norm of it."""
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
def add_norm_backward(
    out, grad_normed, grad_out, gain, seeds, grad_x, grad_branch, sums, index, num_rows, threshold, scale_kept,
    width: tl.constexpr, block_rows: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Gradients through layer norm, residual connection and dropout, and parts of those of gain, shift and bias."""
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
def gelu_forward(
    x, weight, bias, before, after, num_rows, num_columns,
    width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """A linear layer and gelu: x [M, width] -> [M, N], before and after."""
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
def gelu_backward(
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
