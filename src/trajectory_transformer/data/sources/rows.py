"""Build episodes from recorded rows, also where the final state was not recorded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, Dimension, DoubleArray, Episode, Metadata


@dataclass
class EpisodeBuilder:
    """Collects the episodes of a file and counts the repairs.

    An episode needs the state after its last action. If that was not recorded, a truncated episode loses its last
    action, and its last observation becomes the final state. A terminated episode keeps its last action, whose reward
    and termination matter, and repeats the last observation. Episodes without actions are dropped.
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
        """Add an episode: observations [T, O], actions [T, A], rewards [T], and the final state [O] if known."""
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
        """Build the dataset; the metadata records the repairs."""
        repairs = {
            name: count for name in ("final_states_repeated", "last_actions_dropped") if (count := getattr(self, name))
        }
        episodes, facts = tuple(self.episodes), {**metadata, **repairs}
        try:
            return Dataset(episodes, facts, observation_dimensions, action_dimensions)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


def check_finite(path: Path, name: str, values: npt.NDArray[np.floating]) -> None:
    """Raise if values are NaN or infinite; the error names the first row, counted from 1, and the number of rows."""
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{path}, row {int(np.argmax(bad)) + 1}: {name} must be a finite number; "
            f"{int(bad.sum())} of {len(bad)} rows are NaN or infinite"
        )


def description(dataset: Dataset) -> str:
    """JSON with everything that the arrays of a file cannot store: metadata, dimensions, outcomes."""
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
