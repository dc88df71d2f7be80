"""Play episodes with a planner or any other policy, and report return, success rate and normalised score."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajectory_transformer.config import FIRST_SEED, require
from trajectory_transformer.data.episode import Episode, Metadata
from trajectory_transformer.data.scores import References, normalized_score, references_of
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.files import parse_json
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner, PlanningPolicy
from trajectory_transformer.results import summarize
from trajectory_transformer.rollout import Dims, Policy, TrainedPolicy, make_envs, map_shape, rollout, space_dims

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Episodes that were played, and what they amount to."""

    env: str
    env_options: Mapping[str, Any]
    episodes: tuple[Episode, ...]
    metrics: dict[str, float]  # a mean `x` comes with `x_n` and, over at least two, `x_stderr`
    seconds: float


def evaluate(
    planner: Planner | Policy,
    env: str | None = None,
    *,
    episodes: int = 100,
    num_envs: int = 50,
    seed: int = FIRST_SEED,
    env_options: Mapping[str, Any] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    trust: bool = False,
) -> Evaluation:
    """Play episodes in an environment.

    Args:
        planner: a planner, or a policy that acts in several environments at once.
        env: Gymnasium id; None: the environment that the dataset of the planner or baseline came from.
        episodes: episodes to play.
        num_envs: environments that are played at the same time.
        seed: episode i is reset with seed + i.
        env_options: arguments of the environment's constructor; None: those of the dataset, in its environment.
        on_episode: called with every episode that ends.
        on_step: called after every step with the number of environments that took it.
        trust: also import the module of an environment `module:Id-v0` that only the dataset names.
    """
    require(episodes >= 1, "the number of episodes must be at least 1", episodes)
    require(num_envs >= 1, "the number of environments must be at least 1", num_envs)
    require(seed >= 0, "the seed must not be negative", seed)
    metadata = metadata_of(planner)
    env_id, options = environment_of(metadata, env, env_options, trust=trust)
    policy = planner.policy() if isinstance(planner, Planner) else planner
    started = time.perf_counter()
    envs = make_envs(env_id, min(num_envs, episodes), options)
    try:
        if isinstance(planner, Planner):
            check_fit(planner.model, env_id, space_dims(envs), map_shape(envs))
            if space_dims(envs)[1] and not planner.model.layout.goal_dim:
                log.warning("the environment has goals, but the model was trained without tokens.goal_dims: not used")
            if any(action_leaf(envs.single_action_space).categories):
                _refuse_medians(planner, env_id)
        elif isinstance(planner, TrainedPolicy):
            check_dims(planner.dims, env_id, space_dims(envs))
        played = rollout(envs, policy, num_episodes=episodes, seed=seed, on_episode=on_episode, on_step=on_step)
    finally:
        envs.close()
    metrics = episode_metrics(played, references_of(env_id, metadata))
    metrics |= latency_metrics(getattr(policy, "plan_seconds", []))
    if isinstance(policy, PlanningPolicy):
        # Plans from states unlike the training data mean little, however they score.
        metrics["outside_training_range"] = policy.num_outside / policy.num_states
        if isinstance(planner, Planner) and planner.deadline is not None:
            metrics["shortened_plans"] = policy.num_shortened / policy.num_plans
            metrics["late_plans"] = policy.num_late / policy.num_plans
    return Evaluation(env_id, options, tuple(played), metrics, time.perf_counter() - started)


def metadata_of(planner: Planner | Policy) -> Metadata:
    """Metadata of the dataset that a planner or policy was trained on; empty if unknown."""
    if isinstance(planner, Planner):
        return planner.model.metadata
    return planner.metadata if isinstance(planner, TrainedPolicy) else {}


def environment_of(
    metadata: Metadata, env: str | None, env_options: Mapping[str, Any] | None, *, trust: bool = False
) -> tuple[str, dict[str, Any]]:
    """Id and constructor arguments of the environment to play in; a dataset's metadata fills in what is not given.

    An id `module:Id-v0` runs the code of a module. One that only the dataset names is refused without `trust`.
    """
    env_id = env or metadata.get("env")
    if not isinstance(env_id, str):
        raise ValueError("the dataset of this model names no environment: give one (--env)")
    if env is None and ":" in env_id and not trust:
        raise ValueError(
            f"the dataset of this model names the environment {env_id!r}, which would import a module: name it "
            "yourself with --env, or pass --trust true if you trust where the model came from"
        )
    if env_options is not None:
        return env_id, dict(env_options)
    same = env_id == metadata.get("env")
    options = parse_json(str(metadata.get("env_options", "{}")), "env_options of this model") if same else {}
    if not isinstance(options, dict):
        raise ValueError(f"env_options in the metadata of this model must be a mapping, got {options!r}")
    return env_id, options


def _refuse_medians(planner: Planner, env_id: str) -> None:
    """Categories have no order, so they have no median."""
    actions = f"the actions of {env_id} are categories"
    if planner.search.imitate == "median":
        raise ValueError(f"search.imitate median is for continuous actions, {actions}: use mode")
    if planner.objective is not None and planner.search.action.middle is not None:
        # A planner whose model knows of categories has replaced it.
        raise ValueError(
            f"search.action.middle is for continuous actions, {actions}, which the training data does not say: use "
            "--search.action.nucleus 0.4"
        )


def episode_metrics(episodes: Sequence[Episode], references: References | None = None) -> dict[str, float]:
    """Means over episodes with standard errors, counts and, for returns and scores, 95 % bootstrap intervals.

    If the environment reports `success`, its other reports (such as a path length) are averaged over the successful
    episodes. If it does not, they are the state of a simulator at the last step (such as a hopper's height), not an
    outcome, and are left out.
    """
    returns = [episode.total_reward for episode in episodes]
    metrics = summarize("return", returns) | bootstrap_interval("return", returns)
    if references is not None:
        scores = [normalized_score(value, references) for value in returns]
        metrics |= summarize("normalized_score", scores) | bootstrap_interval("normalized_score", scores)
    metrics |= summarize("steps", [len(episode) for episode in episodes])
    reports = set.intersection(*(set(episode.outcome) for episode in episodes))
    if "success" in reports:
        outcomes = [episode.outcome["success"] for episode in episodes]
        metrics |= summarize("success_rate", outcomes) | rate_interval("success_rate", outcomes)
        successes = [episode for episode in episodes if episode.outcome["success"]]
        for name in sorted(reports - {"success"}) if successes else ():
            metrics |= summarize(name, [episode.outcome[name] for episode in successes])
    return metrics


def bootstrap_interval(name: str, values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> dict[str, float]:
    """95 % bootstrap interval of the mean of at least two values: `name_low` and `name_high`."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return {}
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(resamples, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


def rate_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Wilson 95 % interval of a success rate, which is valid near 0 and 1 too: `name_low` and `name_high`."""
    count, share, z = len(values), float(np.mean(values)), 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * float(np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))) / (1 + z * z / count)
    return {f"{name}_low": max(middle - half, 0.0), f"{name}_high": min(middle + half, 1.0)}


def latency_metrics(plan_seconds: Collection[float]) -> dict[str, float]:
    """Percentiles of the planning time in milliseconds; one plan may serve many environments at once."""
    if not plan_seconds:
        return {}
    p50, p90, p99 = np.quantile(np.array(list(plan_seconds)) * 1000.0, [0.5, 0.9, 0.99])
    return {"plan_ms_p50": float(p50), "plan_ms_p90": float(p90), "plan_ms_p99": float(p99)}


def check_fit(model: TrajectoryModel, env_id: str, dims: Dims, map_shape: tuple[int, ...] = ()) -> None:
    """Refuse an environment whose observation, goal, action or map sizes differ from the model's."""
    layout = model.layout
    check_dims(Dims(layout.observation_dim, layout.goal_dim, layout.action_dim), env_id, dims)
    if layout.map_shape and map_shape != layout.map_shape:
        raise ValueError(
            f"environment {env_id!r} does not fit the model: it has "
            f"{f'a map of shape {map_shape}' if map_shape else 'no map'}, "
            f"the model was trained on {layout.map_shape}"
        )


def check_dims(wanted: Dims, env_id: str, dims: Dims) -> None:
    """Refuse an environment whose sizes differ from those of the training data; more goal dimensions are ignored."""
    if (dims.observation, dims.action) != (wanted.observation, wanted.action) or dims.goal < wanted.goal:
        raise ValueError(
            f"environment {env_id!r} does not fit the model: it has {dims.observation} observation, {dims.goal} goal "
            f"and {dims.action} action dimensions, the model was trained on {wanted.observation}, {wanted.goal} and "
            f"{wanted.action}"
        )
