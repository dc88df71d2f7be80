"""Data and settings that the tests of all baselines share."""

import numpy as np
import pytest

from trajectory_transformer.data.episode import Dataset, Episode

SMALL = {"hidden": [32, 32], "batch_size": 64}
SMALL_OF: dict[str, dict[str, object]] = {
    "brac": {"actor_hidden": [32, 32], "clone_steps": 3, "warmup_steps": 2},
    "dt": {"context": 4},
    "mbop": {"horizon": 3, "num_trajectories": 30},
}
"""What some algorithms need to be small as well."""


def point_episodes(count: int, *, steps: int = 20, seed: int = 0) -> Dataset:
    """A point on a line, pushed by the action; the reward is the negative distance to 0.

    The recorded actions are uniformly random, so a policy must use the rewards to do better than standing still.
    """
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(count):
        positions, actions, rewards = [rng.uniform(-1, 1)], [], []
        for _ in range(steps):
            actions.append(rng.uniform(-1, 1))
            positions.append(np.clip(positions[-1] + 0.4 * actions[-1], -2, 2))
            rewards.append(-abs(positions[-1]))
        arrays = [np.array(part, np.float32) for part in (positions, actions, rewards)]
        episodes.append(Episode(arrays[0][:, None], arrays[1][:, None], arrays[2], terminated=False))
    return Dataset(tuple(episodes), {})


@pytest.fixture(scope="session")
def points() -> Dataset:
    """Two thousand random steps of a point on a line."""
    return point_episodes(100)
