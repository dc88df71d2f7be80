"""Behaviour cloning: a deterministic policy that predicts the recorded action (Pomerleau, 1991)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Preset, Settings, Sizes, TransitionAlgorithm
from trajectory_transformer.baselines.data import Batch, States
from trajectory_transformer.baselines.networks import Group, Network, init_networks, mlp


@dataclass(frozen=True, kw_only=True)
class BCSettings(Settings):
    """Settings of the BC baseline in CORL: two hidden layers of 256, Adam at 3e-4, standardised states.

    The policy is deterministic, tanh(network), trained by the mean squared error.
    """

    states: States = "standard"


class BC(TransitionAlgorithm):
    """Minimises the squared distance to the recorded action."""

    needs_rewards: ClassVar[bool] = False
    losses = ("loss",)

    def __init__(self, settings: BCSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights."""
        self.settings = settings
        network = Network((sizes.observation_dim, *settings.hidden, sizes.action_dim))
        tensors = init_networks({"policy": network}, seeds)
        self.actor = Group(tensors, settings.learning_rate, device=device)
        self.groups = {"actor": self.actor}

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of each learner [S]."""
        return (self.act(batch.observations) - batch.actions).square().mean(dim=(1, 2))

    def update(self, batch: Batch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step."""
        loss = self.loss(batch)
        self.actor.minimize(loss.sum())
        return {"actor": loss.detach()}

    def act(self, observations: Tensor) -> Tensor:
        """Actions [S, E, A] for observations [S, E, O]."""
        return torch.tanh(mlp(self.actor.tensors, "policy", observations))


PRESETS = {"bc": Preset(BC, BCSettings())}
