"""Log-probabilities of the policies' distributions."""

import math

import torch
from torch import Tensor


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian: [..., A] -> [...]."""
    scaled = (actions - mean) * torch.exp(-log_std)
    return -(0.5 * scaled.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def squashed_log_prob(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of tanh(raw), where `raw` is drawn from a diagonal Gaussian: [..., A] -> [...]."""
    # log(1 - tanh(x)^2) in a form that does not overflow.
    slope = 2.0 * (math.log(2.0) - raw - torch.nn.functional.softplus(-2.0 * raw))
    return gaussian_log_prob(raw, mean, log_std) - slope.sum(dim=-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL divergence of one diagonal Gaussian from another: [..., A] -> [...]."""
    scaled = (mean - other_mean).square() + torch.exp(2.0 * log_std)
    return (other_log_std - log_std + 0.5 * scaled * torch.exp(-2.0 * other_log_std) - 0.5).sum(dim=-1)
