"""The data of baselines: transitions of all episodes on the device, scaled once, gathered there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.data.episode import Dataset, Episode, FloatArray

B = TypeVar("B", covariant=True)


class Learner(NamedTuple):
    """One of the S trainings that share a step: its seed, and which of the datasets it learns from."""

    seed: int
    dataset: int = 0


class Rows(Protocol[B]):
    """What batches are drawn from."""

    offsets: Tensor  # [S], first row of each learner's dataset
    counts: Tensor  # [S], its number of rows

    def gather(self, index: Tensor) -> B:
        """The batch of rows [S, B]."""


@dataclass(frozen=True)
class Batch:
    """Transitions of S learners. Observations include the goal; all values are scaled."""

    observations: Tensor  # [S, B, O]
    actions: Tensor  # [S, B, A], in [-1, 1]
    rewards: Tensor  # [S, B]
    next_observations: Tensor  # [S, B, O]
    continues: Tensor  # [S, B], 0 where the task ended, else 1; a truncated episode continues


@dataclass(frozen=True)
class Scaling:
    """How values of the dataset map to those that networks see, per learner; fitted on the learner's dataset."""

    observation_mean: Tensor  # [S, O]
    observation_std: Tensor  # [S, O]
    action_middle: Tensor  # [S, A]
    action_range: Tensor  # [S, A], half the distance between the limits, and the margin
    action_limit: Tensor  # [S], where the upper limits lie after scaling; 1 without a margin
    reward_scale: Tensor  # [S]
    reward_shift: Tensor  # [S], added after scaling

    def to(self, device: torch.device) -> "Scaling":
        """The same on another device."""
        return Scaling(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def take(self, learners: Sequence[int]) -> "Scaling":
        """That of some of the learners, by index."""
        return Scaling(**{field.name: getattr(self, field.name)[list(learners)] for field in fields(self)})

    def observations(self, values: Tensor) -> Tensor:
        """Scale observations with their goals: [S, E, O] -> [S, E, O]."""
        return (values - self.observation_mean[:, None]) / self.observation_std[:, None]

    def actions(self, values: Tensor) -> Tensor:
        """Scale actions to [-1, 1] or, with a margin, to less: [S, E, A] -> [S, E, A]."""
        return (values - self.action_middle[:, None]) / self.action_range[:, None]

    def real_actions(self, values: Tensor) -> Tensor:
        """Actions in the units of the dataset, clipped to the limits: [S, E, A] -> [S, E, A]."""
        limit = self.action_limit[:, None, None]
        return values.clamp(-limit, limit) * self.action_range[:, None] + self.action_middle[:, None]


States = Literal["raw", "standard"]
Rewards = Literal["raw", "return-range", "minus-one", "centered"]


def fit_scaling(
    datasets: Sequence[Dataset], learners: Sequence[Learner], states: States, rewards: Rewards, margin: float = 0.0
) -> Scaling:
    """Fit the scaling of each dataset, and give each learner that of its own; `margin` is that of the settings."""
    fitted = [_fit_one(dataset, states, rewards, margin) for dataset in datasets]
    chosen = [fitted[learner.dataset] for learner in learners]
    names = [field.name for field in fields(Scaling)]
    return Scaling(**{name: torch.stack([getattr(each, name) for each in chosen]) for name in names})


def _fit_one(dataset: Dataset, states: States, rewards: Rewards, margin: float) -> Scaling:
    """The scaling of one dataset, without the dimension of learners."""
    observations = np.concatenate([with_goal(episode)[:-1] for episode in dataset]).astype(np.float64)
    mean, std = np.zeros(observations.shape[1]), np.ones(observations.shape[1])
    if states == "standard":
        mean, std = observations.mean(axis=0), observations.std(axis=0) + 1e-3
    low, high = action_limits(dataset)
    scale, shift = 1.0, 0.0
    if rewards == "return-range":
        returns = [episode.total_reward for episode in dataset]
        # With equal returns there is no scale to choose.
        scale = 1000.0 / (max(returns) - min(returns)) if max(returns) > min(returns) else 1.0
    elif rewards == "minus-one":
        shift = -1.0
    elif rewards == "centered":
        scale, shift = 4.0, -2.0
    parts = (mean, std, (low + high) / 2, (1 + margin) * (high - low) / 2, 1 / (1 + margin), scale, shift)
    return Scaling(*(torch.from_numpy(np.asarray(part, np.float32)) for part in parts))


def action_limits(dataset: Dataset) -> tuple[FloatArray, FloatArray]:
    """Lower and upper limits of actions: -1 and 1 if all actions lie there, else those of the data."""
    actions = [episode.actions for episode in dataset]
    low = np.min([each.min(axis=0) for each in actions], axis=0)
    high = np.max([each.max(axis=0) for each in actions], axis=0)
    if (low >= -1).all() and (high <= 1).all():
        return -np.ones_like(low), np.ones_like(high)
    constant = high <= low  # any width scales a constant
    return np.where(constant, low - 1, low), np.where(constant, high + 1, high)


def with_goal(episode: Episode) -> FloatArray:
    """Observations [T + 1, O] of an episode, followed by its goal if it has one."""
    if episode.goal is None:
        return episode.observations
    goals = np.broadcast_to(episode.goal, (len(episode.observations), episode.goal.size))
    return np.concatenate([episode.observations, goals], axis=1)


class StepTable(ABC):
    """All steps of some datasets as one table on the device, one row each; subclasses say what a row holds."""

    def __init__(
        self, datasets: Sequence[Dataset], learners: Sequence[Learner], scaling: Scaling, device: torch.device
    ) -> None:
        """Make the rows and send them to the device."""
        first_learner = {learner.dataset: index for index, learner in reversed(list(enumerate(learners)))}
        tables = [
            self.table(dataset, scaling.take([first_learner[index]]))
            for index, dataset in enumerate(datasets)
            if index in first_learner
        ]
        counts = dict(zip(sorted(first_learner), map(len, tables), strict=True))
        offsets = {index: sum(counts[other] for other in counts if other < index) for index in counts}
        self.observation_dim = int(scaling.observation_mean.shape[1])
        self.action_dim = int(scaling.action_middle.shape[1])
        self.offsets = torch.tensor([offsets[learner.dataset] for learner in learners], device=device)
        self.counts = torch.tensor([counts[learner.dataset] for learner in learners], device=device)
        self._table = torch.cat(tables).to(device)

    @abstractmethod
    def table(self, dataset: Dataset, scaling: Scaling) -> Tensor:
        """The rows of a dataset [N, D], episode by episode; `scaling` is that of one of its learners."""


class Transitions(StepTable):
    """All transitions of some datasets."""

    def table(self, dataset: Dataset, scaling: Scaling) -> Tensor:
        """Observation, action, next observation, reward and whether the episode continues."""
        return _table(dataset, scaling)

    def gather(self, index: Tensor) -> Batch:
        """The transitions of rows [S, B]."""
        rows = self._table[index]
        o, a = self.observation_dim, self.action_dim
        observations, actions, next_observations, rest = torch.split(rows, [o, a, o, 2], dim=-1)
        return Batch(observations, actions, rest[..., 0], next_observations, rest[..., 1])


def _table(dataset: Dataset, scaling: Scaling) -> Tensor:
    """Transitions of a dataset, one row each: observation, action, next observation, reward, continues."""
    states = [with_goal(episode) for episode in dataset]
    before = scaling.observations(_joined([each[:-1] for each in states]))
    after = scaling.observations(_joined([each[1:] for each in states]))
    actions = scaling.actions(_joined([episode.actions for episode in dataset])).clamp(-1.0, 1.0)
    rewards = _joined(
        [np.zeros(len(each), np.float32) if each.rewards is None else each.rewards for each in dataset.episodes]
    )
    rewards = rewards * scaling.reward_scale + scaling.reward_shift
    lengths = np.array([len(episode) for episode in dataset])
    continues = np.ones(int(lengths.sum()), np.float32)
    continues[np.cumsum(lengths)[[episode.terminated for episode in dataset]] - 1] = 0.0
    ends = torch.from_numpy(continues)
    return torch.cat([before[0], actions[0], after[0], rewards[0][:, None], ends[:, None]], dim=1)


def _joined(parts: Sequence[FloatArray]) -> Tensor:
    """Arrays [T, ...] of all episodes -> [1, N, ...]."""
    return torch.from_numpy(np.concatenate(parts))[None]
