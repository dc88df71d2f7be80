"""The Triton kernels as torch operations, with their gradients; see `training.kernels` for what they compute.

Only `training.fast` imports this file, and only where there is a GPU.
"""

import math

import torch
import triton
from torch import Tensor

from trajectory_transformer.training.kernels import (
    add_norm_backward,
    add_norm_forward,
    attention_backward_columns,
    attention_backward_rows,
    attention_forward,
    gelu_backward,
    gelu_forward,
)

_LOG2_E = 1.0 / math.log(2.0)

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
    attention_forward[(triton.cdiv(length, rows), batch * heads)](
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
    attention_backward_rows[(triton.cdiv(length, rows), batch * heads)](
        qkv, readable, seeds, out, weight, grad, common, grad_qkv, index, length, *scales,
        **sizes, block_rows=rows, block_columns=columns, num_warps=warps,
    )  # fmt: skip
    rows, columns, warps = _COLUMNS
    attention_backward_columns[(triton.cdiv(length, columns), batch * heads)](
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
    add_norm_forward[(triton.cdiv(num_rows, rows),)](
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
    add_norm_backward[(programs,)](
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
    gelu_forward[(num_columns // columns, triton.cdiv(num_rows, rows))](
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
    gelu_backward[(num_columns // columns, triton.cdiv(num_rows, rows))](
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
