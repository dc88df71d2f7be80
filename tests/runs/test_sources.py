"""What identifies the data of a run."""

from dataclasses import replace

import numpy as np
import pytest

from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.runs.sources import identity


def make_dataset(**changes: object) -> Dataset:
    """Two episodes with a map; `changes` replace fields of the second."""
    episode = Episode(
        observations=np.arange(8, dtype=np.float32).reshape(4, 2),
        actions=np.ones((3, 1), np.float32),
        rewards=np.zeros(3, np.float32),
        terminated=False,
        map=np.zeros((1, 2, 2), np.uint8),
    )
    return Dataset((episode, replace(episode, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"observations": np.zeros((4, 2), np.float32)},
        {"actions": np.zeros((3, 1), np.float32)},
        {"rewards": np.ones(3, np.float32)},
        {"terminated": True},
        {"map": np.ones((1, 2, 2), np.uint8)},
    ],
)
def test_episodes_in_memory_are_identified_by_all_that_is_trained_on(changes: dict[str, object]) -> None:
    assert identity(make_dataset()) == identity(make_dataset())
    assert identity(make_dataset(**changes)) != identity(make_dataset())
