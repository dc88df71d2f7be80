"""The hidden layers of many perceptrons at once as a torch operation with a gradient.

`torch.compile` computes a hidden layer by a matmul and a kernel for bias and ReLU, which reads and writes all
activations again. Here both are one kernel, in the backward pass too. Needs triton.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from trajectory_transformer.gpu.training.kernels.perceptron import linear_relu, linear_relu_backward
from trajectory_transformer.gpu.training.operations import Blocks

_FORWARD, _BACKWARD = Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)


def hidden_layers(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Linear layers, each followed by a ReLU: x [N, M, in], weights [N, in, out], biases [N, 1, out] -> [N, M, out].

    Widths of layers are powers of two from 16 to 512. The result has the type of x. There is no gradient of x.
    """
    assert not x.requires_grad, "there is no gradient of x"
    return _hidden_layers(x, [weight.to(x.dtype) for weight in weights], list(biases))[-1]


@torch.library.custom_op("trajectory_transformer::hidden_layers", mutates_args=())
def _hidden_layers(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Outputs of every layer."""
    outs = []
    for weight, bias in zip(weights, biases, strict=True):
        networks, inner, width = weight.shape
        blocks, num_rows = _FORWARD.of(x), x.shape[1]
        out = x.new_empty(networks, num_rows, width)
        linear_relu[(triton.cdiv(num_rows, blocks.rows), networks)](
            x.contiguous(), weight.contiguous(), bias.contiguous(), out, num_rows,
            inner=inner, padded=max(triton.next_power_of_2(inner), 16), width=width,
            block_rows=blocks.rows, block_columns=min(blocks.columns, width), **blocks.options,
        )  # fmt: skip
        outs.append(out)
        x = out
    return outs


@_hidden_layers.register_fake
def _(x, weights, biases):
    return [x.new_empty(len(weight), x.shape[1], weight.shape[2]) for weight in weights]


@torch.library.custom_op("trajectory_transformer::linear_relu_backward", mutates_args=())
def _linear_relu_backward(grad: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of what the ReLU that made x received, given that of x weight + bias, and its sums over blocks."""
    networks, inner, width = weight.shape
    blocks, num_rows = _BACKWARD.of(grad), grad.shape[1]
    grad_x = torch.empty_like(x)
    sums = grad.new_empty(networks, triton.cdiv(num_rows, blocks.rows), inner, dtype=torch.float32)
    linear_relu_backward[(sums.shape[1], networks)](
        grad.contiguous(), weight.contiguous(), x, grad_x, sums, num_rows,
        inner=inner, width=width, block_rows=blocks.rows, block_columns=min(blocks.columns, inner), **blocks.options,
    )  # fmt: skip
    return grad_x, sums


@_linear_relu_backward.register_fake
def _(grad, weight, x):
    networks, inner, _ = weight.shape
    blocks = triton.cdiv(grad.shape[1], _BACKWARD.of(grad).rows)
    return torch.empty_like(x), grad.new_empty(networks, blocks, inner, dtype=torch.float32)


def _save(ctx, inputs, output):
    x, weights, _ = inputs
    ctx.save_for_backward(x, *weights, *output)


def _backward(ctx, grads):
    x, *saved = ctx.saved_tensors
    weights, outs = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    # Plain operations, which the compiler joins with those that made the gradient.
    grad = torch.where(outs[-1] > 0, grads[-1], 0.0)
    sums = grad.sum(dim=1, keepdim=True, dtype=torch.float32)
    grad_weights, grad_biases = [], []
    for layer in reversed(range(len(weights))):
        below = outs[layer - 1] if layer else x
        grad_weights.append(torch.bmm(below.mT, grad))
        grad_biases.append(sums.sum(dim=1, keepdim=True))
        if layer:
            grad, sums = _linear_relu_backward(grad, weights[layer], below)
    return None, grad_weights[::-1], grad_biases[::-1]


_hidden_layers.register_autograd(_backward, setup_context=_save)
