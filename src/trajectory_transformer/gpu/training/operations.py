"""Register the Triton kernels of `gpu.training.kernels` as torch operations with gradients.

Needs triton. Only `gpu.training.fused` and `gpu.training.perceptrons` import this module, on machines with a GPU.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trajectory_transformer.gpu.training.kernels.attention import (
    attention_backward_columns,
    attention_backward_rows,
    attention_forward,
)
from trajectory_transformer.gpu.training.kernels.layers import (
    add_norm_backward,
    add_norm_forward,
    gelu_backward,
    gelu_forward,
    norm_forward,
)

_LOG2_E = 1.0 / math.log(2.0)


class Blocks(NamedTuple):
    """Launch configuration of a kernel: block sizes, warps, pipeline stages."""

    rows: int
    columns: int  # or the inner dimension that a program loops over
    warps: int
    stages: int
    programs: int = 0  # maximum number of programs along the rows, for kernels that loop over blocks of rows

    def of(self, x: Tensor) -> "Blocks":
        """Return smaller blocks for float32, which only tests use: its tiles would exceed the registers."""
        return self._replace(rows=16, columns=32, stages=1) if x.dtype == torch.float32 else self

    @property
    def options(self) -> dict[str, int]:
        """Triton launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def spread(self, num_rows: int) -> int:
        """Number of programs that process `num_rows` rows in equal shares."""
        tiles = triton.cdiv(num_rows, self.rows)
        return triton.cdiv(tiles, triton.cdiv(tiles, self.programs))


# Tuned on an H200 at width 128, 4 heads, 160 tokens; see docs/decisions/0007.
_ATTENTION, _ATTENTION_ROWS, _ATTENTION_COLUMNS = Blocks(32, 32, 1, 3), Blocks(32, 32, 1, 2), Blocks(32, 32, 2, 2)
_OUT, _DOWN = Blocks(64, 128, 8, 1), Blocks(64, 64, 4, 3)
_NORM, _NORM_BACKWARD = Blocks(4, 0, 2, 3), Blocks(4, 0, 2, 3, programs=1320)
_GELU, _GELU_BACKWARD = Blocks(64, 64, 4, 3, programs=99), Blocks(64, 64, 4, 2, programs=66)


def _dropout_args(dropout: float) -> tuple[int, float]:
    """Dropout arguments of a kernel: threshold of the 24-bit hash, and scale of the kept elements."""
    return round(dropout * 2**24), 1.0 / (1.0 - dropout)


@torch.library.custom_op("trajectory_transformer::attention", mutates_args=())
def attention(
    h: Tensor, weight: Tensor, bias: Tensor, readers: Tensor, seeds: Tensor, index: int, heads: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """QKV projection and causal attention: h [B, L, width] -> [B, L, width].

    Row i attends to column j if `readers[j] <= i`. Also returns queries, keys and values, and the log-sum-exp of every
    row (base 2), for the backward pass.
    """
    batch, length, width = h.shape
    qkv = torch.nn.functional.linear(h, weight, bias)
    out, total = torch.empty_like(h), h.new_empty(batch, heads, length, dtype=torch.float32)
    blocks = _ATTENTION
    attention_forward[(triton.cdiv(length, blocks.rows), batch * heads)](
        qkv, readers, seeds, out, total, index, length, _LOG2_E / math.sqrt(width // heads), *_dropout_args(dropout),
        heads=heads, dim=width // heads, block_rows=blocks.rows, block_columns=blocks.columns, drops=dropout > 0,
        **blocks.options,
    )  # fmt: skip
    return out, qkv, total


@attention.register_fake
def _(h, weight, bias, readers, seeds, index, heads, dropout):
    batch, length, width = h.shape
    total = h.new_empty(batch, heads, length, dtype=torch.float32)
    return torch.empty_like(h), h.new_empty(batch, length, 3 * width), total


@torch.library.custom_op("trajectory_transformer::attention_backward", mutates_args=())
def _attention_backward(
    qkv: Tensor, readers: Tensor, seeds: Tensor, out: Tensor, total: Tensor, grad: Tensor,
    index: int, heads: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, and partial sums of the query and value gradients for the bias."""
    batch, length, width = out.shape
    dim = width // heads
    grad, common, grad_qkv = grad.contiguous(), torch.empty_like(total), torch.empty_like(qkv)
    sizes = {"heads": heads, "dim": dim, "drops": dropout > 0}
    scales = (_LOG2_E / math.sqrt(dim), 1.0 / math.sqrt(dim), *_dropout_args(dropout))
    blocks = _ATTENTION_ROWS
    query_sums = out.new_empty(batch, triton.cdiv(length, blocks.rows), width, dtype=torch.float32)
    attention_backward_rows[(query_sums.shape[1], batch * heads)](
        qkv, readers, seeds, out, total, grad, common, grad_qkv, query_sums, index, length, *scales,
        **sizes, block_rows=blocks.rows, block_columns=blocks.columns, **blocks.options,
    )  # fmt: skip
    blocks = _ATTENTION_COLUMNS
    value_sums = out.new_empty(batch, triton.cdiv(length, blocks.columns), width, dtype=torch.float32)
    attention_backward_columns[(value_sums.shape[1], batch * heads)](
        qkv, readers, seeds, total, grad, common, grad_qkv, value_sums, index, length, *scales,
        **sizes, block_rows=blocks.rows, block_columns=blocks.columns, **blocks.options,
    )  # fmt: skip
    return grad_qkv, query_sums, value_sums


@_attention_backward.register_fake
def _(qkv, readers, seeds, out, total, grad, index, heads, dropout):
    batch, length, width = out.shape
    blocks = triton.cdiv(length, _ATTENTION_ROWS.rows), triton.cdiv(length, _ATTENTION_COLUMNS.columns)
    return torch.empty_like(qkv), *(out.new_empty(batch, each, width, dtype=torch.float32) for each in blocks)


def _save_attention(ctx, inputs, output):
    h, weight, bias, readers, seeds, *ctx.settings = inputs
    out, qkv, total = output
    ctx.save_for_backward(h, weight, bias, qkv, readers, seeds, out, total)


def _backward_of_attention(ctx, grad, _, __):
    h, weight, bias, *others = ctx.saved_tensors
    grad_qkv, *sums = _attention_backward(*others, grad, *ctx.settings)
    rows = grad_qkv.flatten(0, 1)
    grad_weight = rows.t() @ h.flatten(0, 1)
    queries, values = (each.sum((0, 1)) for each in sums)
    # A key bias adds the same constant to all scores of a row, which softmax cancels: its gradient is zero.
    grad_bias = torch.cat([queries, torch.zeros_like(queries), values]).to(bias.dtype)
    return (rows @ weight).view_as(h), grad_weight, grad_bias, None, None, None, None, None


attention.register_autograd(_backward_of_attention, setup_context=_save_attention)


@torch.library.custom_op("trajectory_transformer::dropout_norm", mutates_args=())
def dropout_norm(
    x: Tensor, gain: Tensor, shift: Tensor, seeds: Tensor, index: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Dropout, and the layer norm of its result: x [B, L, width] -> two tensors like x."""
    out, normed = torch.empty_like(x), torch.empty_like(x)
    num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
    norm_forward[(triton.cdiv(num_rows, _NORM.rows),)](
        x.contiguous(), gain, shift, seeds, out, normed, index, num_rows, *_dropout_args(dropout),
        width=width, block_rows=_NORM.rows, drops=dropout > 0, **_NORM.options,
    )  # fmt: skip
    return out, normed


@dropout_norm.register_fake
def _(x, gain, shift, seeds, index, dropout):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("trajectory_transformer::add_norm_backward", mutates_args=())
def _norm_backward(
    out: Tensor, grad_out: Tensor, grad_normed: Tensor, gain: Tensor, seeds: Tensor, index: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the residual input and of the branch before dropout, and partial sums for gain, shift and bias."""
    num_rows, width = out.numel() // out.shape[-1], out.shape[-1]
    grad_x, grad_branch = torch.empty_like(out), torch.empty_like(out, dtype=grad_normed.dtype)
    blocks = _NORM_BACKWARD
    sums = out.new_empty(blocks.spread(num_rows), 3, width, dtype=torch.float32)
    add_norm_backward[(len(sums),)](
        out, grad_normed.contiguous(), grad_out.contiguous(), gain, seeds, grad_x, grad_branch, sums, index, num_rows,
        *_dropout_args(dropout), width=width, block_rows=blocks.rows, drops=dropout > 0, **blocks.options,
    )  # fmt: skip
    return grad_x, grad_branch, sums


@_norm_backward.register_fake
def _(out, grad_out, grad_normed, gain, seeds, index, dropout):
    width = out.shape[-1]
    sums = out.new_empty(_NORM_BACKWARD.spread(out.numel() // width), 3, width, dtype=torch.float32)
    return torch.empty_like(out), torch.empty_like(out, dtype=grad_normed.dtype), sums


def _save_dropout_norm(ctx, inputs, output):
    _, gain, _, seeds, *ctx.settings = inputs
    ctx.save_for_backward(output[0], gain, seeds)


def _backward_of_dropout_norm(ctx, grad_out, grad_normed):
    out, gain, seeds = ctx.saved_tensors
    _, grad, sums = _norm_backward(out, grad_out, grad_normed, gain, seeds, *ctx.settings)
    grad_gain, grad_shift, _ = sums.sum(0)
    return grad, grad_gain, grad_shift, None, None, None


dropout_norm.register_autograd(_backward_of_dropout_norm, setup_context=_save_dropout_norm)


@torch.library.custom_op("trajectory_transformer::linear_add_norm", mutates_args=())
def linear_add_norm(
    a: Tensor, weight: Tensor, bias: Tensor, x: Tensor, gain: Tensor, shift: Tensor,
    seeds: Tensor, index: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear layer, dropout, residual connection, layer norm: a [B, L, K], x [B, L, width] -> two tensors like x."""
    out, normed = torch.empty_like(x), torch.empty_like(x, dtype=a.dtype)
    num_rows, width, inner = x.numel() // x.shape[-1], x.shape[-1], a.shape[-1]
    blocks = (_OUT if inner == width else _DOWN).of(a)
    add_norm_forward[(triton.cdiv(num_rows, blocks.rows),)](
        a, weight, bias, x, gain, shift, seeds, out, normed, index, num_rows, *_dropout_args(dropout),
        inner=inner, width=width, block_rows=blocks.rows, block_inner=min(blocks.columns, inner), drops=dropout > 0,
        **blocks.options,
    )  # fmt: skip
    return out, normed


@linear_add_norm.register_fake
def _(a, weight, bias, x, gain, shift, seeds, index, dropout):
    return torch.empty_like(x), torch.empty_like(x, dtype=a.dtype)


def _save_add_norm(ctx, inputs, output):
    a, weight, bias, _, gain, _, seeds, *ctx.settings = inputs
    ctx.save_for_backward(a, weight, bias, gain, seeds, output[0])


def _backward_of_add_norm(ctx, grad_out, grad_normed):
    a, weight, bias, gain, seeds, out = ctx.saved_tensors
    grad_x, grad_branch, sums = _norm_backward(out, grad_out, grad_normed, gain, seeds, *ctx.settings)
    grad_gain, grad_shift, grad_bias = sums.sum(0)
    rows = grad_branch.flatten(0, 1)
    grad_weight = rows.t() @ a.flatten(0, 1)
    grad_a = (rows @ weight).view_as(a)
    return grad_a, grad_weight, grad_bias.to(bias.dtype), grad_x, grad_gain, grad_shift, None, None, None


linear_add_norm.register_autograd(_backward_of_add_norm, setup_context=_save_add_norm)


@torch.library.custom_op("trajectory_transformer::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Linear layer and GELU: x [B, L, width], weight [N, width] -> derivative and value of the GELU [B, L, N]."""
    num_rows, width, num_columns = x.numel() // x.shape[-1], x.shape[-1], len(weight)
    slope = x.new_empty(*x.shape[:-1], num_columns)
    after = torch.empty_like(slope)
    blocks = _GELU.of(x)
    gelu_forward[(num_columns // blocks.columns, blocks.spread(num_rows))](
        x, weight, bias, slope, after, num_rows, num_columns,
        width=width, block_rows=blocks.rows, block_columns=blocks.columns, **blocks.options,
    )  # fmt: skip
    return slope, after


@_linear_gelu.register_fake
def _(x, weight, bias):
    hidden = x.new_empty(*x.shape[:-1], len(weight))
    return hidden, torch.empty_like(hidden)


@torch.library.custom_op("trajectory_transformer::gelu_backward", mutates_args=())
def _gelu_backward(grad: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the GELU's input, given that of the next layer's output, and partial sums for the bias."""
    num_rows, width, num_columns = grad.numel() // grad.shape[-1], grad.shape[-1], slope.shape[-1]
    blocks = _GELU_BACKWARD.of(grad)
    grad_before = torch.empty_like(slope)
    sums = grad.new_empty(blocks.spread(num_rows), num_columns, dtype=torch.float32)
    gelu_backward[(num_columns // blocks.columns, len(sums))](
        grad.contiguous(), weight, slope, grad_before, sums, num_rows, num_columns,
        width=width, block_rows=blocks.rows, block_columns=blocks.columns, **blocks.options,
    )  # fmt: skip
    return grad_before, sums


@_gelu_backward.register_fake
def _(grad, weight, slope):
    programs = _GELU_BACKWARD.of(grad).spread(grad.numel() // grad.shape[-1])
    return torch.empty_like(slope), grad.new_empty(programs, slope.shape[-1], dtype=torch.float32)


@torch.library.custom_op("trajectory_transformer::mlp", mutates_args=())
def mlp(
    h: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, x: Tensor, gain: Tensor, shift: Tensor,
    seeds: Tensor, index: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Linear layer, GELU, linear layer, dropout, residual connection, layer norm: h, x -> two tensors like x.

    Also returns the derivative and the value of the GELU [B, L, N], for the backward pass.
    """
    slope, after = _linear_gelu(h, up, up_bias)
    out, normed = linear_add_norm(after, down, down_bias, x, gain, shift, seeds, index, dropout)
    return out, normed, slope, after


@mlp.register_fake
def _(h, up, up_bias, down, down_bias, x, gain, shift, seeds, index, dropout):
    hidden = h.new_empty(*h.shape[:-1], len(up))
    return torch.empty_like(x), torch.empty_like(h), hidden, torch.empty_like(hidden)


def _save_mlp(ctx, inputs, output):
    h, up, up_bias, down, down_bias, _, gain, _, seeds, *ctx.settings = inputs
    out, _, slope, after = output
    ctx.save_for_backward(h, up, up_bias, down, down_bias, gain, seeds, out, slope, after)


def _backward_of_mlp(ctx, grad_out, grad_normed, _, __):
    h, up, up_bias, down, down_bias, gain, seeds, out, slope, after = ctx.saved_tensors
    grad_x, grad_branch, sums = _norm_backward(out, grad_out, grad_normed, gain, seeds, *ctx.settings)
    grad_gain, grad_shift, grad_down_bias = sums.sum(0)
    grad_before, up_sums = _gelu_backward(grad_branch, down, slope)
    grad_down = grad_branch.flatten(0, 1).t() @ after.flatten(0, 1)
    hidden = grad_before.flatten(0, 1)
    grad_up = hidden.t() @ h.flatten(0, 1)
    grad_h = (hidden @ up).view_as(h)
    return (
        grad_h, grad_up, up_sums.sum(0).to(up_bias.dtype), grad_down, grad_down_bias.to(down_bias.dtype), grad_x,
        grad_gain, grad_shift, None, None, None,
    )  # fmt: skip


mlp.register_autograd(_backward_of_mlp, setup_context=_save_mlp)
