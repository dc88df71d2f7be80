"""The kernels of hidden layers, against plain operations in float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trajectory_transformer.baselines.networks import hidden_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def gradients(out: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    slope = torch.linspace(-1.0, 1.0, out[0].numel(), device=out.device).view(out.shape[1:])
    return list(torch.autograd.grad((out.double() * slope.double()).sum(), [*weights, *biases]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("sizes", [(23, 256, 256, 256), (5, 16, 64), (37, 512, 32)])
def test_layers_and_gradients_equal_plain_ones(
    sizes: tuple[int, ...], dtype: torch.dtype, error: float, compiled: bool
) -> None:
    from trajectory_transformer.gpu.training import perceptrons

    torch.manual_seed(0)
    pairs = list(pairwise(sizes))
    weights = [(torch.randn(3, a, b, device="cuda") / a**0.5).requires_grad_() for a, b in pairs]
    biases = [(0.1 * torch.randn(3, 1, b, device="cuda")).requires_grad_() for _, b in pairs]
    x = torch.randn(3, 1000, sizes[0], device="cuda").to(dtype)
    layers = torch.compile(perceptrons.hidden_layers, dynamic=False) if compiled else perceptrons.hidden_layers
    found = layers(x, weights, biases)
    rounded = [weight.detach().to(dtype).double().requires_grad_() for weight in weights]
    exact = [bias.detach().double().requires_grad_() for bias in biases]
    expected = hidden_layers(x.double(), rounded, exact)
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).norm() < error * expected.norm()
    theirs = gradients(expected, rounded, exact)
    for ours, other in zip(gradients(found, weights, biases), theirs, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - other).norm() < 2 * error * other.norm()
