"""The optimiser's parameter groups and learning rate."""

import math

import torch
from torch import nn

from trajectory_transformer.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig, *, recorded: bool = False) -> torch.optim.AdamW:
    """AdamW with weight decay on the weights of linear layers only, as the authors' code.

    For steps recorded as a CUDA graph the rate is a tensor on the device: a number would be recorded with them.
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed = [parameter for parameter in model.parameters() if id(parameter) in linear]
    others = [parameter for parameter in model.parameters() if id(parameter) not in linear]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    device = next(model.parameters()).device
    rate = torch.tensor(config.learning_rate, device=device) if recorded else config.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, fused=True, capturable=recorded)


def total_steps(config: TrainConfig, num_windows: int) -> int:
    """Optimiser steps of a run over so many windows."""
    if config.steps is not None:
        return config.steps
    return max(1, round(config.epochs * (config.epoch_size or num_windows) / config.batch_size))


def warmup_steps(config: TrainConfig, num_windows: int) -> int:
    """Steps of linear warm-up."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return min(-(-num_windows // config.batch_size), total_steps(config, num_windows) // 10)


def learning_rate(step: int, *, peak: float, warmup: int, total: int, final_share: float) -> float:
    """Rate of a step: a linear climb over `warmup` steps, then one cosine down to a share of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * progress)))
