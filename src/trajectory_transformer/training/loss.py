"""The loss of a batch, and how fast a machine may compute it: precision and compilation."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import Batch, loss_weights

Loss = Callable[[Batch], tuple[Tensor, Tensor]]


def weighted_loss(model: TrajectoryModel, batch: Batch, action_weight: float) -> tuple[Tensor, Tensor]:
    """Mean weighted cross-entropy of a batch, and each prediction's own [B, L']; weightless ones count in the mean."""
    logits = model.gpt(batch.tokens[:, :-1], model.gpt.encode_map(batch.maps))
    num_predicted = logits.shape[1]
    targets = batch.tokens[:, -num_predicted:]
    weights = loss_weights(batch, model.layout, model.tokens, action_weight)[:, -num_predicted:]
    by_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    return (by_token * weights).mean(), by_token


def make_loss(model: TrajectoryModel, config: TrainConfig) -> Loss:
    """`weighted_loss` in the precision, and compiled or not, as the settings ask for on the model's device."""
    low = uses_bf16(config, model.device)

    def loss(tokens: Tensor, real: Tensor, maps: Tensor | None) -> tuple[Tensor, Tensor]:
        # Weights, their gradients and the cross-entropy stay float32; only the products in between are rounded.
        with torch.autocast(model.device.type, torch.bfloat16) if low else nullcontext():
            return weighted_loss(model, Batch(tokens, real, maps), config.action_weight)

    run = torch.compile(loss) if uses_compile(config, model.device) else loss
    return lambda batch: run(batch.tokens, batch.real, batch.maps)


def uses_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether products are computed in bfloat16; `auto`: on GPUs that have it. On a CPU it costs time."""
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return config.precision == "bf16"


def uses_compile(config: TrainConfig, device: torch.device) -> bool:
    """Whether the loss is compiled; `auto`: on GPUs, where the compiler has what it needs. A CPU gains nothing."""
    if config.compile == "auto":
        has_compiler = bool(os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))
        return device.type == "cuda" and has_compiler and importlib.util.find_spec("triton") is not None
    return config.compile


def losses_by_kind(
    by_token: Tensor, batch: Batch, layout: TokenLayout, add_up: Callable[[Tensor], Tensor] = lambda totals: totals
) -> dict[str, float]:
    """Mean cross-entropy of the real observation, action, reward and value tokens: by_token [B, L'].

    `add_up` adds the totals [2, kinds] of other processes, each of which has its share of the batch.
    """
    num_predicted = by_token.shape[1]
    total = batch.tokens.shape[1]
    slots = torch.tensor([layout.slot(position) for position in range(total - num_predicted, total)])
    real = batch.real[:, -num_predicted:]
    kinds = {
        "observation": slots < layout.observation_dim,
        "action": (slots >= layout.action.start) & (slots < layout.action.stop),
    }
    if layout.rewards:
        kinds |= {"reward": slots == layout.reward, "value": slots == layout.value}
    counted = [real & chosen.to(real.device) for chosen in kinds.values()]
    sums = torch.stack([(by_token * chosen).sum() for chosen in counted])
    counts = torch.stack([chosen.sum() for chosen in counted])
    sums, counts = add_up(torch.stack([sums, counts.to(sums.dtype)]))
    return dict(zip(kinds, (sums / counts.clamp(min=1)).tolist(), strict=True))
