"""The optimizer, its parameter groups, and the learning rate schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.gpt import GPT

GRAD_CLIP = 1.0
"""Largest gradient norm."""
DEFAULT_EPOCHS, MIN_STEPS = 2.0, 2000
"""Length of a run for which neither epochs nor steps are given: this many passes, but at least so many steps."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerRecipe:
    """What `train.optimizer` stands for."""

    betas: tuple[float, float]
    weight_decay: float
    final_share: float  # share of the peak learning rate at the end of the cosine


RECIPES = {
    "adamw": OptimizerRecipe(betas=(0.9, 0.95), weight_decay=0.1, final_share=0.1),
    "adam": OptimizerRecipe(betas=(0.9, 0.999), weight_decay=0.0, final_share=0.0),
}


def make_optimizer(model: GPT, config: TrainConfig, *, capturable: bool = False) -> torch.optim.AdamW:
    """AdamW with weight decay on the weights of linear layers and of the output heads, and on nothing else.

    A capturable optimizer keeps its learning rate in a tensor on the device, so that a captured step reads it there.
    """
    recipe = RECIPES[config.optimizer]
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)} | {id(model.heads)}
    decayed = [parameter for parameter in model.parameters() if id(parameter) in matrices]
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrices]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    device = next(model.parameters()).device
    rate = torch.tensor(config.learning_rate, device=device) if capturable else config.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=recipe.betas, fused=True, capturable=capturable)


def optimizer_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Moments and step counts by name, to resume from."""
    return {
        f"{moment}.{name}": value
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state[parameter].items()
    }


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned."""
    for name, parameter in model.named_parameters():
        for moment in _MOMENTS:
            if f"{moment}.{name}" not in tensors:
                continue
            stored, state = tensors[f"{moment}.{name}"], optimizer.state[parameter]
            if moment in state:
                state[moment].copy_(stored)  # in place: it may be a view of one flat tensor
            else:
                state[moment] = stored.to(parameter.device)


def total_steps(config: TrainConfig, num_windows: int) -> int:
    """Optimizer steps of a run over this many windows."""
    if config.steps is not None:
        return config.steps
    epochs, least = (DEFAULT_EPOCHS, MIN_STEPS) if config.epochs is None else (config.epochs, 1)
    return max(least, round(epochs * num_windows / config.batch_size))


def warmup_steps(config: TrainConfig, num_windows: int) -> int:
    """Steps of linear warm-up: by default one pass over the data, at most a tenth of the run."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return min(-(-num_windows // config.batch_size), total_steps(config, num_windows) // 10)


def learning_rate(step: int, *, peak: float, warmup: int, total: int, final_share: float) -> float:
    """Learning rate of a step: linear warm-up, then one cosine down to a share of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * progress)))
