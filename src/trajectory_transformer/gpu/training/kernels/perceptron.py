"""Hidden layers of many perceptrons at once: a linear layer with its ReLU, and the gradient of its inputs."""

import triton
import triton.language as tl


@triton.jit
def linear_relu(
    x, weight, bias, out, num_rows,
    inner: tl.constexpr, padded: tl.constexpr, width: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """relu(x weight + bias) of every network: x [N, M, inner], weight [N, inner, width] -> out [N, M, width]."""
    network = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, padded)
    inside = (rows < num_rows)[:, None]
    given = (network * num_rows + rows[:, None]) * inner + dims[None, :]
    left = tl.load(x + given, mask=inside & (dims < inner)[None, :], other=0.0)
    for start in range(0, width, block_columns):
        columns = start + tl.arange(0, block_columns)
        cell = (network * inner + dims[:, None]) * width + columns[None, :]
        right = tl.load(weight + cell, mask=(dims < inner)[:, None], other=0.0)
        found = tl.dot(left, right, input_precision="ieee") + tl.load(bias + network * width + columns)[None, :]
        place = (network * num_rows + rows[:, None]) * width + columns[None, :]
        tl.store(out + place, tl.maximum(found, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def linear_relu_backward(
    grad, weight, x, grad_x, sums, num_rows,
    inner: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Gradient of what the ReLU of the layer below received, and its sums over blocks of rows for that layer's bias.

    x [N, M, inner] is the output of that ReLU, grad [N, M, width] the gradient of x weight + bias -> grad_x like x.
    """
    network = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, width)
    inside = (rows < num_rows)[:, None]
    left = tl.load(grad + (network * num_rows + rows[:, None]) * width + dims[None, :], mask=inside, other=0.0)
    for start in range(0, inner, block_columns):
        columns = start + tl.arange(0, block_columns)
        right = tl.load(weight + (network * inner + columns[:, None]) * width + dims[None, :])
        place = (network * num_rows + rows[:, None]) * inner + columns[None, :]
        active = tl.load(x + place, mask=inside, other=0.0) > 0.0
        found = tl.where(active, tl.dot(left, tl.trans(right), input_precision="ieee"), 0.0)
        tl.store(grad_x + place, found.to(grad_x.dtype.element_ty), mask=inside)
        block = network * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums + block * inner + columns, tl.sum(found, 0))
