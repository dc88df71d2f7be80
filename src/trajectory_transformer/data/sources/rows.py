"""Recorded rows to episodes: what to do where the state after the last action is not there."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, Dimension, DoubleArray, Episode, Metadata


@dataclass
class EpisodeBuilder:
    """Gathers the episodes of a file, and counts what had to be done to them.

    An episode needs the state after its last action. Where it was not recorded, an episode that the recording ended
    loses its last action: its last observation is then the final state. One that the task itself ended keeps it, for
    its reward and its end matter, and repeats the last observation. Episodes left without an action are dropped.
    """

    path: Path
    episodes: list[Episode] = field(default_factory=list)
    final_states_repeated: int = 0
    last_actions_dropped: int = 0

    def add(
        self,
        observations: DoubleArray,
        actions: DoubleArray,
        rewards: DoubleArray | None,
        *,
        terminated: bool,
        final: DoubleArray | None,
        goal: DoubleArray | None = None,
        outcome: Mapping[str, float] | None = None,
        place: str = "",
    ) -> None:
        """Close one episode of rows: observations [T, O], actions [T, A], rewards [T]; final [O] where it is known."""
        if final is None and terminated:
            final = observations[-1]
            self.final_states_repeated += 1
        elif final is None:
            final, observations, actions = observations[-1], observations[:-1], actions[:-1]
            rewards = None if rewards is None else rewards[:-1]
            self.last_actions_dropped += 1
        if not len(actions):
            return
        try:
            self.episodes.append(
                Episode(
                    observations=np.concatenate([observations, final[None]]).astype(np.float32),
                    actions=actions.astype(np.float32),
                    rewards=None if rewards is None else rewards.astype(np.float32),
                    terminated=terminated,
                    goal=None if goal is None else goal.astype(np.float32),
                    outcome=outcome or {},
                )
            )
        except ValueError as error:
            raise ValueError(f"{self.path}, episode {len(self.episodes)}{place}: {error}") from error

    def dataset(
        self,
        metadata: Metadata,
        observation_dimensions: tuple[Dimension, ...] = (),
        action_dimensions: tuple[Dimension, ...] = (),
    ) -> Dataset:
        """All episodes added."""
        counts = {
            name: count for name in ("final_states_repeated", "last_actions_dropped") if (count := getattr(self, name))
        }
        episodes, facts = tuple(self.episodes), {**metadata, **counts}
        try:
            return Dataset(episodes, facts, observation_dimensions, action_dimensions)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


def check_finite(path: Path, name: str, values: npt.NDArray[np.floating]) -> None:
    """Refuse NaNs and infinities, and say how many there are and where the first one is (rows count from 1)."""
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{path}, row {int(np.argmax(bad)) + 1}: {name} must be a finite number, "
            f"found none there and in {int(bad.sum())} of {len(bad)} rows in all"
        )


def description(dataset: Dataset) -> str:
    """What a file of plain arrays would lose, as JSON."""
    return json.dumps(
        {
            "metadata": dict(dataset.metadata),
            "action_categories": [dimension.categories for dimension in dataset.action_dimensions],
            "observation_categories": [dimension.categories for dimension in dataset.observation_dimensions],
            "observation_names": [dimension.name for dimension in dataset.observation_dimensions],
            "action_names": [dimension.name for dimension in dataset.action_dimensions],
            "rewards": dataset.has_rewards,
            "outcomes": [dict(episode.outcome) for episode in dataset],
        }
    )
