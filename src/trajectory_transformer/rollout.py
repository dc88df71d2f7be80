"""The environment loop: plays seeded episodes in vectorised environments, for evaluation and data collection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from trajectory_transformer.data.episode import Episode, FloatArray, MapArray, Metadata
from trajectory_transformer.data.spaces import (
    action_leaf,
    env_actions,
    flatten,
    map_leaf,
    maps_of,
    split_goal,
    total_dim,
)
from trajectory_transformer.envs import make_env

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """What a policy sees of E environments before it acts."""

    observations: FloatArray  # [E, O]
    rewards: FloatArray  # [E], reward of the last action; 0 at the start of an episode
    first: BoolArray  # [E], true at the start of an episode
    goals: FloatArray  # [E, G]; G = 0 without goals
    active: BoolArray  # [E], false if the environment has no more episodes to play
    maps: MapArray | None = None  # [E, C, H, W], maps of the episodes; None without maps


class Policy(Protocol):
    """Acts in E environments at once. There is no reset method: `Step.first` marks the starts of episodes."""

    def act(self, step: Step) -> FloatArray:
        """Return actions [E, A]; those of inactive environments are ignored."""


class Dims(NamedTuple):
    """Sizes of the flat observation, goal and action of one environment (see `data.spaces`)."""

    observation: int
    goal: int
    action: int


@runtime_checkable
class TrainedPolicy(Policy, Protocol):
    """A policy that knows what it was trained on."""

    metadata: Metadata  # of the dataset: environment id, origin
    dims: Dims  # of the dataset


def make_envs(env_id: str, num_envs: int, options: Mapping[str, Any] | None = None) -> SyncVectorEnv:
    """Make vectorised environments for `rollout`; `options` are arguments of the environment's constructor."""

    def make_one() -> Env[Any, Any]:
        return make_env(env_id, **(options or {}))

    try:
        # No copies: `flatten` creates new arrays.
        return SyncVectorEnv([make_one] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    except Exception as error:  # an environment may refuse its arguments with any exception
        if isinstance(error, ImportError) and ":" not in env_id:
            raise  # a missing package is named with its cure
        raise ValueError(f"environment {env_id!r} cannot be made: {str(error) or type(error).__name__}") from error


def space_dims(envs: VectorEnv[Any, Any, Any]) -> Dims:
    """Sizes of one environment."""
    observation, goal = split_goal(envs.single_observation_space)
    return Dims(total_dim(observation), total_dim(goal), action_leaf(envs.single_action_space).dim)


def map_shape(envs: VectorEnv[Any, Any, Any]) -> tuple[int, ...]:
    """Channels, height and width of the map of an environment; () without a map."""
    part = map_leaf(envs.single_observation_space)
    return () if part is None else tuple(part.space.shape or ())


def rollout(
    envs: VectorEnv[Any, Any, Any],
    policy: Policy,
    *,
    num_episodes: int,
    seed: int,
    on_episode: Callable[[Episode], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Play episodes to their end and return them in order.

    Episode i is reset with seed + i, so the episodes do not depend on the number of environments. The environments must
    have autoreset disabled (see `make_envs`). `on_episode` is called when an episode ends, `on_step` after every
    step with the number of environments that took it.
    """
    if envs.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
        raise ValueError(
            "rollout needs environments with autoreset_mode=AutoresetMode.DISABLED, as make_envs makes them"
        )
    num_envs = envs.num_envs
    observation_parts, goal_parts = split_goal(envs.single_observation_space)
    map_part = map_leaf(envs.single_observation_space)
    action_part = action_leaf(envs.single_action_space)
    episodes: dict[int, Episode] = {}
    running = np.full(num_envs, -1)  # episode played in each environment, -1 for none
    started = 0
    over = np.ones(num_envs, dtype=np.bool_)
    rewards = np.zeros(num_envs, dtype=np.float32)
    records: list[_Record] = [_Record() for _ in range(num_envs)]
    observations, goals = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float32)
    maps: MapArray | None = None

    while len(episodes) < num_episodes:
        if over.any():
            for env in np.flatnonzero(over).tolist():
                running[env] = started if started < num_episodes else -1
                started += running[env] >= 0
            # Environments without an episode left are reset too, because the vector environment steps all of them.
            seeds: list[int | None] = [seed + int(episode) if episode >= 0 else seed for episode in running]
            # The base class declares a single seed, but vector environments accept one per environment.
            observation, _ = envs.reset(seed=seeds, options={"reset_mask": over.copy()})  # type: ignore[arg-type]
            observations = flatten(observation, observation_parts, num_envs)
            goals = flatten(observation, goal_parts, num_envs)
            if map_part is not None:
                maps = maps_of(observation, map_part, num_envs)
            for env in np.flatnonzero(over).tolist():
                map = None if maps is None else maps[env].copy()
                records[env] = _Record([observations[env].copy()], goals[env].copy(), map)
        step = Step(observations, np.where(over, 0, rewards).astype(np.float32), over, goals, running >= 0, maps)
        actions = policy.act(step)
        observation, reward, terminated, truncated, infos = envs.step(env_actions(actions, action_part))
        observations = flatten(observation, observation_parts, num_envs)
        goals = flatten(observation, goal_parts, num_envs)
        rewards = reward.astype(np.float32)
        over = terminated | truncated
        for env in np.flatnonzero(running >= 0).tolist():
            records[env].add(observations[env], actions[env], rewards[env])
            if over[env]:
                episode = records[env].finish(bool(terminated[env]), _outcome(infos, env))
                episodes[int(running[env])] = episode
                if on_episode is not None:
                    on_episode(episode)
        if on_step is not None:
            on_step(int((running >= 0).sum()))
    return [episodes[index] for index in range(num_episodes)]


class _Record:
    """An episode that is being played."""

    def __init__(
        self,
        observations: list[FloatArray] | None = None,
        goal: FloatArray | None = None,
        map: MapArray | None = None,
    ) -> None:
        self.observations = observations or []
        self.goal = goal
        self.map = map
        self.actions: list[FloatArray] = []
        self.rewards: list[np.float32] = []

    def add(self, observation: FloatArray, action: FloatArray, reward: np.float32) -> None:
        self.observations.append(observation.copy())
        self.actions.append(action.copy())
        self.rewards.append(reward)

    def finish(self, terminated: bool, outcome: dict[str, float]) -> Episode:
        goal = self.goal if self.goal is not None and self.goal.size else None
        rewards = np.array(self.rewards, dtype=np.float32)
        observations, actions = np.stack(self.observations), np.stack(self.actions)
        return Episode(observations, actions, rewards, terminated, goal, outcome, self.map)


def _outcome(infos: Mapping[str, Any], env: int) -> dict[str, float]:
    """Scalars that an environment reported with the last step."""
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
