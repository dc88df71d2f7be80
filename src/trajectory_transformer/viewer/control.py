"""One environment under control of a planner, a step at a time: plan, look at the candidates, act."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from torch import Tensor

from trajectory_transformer.config import Sampler, SearchConfig
from trajectory_transformer.data.episode import DoubleArray, FloatArray, MapArray
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
from trajectory_transformer.evaluate import check_fit, environment_of
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.rollout import Dims
from trajectory_transformer.tokens.discretizer import TokenArray


@dataclass(frozen=True)
class PlanView:
    """A plan in the current state, in real units. Candidates are in order, best first."""

    step: int  # of the episode
    prompt: TokenArray  # [L]
    tokens: TokenArray  # [K, n]
    scores: FloatArray  # [K]
    states: DoubleArray  # [K, h, O], the current state first; NaN after a predicted end
    actions: DoubleArray  # [K, h, A]


@dataclass(frozen=True)
class Moment:
    """What happened so far in the episode."""

    observations: FloatArray  # [t + 1, O]
    actions: FloatArray  # [t, A]
    rewards: FloatArray  # [t]
    goal: FloatArray  # [G]; G = 0 without a goal
    map: MapArray | None
    over: bool
    success: bool | None  # None if the environment does not report it

    @property
    def step(self) -> int:
        """Actions taken."""
        return len(self.actions)


def make_control_env(model: TrajectoryModel, env: str | None = None, *, trust: bool = False) -> gymnasium.Env[Any, Any]:
    """The environment of a model's data (or another one), checked against the model; a ValueError says why not."""
    env_id, options = environment_of(model.metadata, env, None, trust=trust)
    try:
        made = make_env(env_id, **options)
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise ValueError(f"environment {env_id!r} cannot be made: {error}") from error
    try:
        observation, goal = split_goal(made.observation_space)
        part = map_leaf(made.observation_space)
        dims = Dims(total_dim(observation), total_dim(goal), action_leaf(made.action_space).dim)
        check_fit(model, env_id, dims, () if part is None else tuple(part.space.shape or ()))
    except ValueError:
        made.close()
        raise
    return made


class Control:
    """An episode in progress, and the plan in its current state."""

    def __init__(self, env: gymnasium.Env[Any, Any], planner: Planner, seed: int = 0) -> None:
        """Start with the first episode."""
        self.env = env
        self.planner = planner
        self._observation_parts, self._goal_parts = split_goal(env.observation_space)
        self._map_part = map_leaf(env.observation_space)
        self._action_part = action_leaf(env.action_space)
        self._map_embedding: Tensor | None = None
        self._past: list[TokenArray] = []
        self.moment: Moment
        self.plan: PlanView
        self.restart(seed=seed)

    @property
    def map_embedding(self) -> Tensor | None:
        """Embedding of the map of the episode [1, width]."""
        return self._map_embedding

    def restart(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Begin another episode and plan. If the environment refuses the options, nothing changes."""
        observation, _ = self.env.reset(seed=seed, options=dict(options) if options else None)
        first, goal, map = self._read(observation)
        empty = np.zeros((0, self._action_part.dim), np.float32)
        self.moment = Moment(first[None], empty, np.zeros(0, np.float32), goal, map, False, None)
        self._map_embedding = self.planner.model.encode_maps(map)
        self._past = []
        self.replan()

    def step(self) -> None:
        """Take the first action of the plan, and plan again."""
        moment = self.moment
        if moment.over:
            return
        action = self.plan.actions[0, 0].astype(np.float32)
        observation, reward, terminated, truncated, info = self.env.step(
            env_actions(action[None], self._action_part)[0]
        )
        state, _, _ = self._read(observation)
        tokenizer = self.planner.model.tokenizer
        before = tokenizer.encode_states(moment.observations[-1:])[0]
        taken = self.plan.tokens[0, : tokenizer.layout.action_dim]
        self._past.append(tokenizer.transition(before, taken, float(reward)))
        success = info.get("success")
        self.moment = replace(
            moment,
            observations=np.concatenate([moment.observations, state[None]]),
            actions=np.concatenate([moment.actions, action[None]]),
            rewards=np.append(moment.rewards, np.float32(reward)),
            over=bool(terminated or truncated),
            success=None if success is None else bool(success),
        )
        if not self.moment.over:
            self.replan()

    def replan(self, planner: Planner | None = None) -> None:
        """Plan in the current state, perhaps with other settings."""
        self.planner = planner or self.planner
        planner, tokenizer, moment = self.planner, self.planner.model.tokenizer, self.moment
        search, trained = planner.search, planner.model.gpt.config.window
        max_past = min(search.context, (trained if search.window is None else search.window) - 1)
        past = self._past[-max_past:] if max_past else []
        state = tokenizer.encode_states(moment.observations[-1:])[0]
        goal = tokenizer.encode_goals(moment.goal[None])[0]
        prompt = tokenizer.prompt(goal, past, state)
        # As `PlanningPolicy` has it, so that the page shows what an evaluation does.
        seed = stream_seed(planner.seed, moment.step, zlib.crc32(prompt.tobytes()))
        plan = planner.plan(prompt[None], np.array([seed]), self._map_embedding)
        tokens = plan.tokens[0].cpu().numpy()
        decoded = tokenizer.decode(np.broadcast_to(state, (len(tokens), len(state))), tokens)
        self.plan = PlanView(moment.step, prompt, tokens, plan.scores[0].cpu().numpy(), decoded.states, decoded.actions)

    def _read(self, observation: Any) -> tuple[FloatArray, FloatArray, MapArray | None]:
        """Observation [O], goal [G] and map of one environment."""
        batched = _batched(observation)
        state = flatten(batched, self._observation_parts, 1)[0].copy()
        goal = flatten(batched, self._goal_parts, 1)[0].copy()
        maps = None if self._map_part is None else maps_of(batched, self._map_part, 1)[0].copy()
        return state, goal, maps


def with_search(planner: Planner, **changes: Any) -> Planner:
    """The same planner with other search settings, or another seed.

    `share` is that of the mass which actions are sampled from: their `middle` if the planner uses it, else a nucleus.
    """
    seed = changes.pop("seed", planner.seed)
    share: float | None = changes.pop("share", None)
    search: SearchConfig = replace(planner.search, replan_every=1, **changes)
    if share is not None and search.action.middle is not None:
        search = replace(search, action=replace(search.action, middle=share))
    elif share is not None:
        search = replace(search, action=Sampler(temperature=search.action.temperature, nucleus=share))
    return Planner(planner.model, kind=planner.kind, search=search, seed=seed)


def candidate_strengths(scores: FloatArray) -> npt.NDArray[np.float64]:
    """How strongly to draw each candidate, 0.1 for the worst to 0.8 for the best: scores [K] -> [K]."""
    finite = scores[np.isfinite(scores)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    share = np.nan_to_num((scores - low) / (high - low), nan=0.0, neginf=0.0) if high > low else np.ones(len(scores))
    return 0.1 + 0.7 * share.astype(np.float64)


def _batched(observation: Any) -> Any:
    """An observation of one environment as that of a batch of one."""
    if isinstance(observation, Mapping):
        return {key: _batched(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_batched(value) for value in observation)
    return np.asarray(observation)[None]
