"""A linear system with Gaussian noise, and an ensemble fitted to it."""

from dataclasses import dataclass

import numpy as np
import pytest

from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode
from trajectory_transformer.pets import Ensemble, EnsembleConfig, fit


@dataclass(frozen=True)
class LinearSystem:
    """s' = A s + B a + noise, r = s[0] + a; the deviation of the noise grows with the action."""

    transition: DoubleArray  # [2, 2]
    control: DoubleArray  # [2, 1]
    noise: DoubleArray  # [2], standard deviation without an action

    def mean(self, state: DoubleArray, action: DoubleArray) -> DoubleArray:
        return state @ self.transition.T + action @ self.control.T

    def std(self, action: DoubleArray) -> DoubleArray:
        return self.noise * np.exp(0.5 * action)

    def play(self, num_episodes: int, steps: int, rng: np.random.Generator) -> Dataset:
        episodes = []
        for _ in range(num_episodes):
            states, rewards = [rng.normal(size=2)], []
            actions = rng.uniform(-1, 1, size=(steps, 1))
            for action in actions:
                rewards.append(states[-1][0] + action[0])
                states.append(self.mean(states[-1], action) + self.std(action) * rng.normal(size=2))
            episodes.append(
                Episode(
                    np.array(states, dtype=np.float32),
                    actions.astype(np.float32),
                    np.array(rewards, dtype=np.float32),
                    terminated=False,
                )
            )
        return Dataset(tuple(episodes))


@pytest.fixture(scope="session")
def system() -> LinearSystem:
    """A stable system of two dimensions and one action."""
    return LinearSystem(
        transition=np.array([[0.9, 0.2], [-0.1, 0.8]]), control=np.array([[0.5], [1.0]]), noise=np.array([0.1, 0.05])
    )


@pytest.fixture(scope="session")
def recorded(system: LinearSystem) -> Dataset:
    """Ten thousand transitions."""
    return system.play(200, 50, np.random.default_rng(0))


@pytest.fixture(scope="session")
def ensemble(recorded: Dataset) -> Ensemble:
    """Seven small networks, five elites, with rewards."""
    config = EnsembleConfig(num_layers=2, width=32, rewards=True, learning_rate=5e-3, epochs=40, patience=40)
    return fit(recorded, config, device="cpu", seed=1)
