"""Windows of consecutive steps on the device, for algorithms that learn from sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.baselines.data import Learner, Scaling, StepTable, with_goal
from trajectory_transformer.data.episode import Dataset, returns_to_go


@dataclass(frozen=True)
class WindowBatch:
    """The last K steps of S learners' episodes; steps before the first are not valid. All values are scaled."""

    observations: Tensor  # [S, B, K, O]
    actions: Tensor  # [S, B, K, A]
    returns: Tensor  # [S, B, K], undiscounted rewards from this step on
    times: Tensor  # [S, B, K]
    valid: Tensor  # [S, B, K]


class Windows(StepTable):
    """Windows of K steps; a window starts at its row and is shorter at the end of an episode."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        learners: Sequence[Learner],
        scaling: Scaling,
        device: torch.device,
        *,
        context: int,
        return_scale: float,
    ) -> None:
        """Make the rows and send them to the device; windows have `context` steps."""
        self.context = context
        self.return_scale = return_scale
        super().__init__(datasets, learners, scaling, device)

    def table(self, dataset: Dataset, scaling: Scaling) -> Tensor:
        """Observation, action, return-to-go, time and steps that are left."""
        rows = []
        for episode in dataset:
            assert episode.rewards is not None
            length = len(episode)
            observations = scaling.observations(torch.from_numpy(with_goal(episode)[:-1])[None])[0]
            actions = scaling.actions(torch.from_numpy(episode.actions)[None])[0].clamp(-1.0, 1.0)
            returns = returns_to_go(episode.rewards, 1.0, include_own=True) / self.return_scale
            counts = np.arange(length, dtype=np.float32)
            rest = np.stack([returns.astype(np.float32), counts, length - counts], axis=1)
            rows.append(torch.cat([observations, actions, torch.from_numpy(rest)], dim=1))
        return torch.cat(rows)

    def gather(self, index: Tensor) -> WindowBatch:
        """Windows that start at rows [S, B], padded on the left to K steps."""
        size = self.context
        left = self._table[index, -1].long()  # [S, B]
        places = torch.arange(size, device=index.device) - (size - left.clamp(max=size))[..., None]  # [S, B, K]
        rows = self._table[index[..., None] + places.clamp(min=0)]
        parts = torch.split(rows, [self.observation_dim, self.action_dim, 1, 1, 1], dim=-1)
        valid = places >= 0
        return WindowBatch(parts[0], parts[1], parts[2][..., 0], parts[3][..., 0].long(), valid)
