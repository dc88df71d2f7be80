"""A trained model as a controller: what to plan for, search settings, and memory of the past."""

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.config import Sampler, SearchConfig
from trajectory_transformer.data.episode import FloatArray, MapArray
from trajectory_transformer.data.values import Observation, action_of, split_observation, vector
from trajectory_transformer.gpu.backends import prepare_search
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.rollout import Step
from trajectory_transformer.search.beam import Objective, Plan, beam_search, likelihood_search, median_continuation
from trajectory_transformer.search.deadline import Deadline
from trajectory_transformer.search.decoder import Bins, Decoder
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return

log = logging.getLogger(__name__)

MAX_TIMES = 100_000  # a controller may run for months

TokenArray = npt.NDArray[np.int64]
PlanKind = Literal["return", "imitate", "goal"]


@dataclass(frozen=True)
class PlanTrace:
    """One plan as it was made, to look at later."""

    env: int
    step: int  # of the episode
    prompt: TokenArray  # [L]
    tokens: TokenArray  # [K, n], kept candidates, best first
    scores: FloatArray  # [K]


def default_kind(model: TrajectoryModel) -> PlanKind:
    """Reach a goal if the model has one, else maximise return if it has rewards, else imitate."""
    if model.layout.goal_dim:
        return "goal"
    return "return" if model.layout.rewards else "imitate"


def suited_search(search: SearchConfig, model: TrajectoryModel) -> SearchConfig:
    """The same settings where they suit a model.

    Categories have no order, so actions with categories are sampled from a nucleus instead of the middle. Without a
    past, nothing tells where an episode begins, so its first action is sampled like all others.
    """
    action, first_action = search.action, search.first_action
    if max_past(search, model) < 1:
        first_action = None
    if any(dimension.categories for dimension in model.tokenizer.action_dimensions):
        action = _nucleus_for_middle(action)
        first_action = None if first_action is None else _nucleus_for_middle(first_action)
    return replace(search, action=action, first_action=first_action)


def _nucleus_for_middle(sampler: Sampler) -> Sampler:
    if sampler.middle is None:
        return sampler
    return Sampler(temperature=sampler.temperature, nucleus=sampler.middle)


def max_past(search: SearchConfig, model: TrajectoryModel) -> int:
    """Past transitions in a prompt, at most; the current transition needs a place in the window too."""
    return min(search.context, (search.window or model.gpt.config.window) - 1)


class Planner:
    """Turns a trained model into a controller.

    `kind` says what to plan for: `return` ranks sampled transitions by discounted return; `imitate` and `goal` follow
    the data, a goal being part of the prompt. `objective` ranks by a function of your own instead. By default a model
    with a goal reaches it, one with rewards maximises return, and any other imitates.
    """

    def __init__(
        self,
        model: TrajectoryModel | str | Path,
        *,
        kind: PlanKind | None = None,
        objective: Objective | None = None,
        discount: float | None = None,
        percentile: float | None = None,
        search: SearchConfig | None = None,
        seed: int = 0,
        on_plan: Callable[[PlanTrace], None] | None = None,
        deadline_ms: float | None = None,
    ) -> None:
        """Plan with a model, or with the run folder it was saved to.

        `discount` is that of rewards along a plan, by default the one of training. `percentile` judges candidates by
        this percentile of predicted rewards and values instead of their means. `on_plan` is called with every plan.
        `deadline_ms` limits the time of every call of `act`: a search that would be late keeps fewer candidates, or
        ends with the best plan so far. Searches are timed here first.
        """
        self.model = model if isinstance(model, TrajectoryModel) else TrajectoryModel.load(model)
        self.search = suited_search(search or SearchConfig(), self.model)
        self.seed = seed
        self.on_plan = on_plan
        if objective is not None and (kind is not None or discount is not None):
            raise ValueError("an objective replaces kind and discount: leave those out")
        self.kind = None if objective is not None else kind or default_kind(self.model)
        self.objective = objective if self.kind is None else self._objective_of(self.kind, discount)
        if self.objective is not None and self.search.imitate != "mode":
            raise ValueError(
                f"search.imitate {self.search.imitate} is for imitation and goals; planning for return ranks sampled "
                "actions"
            )
        if percentile is not None and self.objective is None:
            raise ValueError(f"a percentile is for planning for return or an objective, not for {self.kind}")
        if percentile is not None and not 0.0 < percentile < 1.0:
            raise ValueError(f"the percentile must lie in (0, 1), got {percentile}")
        self.percentile = percentile
        self.deadline = self._deadline_of(deadline_ms)
        self._bins = Bins(self.model.layout, self.model.bin_values())
        self._run_search = prepare_search(self._search, self.model.gpt, self.search)
        self._one: PlanningPolicy | None = None  # the policy behind `act`
        self._warned_of_reward = False
        self._time_searches()
        log.info("planning for %s with %s", self.kind or "an objective", self.search)

    def act(
        self,
        observation: Observation,
        *,
        reward: float | None = None,
        goal: npt.ArrayLike | None = None,
        map: MapArray | None = None,
    ) -> Any:
        """Action of one system for an observation; call `reset` when another episode begins.

        The observation is an array [O], or a dictionary, which is flattened as in the data. The action is what the
        environment's `step` takes: an array [A], for categories integers or the values that were recorded. `reward` is
        that of the last action, `goal` [G] and `map` [C, H, W] are for models that have them. A map is read at the
        first step of an episode.
        """
        tokenizer, layout = self.model.tokenizer, self.model.layout
        if goal is not None and not layout.goal_dim:
            raise ValueError("this model has no goal: it was trained without tokens.goal_dims; leave the goal out")
        row, given_goal, given_map = split_observation(observation, tokenizer.observation_dimensions)
        goal, map = given_goal if goal is None else goal, given_map if map is None else map
        first = self._one is None
        if reward is None and not first and layout.rewards and self.search.context and not self._warned_of_reward:
            self._warned_of_reward = True
            log.warning("act was called without the reward of the last action, which then counts as 0: pass reward=")
        self._one = self._one or self.policy()
        goals = np.zeros((1, 0), np.float32) if goal is None else vector(goal, "goal")[None]
        given = [0.0] if first or reward is None else vector(reward, "reward")
        if map is not None and (not isinstance(map, np.ndarray) or map.ndim != 3):
            raise ValueError(f"a map must be an array [channels, height, width], got {map!r:.60}")
        if len(given) != 1:
            raise ValueError(f"the reward of the last action must be one number, got {reward!r}")
        step = Step(
            observations=row[None],
            rewards=np.array(given, np.float32),
            first=np.array([first]),
            goals=goals,
            active=np.array([True]),
            maps=None if map is None else map[None],
        )
        return action_of(self._one.act(step)[0], tokenizer.action_dimensions)

    def reset(self) -> None:
        """Begin another episode: `act` forgets what it has seen."""
        self._one = None

    def policy(self) -> "PlanningPolicy":
        """A policy for many environments at once, each with a past of its own."""
        return PlanningPolicy(self)

    def plan(self, prompts: TokenArray, seeds: TokenArray, map_embedding: Tensor | None = None) -> Plan:
        """Search from prompts [E, L] of equal length; seeds [E] are those of the noise."""
        return self._run_search(torch.from_numpy(prompts), torch.from_numpy(seeds), map_embedding)

    def _search(self, decoder: Decoder, prompts: Tensor, seeds: Tensor, map_embedding: Tensor | None) -> Plan:
        layout, config = self.model.layout, self.search
        if self.objective is not None:
            return beam_search(
                decoder,
                prompts,
                self.objective,
                bins=self._bins,
                config=config,
                noise=Noise(seeds),
                first_step=prompts.shape[1] == layout.goal_dim + layout.observation_dim,
                percentile=self.percentile,
                map_embedding=map_embedding,
                deadline=self.deadline,
            )
        if config.imitate == "median":
            return median_continuation(
                decoder,
                prompts,
                num_tokens=(config.replan_every - 1) * layout.size + layout.action_dim,
                min_tokens=layout.action_dim,
                map_embedding=map_embedding,
                deadline=self.deadline,
            )
        return likelihood_search(
            decoder,
            prompts,
            num_tokens=config.horizon * layout.size - layout.observation_dim,
            beam_width=config.beam_width,
            min_tokens=layout.action_dim,
            map_embedding=map_embedding,
            deadline=self.deadline,
        )

    def _deadline_of(self, deadline_ms: float | None) -> Deadline | None:
        if deadline_ms is None:
            return None
        if not 0.0 < deadline_ms < float("inf"):
            raise ValueError(f"deadline_ms must be above 0, got {deadline_ms}")
        if self.model.device.type == "cuda" and self.search.backend not in ("cached", "naive"):
            raise ValueError("deadline_ms needs search.backend cached: a captured search on a GPU cannot end early")
        return Deadline(deadline_ms / 1000)

    def _time_searches(self) -> None:
        """Learn how long the steps of a search take: of the full width, and of the narrowest beam."""
        if self.deadline is None:
            return
        layout, wanted = self.model.layout, self.deadline.seconds
        length = layout.length(max_past(self.search, self.model))
        prompts = np.zeros((1, length + layout.observation_dim), np.int64)
        embedding = None
        if layout.map_shape:
            embedding = torch.zeros(1, self.model.gpt.config.width, device=self.model.device)
        for seconds in (float("inf"), float("inf"), 0.0, 0.0):  # the first searches are slower than others
            self.deadline.seconds = seconds
            self.deadline.begin()
            self.plan(prompts, np.zeros(1, np.int64), embedding)
            self.deadline.finish()
            self.deadline.forget_load()
        self.deadline.seconds = wanted

    def _objective_of(self, kind: PlanKind, discount: float | None) -> Objective | None:
        """What ranks candidates; None for the most likely continuation."""
        layout, tokens = self.model.layout, self.model.tokenizer.config
        if kind == "goal" and not layout.goal_dim:
            raise ValueError("planning for a goal needs a model with a goal: train with tokens.goal_dims")
        if kind != "return":
            if discount is not None:
                raise ValueError(f"a discount is for planning for return, not for {kind}")
            return None
        if not layout.rewards:
            raise ValueError("planning for return needs a model with rewards: this one has tokens.rewards false")
        if discount is not None and not 0.0 <= discount <= 1.0:
            raise ValueError(f"the discount must lie in [0, 1], got {discount}")
        chosen = tokens.discount if discount is None else discount
        return discounted_return(chosen, value_includes_reward=tokens.value_includes_reward)


class PlanningPolicy:
    """A planner in E environments at once: plan, take the first actions, plan again."""

    def __init__(self, planner: Planner) -> None:
        """Start without a past."""
        self._planner = planner
        self._tokenizer = planner.model.tokenizer
        self._max_past = max_past(planner.search, planner.model)
        self.plan_seconds: deque[float] = deque(maxlen=MAX_TIMES)  # times of the last searches
        self.num_plans = 0
        self.num_shortened = 0  # of them, those that the deadline made narrower or shorter
        self.num_late = 0  # of them, those that missed it nevertheless
        self.num_states = 0  # states planned from
        self.num_outside = 0  # of them, those far outside the range of the training data
        self._memories: list[_Memory] = []
        self._maps = torch.empty(0, 0)  # [E, width], embeddings of the maps

    def act(self, step: Step) -> FloatArray:
        """Actions [E, A]."""
        self._check(step)
        num_envs = len(step.observations)
        if len(self._memories) != num_envs:
            self._memories = [_Memory() for _ in range(num_envs)]
            model = self._planner.model
            self._maps = torch.zeros(num_envs, model.gpt.config.width, device=model.device)
        self._encode_maps(step)
        states = self._tokenizer.encode_states(step.observations)
        active = np.flatnonzero(step.active).tolist()
        self._count_outside(step.observations[active])
        for env in active:
            self._remember(env, states[env], step)
        waiting = [env for env in active if not self._memories[env].queued]
        # Prompts of one search have equal lengths, so environments are grouped by the length of their past.
        lengths = sorted({len(self._memories[env].past) for env in waiting})
        for index, length in enumerate(lengths):
            self._begin(len(lengths) - index)
            self._plan([env for env in waiting if len(self._memories[env].past) == length], step.goals)
        actions = np.zeros((num_envs, self._tokenizer.layout.action_dim), dtype=np.float32)
        for env in active:
            memory = self._memories[env]
            memory.action = memory.queued.pop(0)
            actions[env] = self._tokenizer.decode_action(memory.action)
        return actions

    def _begin(self, searches: int) -> None:
        """Start one of the searches that share the time of a call."""
        if self._planner.deadline is not None:
            self._planner.deadline.begin(1 / searches)

    def _count_outside(self, observations: FloatArray) -> None:
        """Count states that the training data says nothing about; the log has the first one."""
        outside = self._tokenizer.far_outside(observations).any(axis=1)
        self.num_states += len(observations)
        if outside.any() and not self.num_outside:
            sentence = self._tokenizer.describe_outside(observations[int(np.argmax(outside))])
            log.warning("a state is far outside the training range, so its plan means little: %s", sentence)
        self.num_outside += int(outside.sum())

    def _remember(self, env: int, state: TokenArray, step: Step) -> None:
        """Complete the last transition with its reward, and open the next one with the observed state."""
        memory = self._memories[env]
        if step.first[env] or memory.state is None or memory.action is None:
            memory = self._memories[env] = _Memory()
        else:
            memory.step += 1
            row = self._tokenizer.transition(memory.state, memory.action, step.rewards[env])
            memory.past = [*memory.past, row][-self._max_past :] if self._max_past else []
        memory.state = state

    def _plan(self, envs: list[int], goals: FloatArray) -> None:
        """Search for environments with prompts of equal length, and queue the first actions found."""
        planner, tokenizer, memories = self._planner, self._tokenizer, [self._memories[env] for env in envs]
        goal_tokens = tokenizer.encode_goals(goals[envs])
        prompts = np.stack(
            [tokenizer.prompt(goal, each.past, each.observed) for goal, each in zip(goal_tokens, memories, strict=True)]
        )
        # The noise is a function of seed, step and prompt, not of the environment's place in the batch.
        seeds = np.array(
            [
                stream_seed(planner.seed, memory.step, zlib.crc32(row.tobytes()))
                for memory, row in zip(memories, prompts, strict=True)
            ]
        )
        map_embedding = self._maps[envs] if tokenizer.layout.map_shape else None
        started = time.perf_counter()
        plan = planner.plan(prompts, seeds, map_embedding)
        best = plan.best.cpu().numpy()  # [E', n], from the first action on
        self.plan_seconds.append(time.perf_counter() - started)
        self.num_plans += 1
        if planner.deadline is not None:
            planner.deadline.finish()
            self.num_shortened += planner.deadline.shortened
            self.num_late += self.plan_seconds[-1] > planner.deadline.seconds
        for index, (env, memory) in enumerate(zip(envs, memories, strict=True)):
            memory.queued = self._first_actions(best[index])
            if planner.on_plan is not None:
                tokens, scores = plan.tokens[index].cpu().numpy(), plan.scores[index].cpu().numpy()
                planner.on_plan(PlanTrace(env, memory.step, prompts[index], tokens, scores))

    def _first_actions(self, tokens: TokenArray) -> list[TokenArray]:
        """Actions to take from a plan [n] before the next one is made."""
        layout = self._tokenizer.layout
        actions = [tokens[: layout.action_dim]]
        for index in range(1, self._planner.search.replan_every):
            end = index * layout.size + layout.action_dim
            if len(tokens) < end or (tokens[:end] == self._tokenizer.stop).any():
                break  # the plan ends here, or predicts the end of the episode; if it does not end, plan again
            actions.append(tokens[end - layout.action_dim : end])
        return actions

    def _encode_maps(self, step: Step) -> None:
        """Encode the maps of episodes that start, all at once."""
        if not self._tokenizer.layout.map_shape:
            return
        unseen = np.array([memory.state is None for memory in self._memories])
        starting = np.flatnonzero(step.active & (step.first | unseen))
        if len(starting):
            encoded = self._planner.model.encode_maps(None if step.maps is None else step.maps[starting])
            assert encoded is not None
            self._maps[torch.from_numpy(starting).to(encoded.device)] = encoded

    def _check(self, step: Step) -> None:
        """Refuse observations that do not fit the model."""
        layout = self._tokenizer.layout
        if step.observations.ndim != 2 or step.goals.ndim != 2:
            raise ValueError(f"an observation must be an array of {layout.observation_dim} numbers, one row per system")
        if step.observations.shape[1] != layout.observation_dim or step.goals.shape[1] < layout.goal_dim:
            raise ValueError(
                f"the model plans for observations of {layout.observation_dim} and goals of {layout.goal_dim} "
                f"dimensions, got {step.observations.shape[1]} and {step.goals.shape[1]}"
            )
        unfinite = step.active & ~step.first & ~np.isfinite(step.rewards)
        if layout.rewards and unfinite.any():
            env = int(np.flatnonzero(unfinite)[0])
            raise ValueError(f"rewards must be finite, got {step.rewards[env]} in environment {env}")
        for name, values in (("observations", step.observations), ("goals", step.goals[:, : layout.goal_dim])):
            finite = np.isfinite(values)
            if finite.all():
                continue
            for env, dim in np.argwhere(~finite & step.active[:, None]):
                raise ValueError(
                    f"{name} must be finite, got {values[env, dim]} in dimension {dim} of environment {env}"
                )


class _Memory:
    """What a policy knows about one environment."""

    def __init__(self) -> None:
        self.past: list[TokenArray] = []  # rows [D] of past transitions
        self.state: TokenArray | None = None  # tokens [O] of the current state
        self.action: TokenArray | None = None  # tokens [A] of the last action
        self.queued: list[TokenArray] = []  # planned actions that were not taken yet
        self.step = 0  # of the episode

    @property
    def observed(self) -> TokenArray:
        """Tokens of the current state [O]."""
        assert self.state is not None
        return self.state
