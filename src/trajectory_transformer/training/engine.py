"""What a training step computes, whatever the precision; and a step recorded as one CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch
from trajectory_transformer.training.loss import make_loss
from trajectory_transformer.training.parallel import World


class Engine(Protocol):
    """Loss, gradients and update of a model."""

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update."""

    def refresh(self) -> None:
        """Take note of weights that were loaded."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and each prediction's own [B, L']."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of the whole batch's loss."""

    def update(self) -> Tensor:
        """One step of the optimiser; returns the norm that the gradients had."""


class PlainEngine:
    """The model as it stands, with torch's own optimiser; alone or as one of several processes."""

    def __init__(self, model: TrajectoryModel, optimizer: torch.optim.AdamW, config: TrainConfig, world: World) -> None:
        """Work on a model."""
        self._parameters = list(model.gpt.parameters())
        self._optimizer = optimizer
        self._clip = config.grad_clip
        self._world = world
        self.loss: Callable[[Batch], tuple[Tensor, Tensor]] = make_loss(model, config)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update."""
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a recorded step reads it from where it is
            else:
                group["lr"] = rate

    def refresh(self) -> None:
        """Nothing is kept of the weights."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of the whole batch's loss."""
        for parameter, grad in zip(self._parameters, torch.autograd.grad(loss, self._parameters), strict=True):
            parameter.grad = grad.contiguous()  # as the parameter is
        self._world.average_gradients(self._parameters)

    def update(self) -> Tensor:
        """One step of the optimiser; returns the norm that the gradients had."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm


@dataclass(frozen=True)
class Outcome:
    """What a step leaves on the device; a recorded step overwrites it the next time."""

    batch: Batch
    loss: Tensor
    by_token: Tensor  # [B, L']
    norm: Tensor
