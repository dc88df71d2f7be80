"""Stacked multilayer perceptrons with Gaussian outputs, the networks of a probabilistic ensemble."""

import copy
from collections.abc import Iterable
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BOUND_WEIGHT = 0.01  # of the distance between the bounds of the log-variance in the loss


class GaussianNetworks(nn.Module):
    """K networks with swish layers and a diagonal Gaussian over the outputs; the log-variance has learnt bounds.

    The weights of all networks are stacked, so one batched matmul per layer serves all of them.
    """

    def __init__(
        self, num_networks: int, in_dim: int, out_dim: int, *, num_layers: int, width: int, generator: torch.Generator
    ) -> None:
        """Build with random weights from a generator on the CPU."""
        super().__init__()
        sizes = [in_dim, *[width] * num_layers, 2 * out_dim]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(sizes):
            std = 0.5 / sqrt(fan_in)
            weight = torch.empty(num_networks, fan_in, fan_out)
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(num_networks, 1, fan_out)))
        self.min_log_variance = nn.Parameter(torch.full((num_networks, 1, out_dim), -10.0))
        self.max_log_variance = nn.Parameter(torch.full((num_networks, 1, out_dim), 0.5))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance: inputs [K, B, in] -> two of [K, B, out]."""
        outputs = swish_layers(self.weights, self.biases, inputs)
        return gaussian_outputs(outputs, self.min_log_variance, self.max_log_variance)

    def loss(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Training loss of each network: inputs [K, B, in], targets and weights [K, B, out] -> [K]."""
        # The bounds are drawn together, so that the variance stays bounded where there is no data.
        distance = (self.max_log_variance - self.min_log_variance).mean(dim=(1, 2))
        return self.negative_log_likelihood(inputs, targets, weights) + BOUND_WEIGHT * distance

    def negative_log_likelihood(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Twice the mean negative log-likelihood per dimension, without its constant; shapes as in `loss`."""
        return gaussian_loss(*self.forward(inputs), targets, weights)

    def with_weights(self, state: dict[str, Tensor]) -> "GaussianNetworks":
        """Networks of the same sizes with other weights, and as many networks as these are for."""
        changed = copy.deepcopy(self)
        for name, parameter in changed.named_parameters():
            parameter.data = state[name].clone()
        return changed

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for an Adam with L2 penalty: more on later layers, none on biases and bounds."""
        hidden = [0.25, 0.5, *[0.75] * len(self.weights)][: len(self.weights) - 1]
        groups = [
            {"params": [weight], "weight_decay": weight_decay * share}
            for weight, share in zip(self.weights, [*hidden, 1.0], strict=True)
        ]
        others = [*self.biases, self.min_log_variance, self.max_log_variance]
        return [*groups, {"params": others, "weight_decay": 0.0}]


def swish_layers(weights: Iterable[Tensor], biases: Iterable[Tensor], x: Tensor) -> Tensor:
    """Perceptrons with swish between layers: weights [K, in, out], biases [K, 1, out], x [K, B, in] -> [K, B, out]."""
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(bias, functional.silu(x) if index else x, weight)
    return x


def gaussian_outputs(outputs: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log-variance, the latter within soft bounds: [K, B, 2 D] -> two of [K, B, D]."""
    mean, log_variance = outputs.chunk(2, dim=-1)
    log_variance = high - functional.softplus(high - log_variance)
    return mean, low + functional.softplus(log_variance - low)


def gaussian_loss(mean: Tensor, log_variance: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Twice the mean negative log-likelihood per dimension, without its constant: [K, B, D] -> [K]."""
    each = (mean - targets).square() * torch.exp(-log_variance) + log_variance
    if weights is None:
        return each.mean(dim=(1, 2))
    return (each * weights).sum(dim=(1, 2)) / weights.sum(dim=(1, 2)).clamp(min=1.0)
