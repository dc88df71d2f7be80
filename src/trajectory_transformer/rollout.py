"""The one environment loop: vectorised, seeded, used by evaluation and collection alike."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env, make, spaces
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from trajectory_transformer import envs as _registers_our_environments  # noqa: F401
from trajectory_transformer.data.episode import Episode, FloatArray
from trajectory_transformer.policies import Policy, Step

Observation = npt.NDArray[np.generic] | Mapping[str, npt.NDArray[np.generic]]


def make_envs(env_id: str, num_envs: int) -> SyncVectorEnv:
    """Environments for `rollout`, which resets them itself."""

    def make_one() -> Env[Any, Any]:
        return make(env_id)

    try:
        return SyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    except GymnasiumError as error:
        raise ValueError(f"environment {env_id!r} cannot be made: {error}") from error


def space_dims(envs: VectorEnv[Any, Any, Any]) -> tuple[int, int, int]:
    """Sizes of observation, goal and action of one environment; only flat boxes are understood."""
    space = envs.single_observation_space
    observation, goal = space, None
    if isinstance(space, spaces.Dict) and {"observation", "desired_goal"} <= set(space):
        observation, goal = space["observation"], space["desired_goal"]
    action = envs.single_action_space
    for name, part in (("observations", observation), ("goals", goal), ("actions", action)):
        if part is not None and not (isinstance(part, spaces.Box) and len(part.shape) == 1):
            raise ValueError(f"{name} must be a one-dimensional Box, the environment has {part}")
    sizes = [0 if part is None else int(np.prod(part.shape or ())) for part in (observation, goal, action)]
    return sizes[0], sizes[1], sizes[2]


def rollout(
    envs: VectorEnv[Any, Any, Any],
    policy: Policy,
    *,
    num_episodes: int,
    seed: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play episodes to their end; episode i is reset with seed + i and returned in place i, whatever ran it.

    Needs environments that do not reset themselves (`make_envs`), so that every episode has a seed of its own.
    """
    if envs.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
        raise ValueError("rollout resets environments itself: make them with autoreset_mode=AutoresetMode.DISABLED")
    num_envs = envs.num_envs
    episodes: dict[int, Episode] = {}
    running = np.full(num_envs, -1)  # episode played in each environment, -1 for none
    started = 0
    over = np.ones(num_envs, dtype=np.bool_)
    rewards = np.zeros(num_envs, dtype=np.float32)
    records: list[_Record] = [_Record() for _ in range(num_envs)]
    observations, goals = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float32)

    while len(episodes) < num_episodes:
        if over.any():
            for env in np.flatnonzero(over).tolist():
                running[env] = started if started < num_episodes else -1
                started += running[env] >= 0
            # Where no episode is left to play, the environment is reset only because its vector steps it on.
            seeds: list[int | None] = [seed + int(episode) if episode >= 0 else seed for episode in running]
            # The base class is annotated for one seed, its vector environments all take one each.
            observation, _ = envs.reset(seed=seeds, options={"reset_mask": over.copy()})  # type: ignore[arg-type]
            observations, goals = split_observation(observation)
            for env in np.flatnonzero(over).tolist():
                records[env] = _Record([observations[env].copy()], goals[env].copy())
        step = Step(observations, np.where(over, 0, rewards).astype(np.float32), over, goals, running >= 0)
        actions = policy.act(step)
        observation, reward, terminated, truncated, infos = envs.step(actions)
        observations, goals = split_observation(observation)
        rewards = reward.astype(np.float32)
        over = terminated | truncated
        for env in np.flatnonzero(running >= 0).tolist():
            records[env].add(observations[env], actions[env], rewards[env])
            if over[env]:
                episode = records[env].finish(bool(terminated[env]), _outcome(infos, env))
                episodes[int(running[env])] = episode
                if on_episode is not None:
                    on_episode(episode)
    return [episodes[index] for index in range(num_episodes)]


class _Record:
    """An episode while it is played."""

    def __init__(self, observations: list[FloatArray] | None = None, goal: FloatArray | None = None) -> None:
        self.observations = observations or []
        self.goal = goal
        self.actions: list[FloatArray] = []
        self.rewards: list[np.float32] = []

    def add(self, observation: FloatArray, action: FloatArray, reward: np.float32) -> None:
        self.observations.append(observation.copy())
        self.actions.append(action.copy())
        self.rewards.append(reward)

    def finish(self, terminated: bool, outcome: dict[str, float]) -> Episode:
        goal = self.goal if self.goal is not None and self.goal.size else None
        rewards = np.array(self.rewards, dtype=np.float32)
        return Episode(np.stack(self.observations), np.stack(self.actions), rewards, terminated, goal, outcome)


def split_observation(observation: Observation) -> tuple[FloatArray, FloatArray]:
    """Observations [E, O] and goals [E, G] of what a vector environment returned; G = 0 without goals."""
    if isinstance(observation, Mapping):
        return observation["observation"].astype(np.float32), observation["desired_goal"].astype(np.float32)
    return observation.astype(np.float32), np.zeros((len(observation), 0), dtype=np.float32)


def _outcome(infos: Mapping[str, Any], env: int) -> dict[str, float]:
    """The scalars an environment reported with its last step."""
    outcome = {}
    for name, values in infos.items():
        if (
            not name.startswith("_")
            and isinstance(values, np.ndarray)
            and values.dtype.kind in "bif"
            and values.ndim == 1
        ):
            outcome[name] = float(values[env])
    return outcome
