"""What an algorithm provides; everything else (data, batches, graphs, run folders, policies) is shared.

To add an algorithm, write one file with a settings class, a subclass of `TransitionAlgorithm` (or `Algorithm`, if it
learns from more than single transitions) and its presets, and list the presets in `baselines/__init__.py`.

All tensors have a leading dimension of S learners, which differ in their seeds and perhaps in their datasets. Learners
never mix: a loss is a mean over the batch for each learner, and `Group.minimize` takes their sum.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.baselines.data import Batch, Learner, Rewards, Rows, Scaling, States, Transitions
from trajectory_transformer.baselines.networks import Copy, Group
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, FloatArray
from trajectory_transformer.rollout import Step

BatchT = TypeVar("BatchT")
Actor = Callable[[Step], FloatArray]
"""What E environments show -> actions [E, A] in the units of the dataset."""


class Sizes(NamedTuple):
    """Dimensions of the data."""

    observation_dim: int  # with the goal
    action_dim: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all algorithms have. A subclass adds its own and sets the defaults of its paper."""

    steps: int = 1_000_000
    """Training steps."""
    batch_size: int = 256
    """Rows of the data per step."""
    learning_rate: float = 3e-4
    """Learning rate of Adam, for all networks that have none of their own."""
    hidden: tuple[int, ...] = (256, 256)
    """Sizes of the hidden layers."""
    states: States = "raw"
    """raw: observations as recorded. standard: each dimension with mean 0 and standard deviation 1 in the data."""
    rewards: Rewards = "raw"
    """raw: as recorded. return-range: multiplied by 1000 / (best - worst return of the data). minus-one: minus 1.
    centered: 4 times the distance from 0.5, so rewards of 0 and 1 become -2 and 2."""
    action_margin: float = 0.0
    """How far the output of a policy may exceed the limits of actions, as a share of their range; actions are clipped.

    A squashed Gaussian needs a margin: without one, recorded actions at a limit would be infinite before squashing.
    """
    tf32: bool = False
    """Round the inputs of matmuls to TF32 on a GPU, for tensor cores."""

    def __post_init__(self) -> None:
        """Refuse values that no algorithm can use."""
        require(self.steps >= 1, "steps must be at least 1", self.steps)
        require(self.batch_size >= 1, "batch_size must be at least 1", self.batch_size)
        require(self.learning_rate > 0, "learning_rate must be above 0", self.learning_rate)
        require(min(self.hidden, default=0) >= 1, "hidden must be sizes of at least 1", self.hidden)
        require(0 <= self.action_margin < 10, "action_margin must lie in [0, 10)", self.action_margin)
        require(self.states in ("raw", "standard"), "states must be raw or standard", self.states)
        known = get_args(Rewards)
        require(self.rewards in known, f"rewards must be one of {', '.join(known)}", self.rewards)


class Algorithm(ABC, Generic[BatchT]):
    """Networks, losses and actions of S learners."""

    needs_rewards: ClassVar[bool] = True
    losses: ClassVar[tuple[str, ...]] = ()
    """Methods that `torch.compile` may replace: functions of tensors without side effects."""

    settings: Settings
    groups: dict[str, Group]  # what optimizers update; saved in the checkpoint
    copies: Mapping[str, Copy] = {}  # target networks; saved to resume
    noise: int = 0  # random numbers that a step needs for each row of its batch

    @abstractmethod
    def __init__(self, settings: Settings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights, those of a learner a function of its seed."""

    @abstractmethod
    def rows(
        self, datasets: Sequence[Dataset], learners: Sequence[Learner], scaling: Scaling, device: torch.device
    ) -> Rows[BatchT]:
        """The data on the device, to draw batches from."""

    def variant(self, step: int) -> str:
        """Which kind of step this is, for algorithms with several: every kind is captured as a CUDA graph."""
        del step
        return ""

    @abstractmethod
    def update(self, batch: BatchT, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step and return what to report, each [S].

        `noise` [S, B, `noise`] is uniform in (0, 1); `normal` makes it Gaussian. Nothing here may wait for the device
        or depend on values there: the step is captured once and replayed.
        """

    @abstractmethod
    def act(self, observations: Tensor) -> Tensor:
        """Best actions [S, E, A] in [-1, 1] for scaled observations [S, E, O]."""

    def make_actor(self, scaling: Scaling) -> Actor:
        """How a single learner acts in environments; override it for policies with a memory."""
        return memoryless(self.act, scaling)

    def q_values(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Values [S, E] of scaled observations [S, E, O] and actions [S, E, A], for algorithms with a critic."""
        raise ValueError(f"{type(self).__name__} has no Q function; train iql, cql or td3bc")

    def compile(self) -> None:
        """Compile losses and optimizers for a GPU, for the shapes that they are called with."""
        for name in self.losses:
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))
        for group in self.groups.values():
            group.compile()


class TransitionAlgorithm(Algorithm[Batch]):
    """An algorithm that learns from single transitions."""

    def rows(
        self, datasets: Sequence[Dataset], learners: Sequence[Learner], scaling: Scaling, device: torch.device
    ) -> Transitions:
        """All transitions of the datasets."""
        return Transitions(datasets, learners, scaling, device)


def memoryless(act: Callable[[Tensor], Tensor], scaling: Scaling) -> Actor:
    """Act on the current observation and goal alone: `act` maps [1, E, O] to [1, E, A], both scaled."""

    @torch.no_grad()
    def actor(step: Step) -> FloatArray:
        mean = scaling.observation_mean  # [1, O with the goal that the learner knows]
        seen = np.concatenate([step.observations, step.goals], axis=1)[:, : mean.shape[1]]
        observations = scaling.observations(torch.from_numpy(seen)[None].to(mean.device))
        actions: FloatArray = scaling.real_actions(act(observations))[0].cpu().numpy()
        return actions

    return actor


def normal(uniform: Tensor) -> Tensor:
    """Standard Gaussian numbers from uniform ones in (0, 1)."""
    return torch.erfinv(2.0 * uniform - 1.0).mul(math.sqrt(2.0))


@dataclass(frozen=True)
class Preset:
    """An algorithm with the settings of its paper."""

    algorithm: type[Algorithm[Any]]
    settings: Settings
