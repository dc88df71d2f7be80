"""Attention over readable columns with dropout: forward and backward kernels."""

import triton
import triton.language as tl

from trajectory_transformer.gpu.training.kernels.dropout import hash_columns, hash_rows, kept


@triton.jit
def attention_forward(
    qkv, readers, seeds, out, weight, index, length, scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Attend to the readable columns up to each row; also store the log-sum-exp (base 2) of each row's scores."""
    head = tl.program_id(1)
    width: tl.constexpr = heads * dim
    batch, own = head // heads, head % heads
    base = qkv + batch.to(tl.int64) * length * 3 * width + own * dim
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, dim)
    inside = rows < length
    query = tl.load(base + rows[:, None] * 3 * width + dims[None, :], mask=inside[:, None], other=0.0)
    row_words = hash_rows(tl.load(seeds + index), head * length + rows)
    highest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    found = tl.zeros([block_rows, dim], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * block_rows, length), block_columns):
        columns = start + tl.arange(0, block_columns)
        there = (columns < length)[:, None]
        place = columns[:, None] * 3 * width + dims[None, :]
        key = tl.load(base + width + place, mask=there, other=0.0)
        value = tl.load(base + 2 * width + place, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        visible = tl.load(readers + columns, mask=columns < length, other=2**30)[None, :] <= rows[:, None]
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # no readable column so far
        shares = tl.exp2(scores * scale - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(shares, 1)
        if drops:
            shares = tl.where(kept(row_words[:, None], hash_columns(columns)[None, :], threshold), shares, 0.0)
        found = tl.dot(shares.to(value.dtype), value, found * shrink[:, None], input_precision="ieee")
        highest = higher
    total = tl.where(total > 0, total, 1.0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    place = (batch.to(tl.int64) * length + rows[:, None]) * width + own * dim + dims[None, :]
    found = found * (scale_kept / total)[:, None]
    tl.store(out + place, found.to(query.dtype), mask=inside[:, None])
    tl.store(weight + head * length + rows, highest + tl.log2(total), mask=inside)


@triton.jit
def attention_backward_rows(
    qkv, readers, seeds, out, weight, grad, common, grad_qkv, sums, index, length,
    scale, plain_scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Query gradients and their partial sums; also store each row's dot product of output and gradient."""
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
    shift = tl.sum(found.to(tl.float32) * given.to(tl.float32), 1) / scale_kept
    tl.store(common + head * length + rows, shift, mask=inside)
    total = tl.load(weight + head * length + rows, mask=inside, other=0.0)
    row_words = hash_rows(tl.load(seeds + index), head * length + rows)
    grad_query = tl.zeros([block_rows, dim], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * block_rows, length), block_columns):
        columns = start + tl.arange(0, block_columns)
        there = (columns < length)[:, None]
        source = columns[:, None] * 3 * width + dims[None, :]
        key = tl.load(base + width + source, mask=there, other=0.0)
        value = tl.load(base + 2 * width + source, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        visible = tl.load(readers + columns, mask=columns < length, other=2**30)[None, :] <= rows[:, None]
        shares = tl.where(visible, tl.exp2(scores * scale - total[:, None]), 0.0)
        grad_shares = tl.dot(given, tl.trans(value), input_precision="ieee")
        if drops:
            survives = kept(row_words[:, None], hash_columns(columns)[None, :], threshold)
            grad_shares = tl.where(survives, grad_shares, 0.0)
        grad_scores = shares * (grad_shares - shift[:, None])
        grad_query = tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision="ieee")
    target = grad_qkv + first + rows[:, None] * 3 * width + dims[None, :]
    grad_query *= plain_scale * scale_kept
    tl.store(target, grad_query.to(query.dtype), mask=inside[:, None])
    target = sums + (batch * tl.num_programs(0) + tl.program_id(0)) * width + own * dim + dims
    tl.store(target, tl.sum(grad_query, 0))


@triton.jit
def attention_backward_columns(
    qkv, readers, seeds, weight, grad, common, grad_qkv, sums, index, length,
    scale, plain_scale, threshold, scale_kept,
    heads: tl.constexpr, dim: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    """Key and value gradients, and partial sums of the value gradients."""
    head = tl.program_id(1)
    width: tl.constexpr = heads * dim
    batch, own = head // heads, head % heads
    first = batch.to(tl.int64) * length * 3 * width + own * dim
    base = qkv + first
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    dims = tl.arange(0, dim)
    there = (columns < length)[:, None]
    place = columns[:, None] * 3 * width + dims[None, :]
    key = tl.load(base + width + place, mask=there, other=0.0)
    value = tl.load(base + 2 * width + place, mask=there, other=0.0)
    reader = tl.load(readers + columns, mask=columns < length, other=2**30)[:, None]
    column_words = hash_columns(columns)[:, None]
    seed = tl.load(seeds + index)
    grad_key = tl.zeros([block_columns, dim], tl.float32)
    grad_value = tl.zeros([block_columns, dim], tl.float32)
    for start in range((tl.program_id(0) * block_columns) // block_rows * block_rows, length, block_rows):
        rows = start + tl.arange(0, block_rows)
        inside = rows < length
        query = tl.load(base + rows[:, None] * 3 * width + dims[None, :], mask=inside[:, None], other=0.0)
        source = grad + (batch.to(tl.int64) * length + rows[:, None]) * width + own * dim + dims[None, :]
        given = tl.load(source, mask=inside[:, None], other=0.0)
        total = tl.load(weight + head * length + rows, mask=inside, other=float("inf"))  # rows outside get weight 0
        shift = tl.load(common + head * length + rows, mask=inside, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision="ieee")
        shares = tl.where(reader <= rows[None, :], tl.exp2(scores * scale - total[None, :]), 0.0)
        dropped = shares
        if drops:
            row_words = hash_rows(seed, head * length + rows)[None, :]
            dropped = tl.where(kept(row_words, column_words, threshold), shares, 0.0)
        grad_value = tl.dot(dropped.to(given.dtype), given, grad_value, input_precision="ieee")
        grad_shares = tl.dot(value, tl.trans(given), input_precision="ieee")
        grad_scores = dropped * grad_shares - shares * shift[None, :]
        grad_key = tl.dot(grad_scores.to(query.dtype), query, grad_key, input_precision="ieee")
    target = grad_qkv + first + place
    tl.store(target + width, (grad_key * (plain_scale * scale_kept)).to(key.dtype), mask=there)
    grad_value *= scale_kept
    tl.store(target + 2 * width, grad_value.to(key.dtype), mask=there)
    target = sums + (batch * tl.num_programs(0) + tl.program_id(0)) * width + own * dim + dims
    tl.store(target, tl.sum(grad_value, 0))
