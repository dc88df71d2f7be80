"""The stacked Gaussian networks against one network at a time and formulas by hand."""

import math

import pytest
import torch
from torch.nn import functional

from trajectory_transformer.pets.networks import BOUND_WEIGHT, GaussianNetworks


@pytest.fixture
def networks() -> GaussianNetworks:
    """Three networks of three hidden layers, with random weights, biases and bounds."""
    generator = torch.Generator().manual_seed(0)
    made = GaussianNetworks(3, 4, 2, num_layers=3, width=8, generator=generator)
    for parameter in (*made.biases, made.min_log_variance, made.max_log_variance):
        parameter.data += torch.randn(parameter.shape, generator=generator)
    return made


def inputs_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 5, 4, generator=generator), torch.randn(3, 5, 2, generator=generator)


def test_stacked_networks_equal_single_networks(networks: GaussianNetworks) -> None:
    inputs, _ = inputs_and_targets()
    means, log_variances = networks(inputs)
    for k in range(3):
        x = inputs[k]
        for layer in range(4):
            x = x @ networks.weights[layer][k] + networks.biases[layer][k]
            x = x * torch.sigmoid(x) if layer < 3 else x
        low, high = networks.min_log_variance[k], networks.max_log_variance[k]
        bounded = high - functional.softplus(high - x[:, 2:])
        torch.testing.assert_close(means[k], x[:, :2])
        torch.testing.assert_close(log_variances[k], low + functional.softplus(bounded - low))


def test_log_variance_stays_within_its_bounds(networks: GaussianNetworks) -> None:
    inputs, _ = inputs_and_targets()
    _, log_variances = networks(1e4 * inputs)
    slack = math.log(2.0)  # of a softplus at its bend
    assert (log_variances >= networks.min_log_variance - 1e-4).all()
    assert (log_variances <= networks.max_log_variance + slack).all()


def test_loss_is_the_gaussian_likelihood(networks: GaussianNetworks) -> None:
    inputs, targets = inputs_and_targets()
    means, log_variances = networks(inputs)
    # torch leaves out the constant and the factor of 2 as well: 0.5 * (log variance + error^2 / variance).
    expected = 2 * functional.gaussian_nll_loss(means, targets, log_variances.exp(), reduction="none").mean(dim=(1, 2))
    distance = (networks.max_log_variance - networks.min_log_variance).mean(dim=(1, 2))
    torch.testing.assert_close(networks.loss(inputs, targets), expected + BOUND_WEIGHT * distance)


def test_targets_of_weight_zero_do_not_count(networks: GaussianNetworks) -> None:
    inputs, targets = inputs_and_targets()
    weights = torch.ones_like(targets)
    weights[:, 1:4, 0] = 0.0
    changed = torch.where(weights > 0, targets, 1e3)
    loss = networks.negative_log_likelihood(inputs, targets, weights)
    torch.testing.assert_close(loss, networks.negative_log_likelihood(inputs, changed, weights))
    means, log_variances = networks(inputs)
    each = (means - targets).square() * torch.exp(-log_variances) + log_variances
    torch.testing.assert_close(loss, torch.stack([row[weights[0] > 0].mean() for row in each]))


def test_weight_decay_is_that_of_the_paper(networks: GaussianNetworks) -> None:
    made = GaussianNetworks(1, 3, 2, num_layers=4, width=5, generator=torch.Generator())
    shares = [group["weight_decay"] for group in made.parameter_groups(1e-4)]
    assert shares == pytest.approx([0.000025, 0.00005, 0.000075, 0.000075, 0.0001, 0.0])
    counted = {id(parameter) for group in networks.parameter_groups(1.0) for parameter in group["params"]}
    assert counted == {id(parameter) for parameter in networks.parameters()}
