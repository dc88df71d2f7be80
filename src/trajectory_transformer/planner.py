"""A trained model as a controller: beam search at every step, for one system or many at once."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.config import SearchConfig
from trajectory_transformer.data.episode import FloatArray, MapArray
from trajectory_transformer.gpu.backends import make_decoder
from trajectory_transformer.gpu.planning.captured import CapturedSearch
from trajectory_transformer.gpu.planning.fused import FusedDecoder
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.rollout import Policy, Step
from trajectory_transformer.search.beam import Objective, Plan, beam_search, likelihood_search, median_continuation
from trajectory_transformer.search.sampling import Noise, stream_seed
from trajectory_transformer.tokens.windows import encode_goals

TokenArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlanTrace:
    """One plan as it was made, for later viewing."""

    env: int
    step: int  # of the episode
    prompt: TokenArray  # [L]
    tokens: TokenArray  # [K, n], kept candidates, best first
    scores: FloatArray  # [K]


class PlanningPolicy:
    """Plans by beam search, acts on the first steps of the plan, plans again: a receding-horizon controller."""

    def __init__(
        self,
        model: TrajectoryModel,
        config: SearchConfig,
        objective: Objective | None = None,
        *,
        seed: int = 0,
        on_plan: Callable[[PlanTrace], None] | None = None,
    ) -> None:
        """Control with a model; any number of environments, each with a context of its own.

        Without an objective the most likely continuation is found token by token (imitation, goals), or the median one
        is taken (`SearchConfig.imitate`); with one, sampled transitions are ranked by it. `on_plan` is told every plan
        made.
        """
        if objective is not None and config.imitate != "mode":
            raise ValueError(
                f"search.imitate {config.imitate} is for imitation and goals; planning for return ranks sampled actions"
            )
        self.model = model
        self.config = config
        self.plan_seconds: list[float] = []  # time of every search
        self._objective = objective
        self._seed = seed
        self._on_plan = on_plan
        self._decoder = make_decoder(config.decoder, model.gpt, config.window, precision=config.precision)
        self._captured = None
        if isinstance(self._decoder, FusedDecoder):
            self._captured = CapturedSearch(self._search, model.device, refresh=self._decoder.refresh)
        self._values = torch.from_numpy(model.discretizer.values).float().to(model.device)  # [D, V]
        window = model.gpt.config.window if config.window is None else config.window
        self._max_past = min(config.context, window - 1)  # the current transition needs a place too
        if config.opening_nucleus is not None and self._max_past < 1:
            raise ValueError(
                "search.opening_nucleus needs a past that tells where an episode begins, got a search.context of "
                f"{config.context} in a window of {window}"
            )
        self._past: list[list[TokenArray]] = []  # per environment: rows [D] of past transitions, then the current one's
        self._queued: list[list[TokenArray]] = []  # per environment: planned action tokens [A] not yet taken
        self._steps: list[int] = []  # per environment: steps of the episode so far
        self._maps = torch.empty(0, 0)  # [E, width], what a model that reads maps made of each

    def act(self, step: Step) -> FloatArray:
        """Actions [E, A]."""
        layout, discretizer = self.model.layout, self.model.discretizer
        num_envs = len(step.observations)
        self._check(step)
        if len(self._past) != num_envs:
            self._past = [[] for _ in range(num_envs)]
            self._queued = [[] for _ in range(num_envs)]
            self._steps = [0] * num_envs
            self._maps = torch.zeros(num_envs, self.model.gpt.config.width, device=self.model.device)
        self._encode_contexts(step)
        observed = discretizer.encode(step.observations, layout.observation)
        active = np.flatnonzero(step.active).tolist()
        for env in active:
            self._remember(env, observed[env], step)
        waiting = [env for env in active if not self._queued[env]]
        # Prompts of one search have one length, so environments are planned for by how much past they have.
        for length in sorted({len(self._past[env]) for env in waiting}):
            self._plan([env for env in waiting if len(self._past[env]) == length], step.goals)

        actions = np.zeros((num_envs, layout.action_dim), dtype=np.float32)
        for env in active:
            tokens = self._queued[env].pop(0)
            self._past[env][-1][layout.action] = tokens
            actions[env] = discretizer.decode(tokens, layout.action)
        return actions

    def _check(self, step: Step) -> None:
        layout = self.model.layout
        if step.observations.shape[1] != layout.observation_dim or step.goals.shape[1] < layout.goal_dim:
            raise ValueError(
                f"the model plans for observations of {layout.observation_dim} and goals of {layout.goal_dim} "
                f"dimensions, got {step.observations.shape[1]} and {step.goals.shape[1]}"
            )
        for name, values in (("observations", step.observations), ("goals", step.goals[:, : layout.goal_dim])):
            finite = np.isfinite(values)
            if finite.all():
                continue
            bad = np.argwhere(~finite & step.active[:, None])
            if len(bad):
                env, dim = bad[0]
                raise ValueError(
                    f"{name} must be finite, got {values[env, dim]} in dimension {dim} of environment {env}"
                )

    def _encode_contexts(self, step: Step) -> None:
        """Read the maps of episodes that start: once for each, all at once."""
        if not self.model.layout.map_shape:
            return
        starting = np.flatnonzero(step.active & (step.first | np.array([not past for past in self._past])))
        if len(starting):
            encoded = self.model.encode_maps(None if step.maps is None else step.maps[starting])
            assert encoded is not None
            self._maps[torch.from_numpy(starting).to(encoded.device)] = encoded

    def _remember(self, env: int, observed: TokenArray, step: Step) -> None:
        """Close the last transition with its reward and open the next with the state seen."""
        layout, discretizer = self.model.layout, self.model.discretizer
        past = self._past[env]
        if step.first[env] or not past:
            past, self._queued[env], self._steps[env] = [], [], 0
        else:
            self._steps[env] += 1
            if layout.rewards:
                reward = discretizer.encode(step.rewards[env : env + 1], slice(layout.reward, layout.reward + 1))
                past[-1][layout.reward] = reward[0]
                # The return that will follow is not known yet. Nothing attends to this token; the top bin fills it.
                past[-1][layout.value] = discretizer.num_bins - 1
        row = np.full(layout.size, discretizer.stop)
        row[layout.observation] = observed
        self._past[env] = [*past[len(past) - self._max_past :], row] if len(past) > self._max_past else [*past, row]

    def _plan(self, envs: list[int], goals: FloatArray) -> None:
        """Search for environments whose prompts have the same length, and queue the first actions found."""
        layout, config = self.model.layout, self.config
        rows = np.stack([np.concatenate(self._past[env]) for env in envs])
        prompts = rows[
            :, : rows.shape[1] - (layout.size - layout.observation_dim)
        ]  # the current transition has no more
        if layout.goal_dim:
            goal_tokens = encode_goals(goals[envs][:, : layout.goal_dim], self.model.discretizer, self.model.tokens)
            prompts = np.concatenate([goal_tokens, prompts], axis=1)
        started = time.perf_counter()
        plan = self._make_plan(prompts, envs)
        # [E', n], from the first action on
        best = plan.best.cpu().numpy() if self._captured is None else self._captured.winners()
        self.plan_seconds.append(time.perf_counter() - started)
        for index, env in enumerate(envs):
            self._queued[env] = self._first_actions(best[index])
            if self._on_plan is not None:
                tokens, scores = plan.tokens[index].cpu().numpy(), plan.scores[index].cpu().numpy()
                self._on_plan(PlanTrace(env, self._steps[env], prompts[index], tokens, scores))
        assert all(len(self._queued[env]) <= config.replan_every for env in envs)

    def _make_plan(self, prompts: TokenArray, envs: list[int]) -> Plan:
        # Noise is a function of the seed and of what the plan is for, not of the environment's place in a batch.
        seeds = [
            stream_seed(self._seed, self._steps[env], zlib.crc32(row.tobytes()))
            for env, row in zip(envs, prompts, strict=True)
        ]
        map_embedding = self._maps[envs] if self.model.layout.map_shape else None
        if self._captured is not None:
            return self._captured(prompts, np.array(seeds), map_embedding)
        device = self.model.device
        return self._search(torch.from_numpy(prompts).to(device), torch.tensor(seeds, device=device), map_embedding)

    def _search(self, prompts: Tensor, seeds: Tensor, map_embedding: Tensor | None) -> Plan:
        """Search for the best continuations of prompts [E, L]; seeds [E] are those of the noise."""
        layout, config, decoder = self.model.layout, self.config, self._decoder
        if self._objective is None:
            if config.imitate == "median":
                return median_continuation(
                    decoder,
                    prompts,
                    num_tokens=(config.replan_every - 1) * layout.size + layout.action_dim,
                    min_tokens=layout.action_dim,
                    map_embedding=map_embedding,
                )
            return likelihood_search(
                decoder,
                prompts,
                num_tokens=config.horizon * layout.size - layout.observation_dim,
                beam_width=config.beam_width,
                min_tokens=layout.action_dim,
                map_embedding=map_embedding,
            )
        return beam_search(
            decoder,
            prompts,
            self._objective,
            layout=layout,
            values=self._values,
            config=config,
            noise=Noise(seeds),
            opening=prompts.shape[1] == layout.goal_dim + layout.observation_dim,
            keep=decoder.keep if isinstance(decoder, FusedDecoder) else None,
            map_embedding=map_embedding,
        )

    def _first_actions(self, tokens: TokenArray) -> list[TokenArray]:
        """The actions to take from a plan [n] before the next one is made."""
        layout, stop = self.model.layout, self.model.discretizer.stop
        actions = [tokens[: layout.action_dim]]
        for index in range(1, self.config.replan_every):
            end = index * layout.size + layout.action_dim
            if (tokens[:end] == stop).any():
                break  # the plan sees the episode end here; if it does not, there will be a new plan
            actions.append(tokens[end - layout.action_dim : end])
        return actions


class Controller:
    """One system under control, without Gymnasium: observations in, actions out."""

    def __init__(self, policy: Policy) -> None:
        """Ask a policy."""
        self._policy = policy
        self._first = True

    def reset(self) -> None:
        """Begin another episode: what was seen before is forgotten."""
        self._first = True

    def act(
        self,
        observation: npt.ArrayLike,
        *,
        reward: float = 0.0,
        goal: npt.ArrayLike | None = None,
        map: MapArray | None = None,
    ) -> FloatArray:
        """Action [A] for an observation [O]; `reward` is the last action's, `goal` [G] is for models that have one.

        So is `map` [C, H, W], a map say; it is read at the first step of an episode.
        """
        goals = np.zeros((1, 0), np.float32) if goal is None else np.asarray(goal, np.float32)[None]
        step = Step(
            observations=np.asarray(observation, np.float32)[None],
            rewards=np.array([0.0 if self._first else reward], np.float32),
            first=np.array([self._first]),
            goals=goals,
            active=np.array([True]),
            maps=None if map is None else map[None],
        )
        self._first = False
        action: FloatArray = self._policy.act(step)[0]
        return action
