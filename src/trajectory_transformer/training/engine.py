"""The engine seam: what turns a batch into one optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import GRAD_CLIP, load_optimizer_state, make_optimizer, optimizer_state
from trajectory_transformer.training.parallel import World


@dataclass(frozen=True)
class Outcome:
    """What a step leaves on the device; the next step may overwrite it."""

    loss: Tensor
    by_token: Tensor  # [B, L'], cross-entropy of each prediction
    norm: Tensor  # of the gradients, before clipping


class Engine(Protocol):
    """Loss, gradients and update of a model."""

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Take one optimizer step on a batch."""

    def state(self) -> dict[str, Tensor]:
        """State of the optimizer by name, to resume from."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state`, after new weights were loaded into the model."""


class EagerEngine:
    """Float32, operation by operation, in one process or as one of several."""

    def __init__(self, model: TrajectoryModel, config: TrainConfig, world: World | None = None) -> None:
        """Train a model."""
        self._model = model
        self._config = config
        self._world = world or World()
        self._parameters = list(model.gpt.parameters())
        self._optimizer = make_optimizer(model.gpt, config)

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Take one optimizer step on a batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return self.compute(batch)

    def compute(self, batch: Batch) -> Outcome:
        """Forward, backward and update."""
        loss, by_token = self.forward(batch)
        self.backward(loss)
        return Outcome(loss.detach(), by_token.detach(), self.update())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the cross-entropy of each prediction [B, L']."""
        return weighted_loss(self._model, batch, self._config.action_weight)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss of the whole batch."""
        for parameter, grad in zip(self._parameters, torch.autograd.grad(loss, self._parameters), strict=True):
            parameter.grad = grad.contiguous()
        self._world.average_gradients(self._parameters)

    def update(self) -> Tensor:
        """Clip the gradients and take one step of the optimizer; returns their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, GRAD_CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """State of the optimizer by name, to resume from."""
        return optimizer_state(self._model.gpt, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state`."""
        load_optimizer_state(self._model.gpt, self._optimizer, tensors)
