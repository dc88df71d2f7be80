"""The environment loop: seeds, order of episodes, actions and observations of all kinds of spaces."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from trajectory_transformer.actors import RandomPolicy
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.rollout import Step, make_envs, rollout, space_dims


class Counter(gymnasium.Env[FloatArray, FloatArray]):
    """Counts its steps: observation [seed, step]; ends after 2 + seed % 3 steps, truncated if the seed is even."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None, "every episode is reset with a seed"
        self.seed, self.steps = seed, 0
        return np.array([seed, 0], dtype=np.float32), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps == 2 + self.seed % 3
        observation = np.array([self.seed, self.steps], dtype=np.float32)
        even = self.seed % 2 == 0
        return observation, 10.0 * self.steps, over and not even, over and even, {"success": over, "name": "x"}


class Recorder:
    """Returns the observed step number as action, and keeps every Step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def act(self, step: Step) -> FloatArray:
        self.steps.append(step)
        return (step.observations[:, 1:] / 10).astype(np.float32)


def counters(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Counter] * num_envs, autoreset_mode="Disabled")


@pytest.mark.parametrize("num_envs", [1, 2, 5, 9])
def test_episodes_depend_on_their_seeds_and_not_on_the_number_of_environments(num_envs: int) -> None:
    episodes = rollout(counters(num_envs), Recorder(), num_episodes=7, seed=100)
    assert len(episodes) == 7
    for index, episode in enumerate(episodes):
        seed = 100 + index
        steps = 2 + seed % 3
        np.testing.assert_array_equal(episode.observations, [[seed, step] for step in range(steps + 1)])
        np.testing.assert_allclose(episode.actions[:, 0], np.arange(steps) / 10)
        assert episode.rewards is not None
        np.testing.assert_allclose(episode.rewards, 10.0 * np.arange(1, steps + 1))
        assert episode.terminated == (seed % 2 == 1)
        assert episode.outcome == {"success": 1.0}
        assert episode.goal is None


def test_first_marks_starts_and_rewards_belong_to_the_last_action() -> None:
    recorder = Recorder()
    rollout(counters(2), recorder, num_episodes=3, seed=0)
    for step in recorder.steps:
        np.testing.assert_array_equal(step.first, step.observations[:, 1] == 0)
        np.testing.assert_allclose(step.rewards, 10.0 * step.observations[:, 1])


def test_environments_without_an_episode_left_are_inactive() -> None:
    recorder = Recorder()
    rollout(counters(2), recorder, num_episodes=1, seed=0)
    assert [step.active.tolist() for step in recorder.steps] == [[True, False]] * 2


def test_on_episode_is_called_for_every_episode() -> None:
    lengths: list[int] = []
    rollout(counters(3), Recorder(), num_episodes=6, seed=0, on_episode=lambda episode: lengths.append(len(episode)))
    assert sorted(lengths) == [2, 2, 3, 3, 4, 4]


def test_on_step_counts_the_transitions_of_all_episodes() -> None:
    counts: list[int] = []
    episodes = rollout(counters(3), Recorder(), num_episodes=4, seed=0, on_step=counts.append)
    assert sum(counts) == sum(len(episode) for episode in episodes)
    assert counts[0] == 3


def test_environments_with_autoreset_are_refused() -> None:
    with pytest.raises(ValueError, match="autoreset_mode"):
        rollout(SyncVectorEnv([Counter]), Recorder(), num_episodes=1, seed=0)


def test_goals_reach_the_policy_and_the_episode() -> None:
    envs = make_envs("tt/FourRooms-v0", 2)
    assert space_dims(envs) == (2, 2, 2)
    space = envs.single_action_space
    assert isinstance(space, spaces.Box)
    episodes = rollout(envs, RandomPolicy(space, np.random.default_rng(0)), num_episodes=2, seed=5)
    for index, episode in enumerate(episodes):
        expected, _ = gymnasium.make("tt/FourRooms-v0").reset(seed=5 + index)
        assert episode.goal is not None
        np.testing.assert_array_equal(episode.goal, expected["desired_goal"])
        assert set(episode.outcome) == {"success", "path_ratio"}


def test_unknown_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="environment 'tt/NoSuch-v0' cannot be made"):
        make_envs("tt/NoSuch-v0", 1)


class Machine(gymnasium.Env[dict[str, Any], Any]):
    """Dictionary observations; two discrete actions, the second of which starts at 5; keeps the actions it receives."""

    observation_space = spaces.Dict(
        {
            "speed": spaces.Box(-9, 9, (2,)),
            "gear": spaces.Discrete(4, start=1),
            "arm": spaces.Dict({"on": spaces.MultiBinary(2)}),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3], start=[0, 5])
    got: ClassVar[list[list[int]]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._view(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.int64
        self.got.append(action.tolist())
        self.steps += 1
        return self._view(), 0.0, False, self.steps == 2, {}

    def _view(self) -> dict[str, Any]:
        speed = np.array([0.5, self.steps], dtype=np.float32)
        return {"speed": speed, "gear": np.int64(3), "arm": {"on": np.array([0, 1], dtype=np.int8)}}


def test_dictionary_observations_are_flattened_by_key_and_categories_reach_the_environment() -> None:
    class Fixed:
        def act(self, step: Step) -> FloatArray:
            return np.array([[1, 2]], dtype=np.float32)

    envs = SyncVectorEnv([Machine], autoreset_mode="Disabled")
    assert space_dims(envs) == (5, 0, 2)
    (episode,) = rollout(envs, Fixed(), num_episodes=1, seed=0)
    # arm.on[0], arm.on[1], gear (3, counted from 1), speed[0], speed[1]
    np.testing.assert_array_equal(episode.observations, [[0, 1, 2, 0.5, step] for step in range(3)])
    np.testing.assert_array_equal(episode.actions, [[1, 2], [1, 2]])
    assert Machine.got == [[1, 7], [1, 7]]


def test_the_random_policy_plays_discrete_environments() -> None:
    envs = make_envs("CartPole-v1", 2)
    assert space_dims(envs) == (4, 0, 1)
    policy = RandomPolicy(envs.single_action_space, np.random.default_rng(0))
    episodes = rollout(envs, policy, num_episodes=3, seed=0)
    assert {value for episode in episodes for value in episode.actions.ravel().tolist()} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("actions", "rule"),
    [
        ([[0.0, 1.0]], "must have 1 dimensions to fit Discrete"),
        ([[0.5]], "must be categories of Discrete.*got 0.5"),
        ([[2.0]], "must be categories of Discrete.*got 2.0"),
        ([[np.nan]], "must be finite, got nan"),
    ],
)
def test_actions_that_do_not_fit_the_action_space_are_refused(actions: list[list[float]], rule: str) -> None:
    class Wrong:
        def act(self, step: Step) -> FloatArray:
            return np.array(actions, dtype=np.float32)

    with pytest.raises(ValueError, match=rule):
        rollout(make_envs("CartPole-v1", 1), Wrong(), num_episodes=1, seed=0)
