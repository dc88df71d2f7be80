"""Rollouts to numbers: returns, success, normalised scores, and what the environment reports of a success."""

from collections.abc import Sequence

import numpy as np

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.data.scores import References, normalized_score
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import summarize


def episode_metrics(episodes: Sequence[Episode], references: References | None = None) -> dict[str, float]:
    """Means over episodes with standard errors, counts and, for returns and scores, 95 % bootstrap intervals.

    Where the environment reports `success`, its other reports (a path's length, say) are averaged over successes: of
    an episode that failed they say nothing. Where it does not, they are the state of a simulator at its last step (a
    hopper's height), which is no outcome, and are left out.
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
    """Where the mean lies in 95 of 100 resamples of the values: `name_low` and `name_high`."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(resamples, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


def rate_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Wilson's 95 % interval of a share of successes, which stays honest near 0 and 1: `name_low` and `name_high`."""
    count, share, z = len(values), float(np.mean(values)), 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * float(np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))) / (1 + z * z / count)
    return {f"{name}_low": max(middle - half, 0.0), f"{name}_high": min(middle + half, 1.0)}


def latency_metrics(plan_seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of the time a plan took, in milliseconds; a plan may serve many environments at once."""
    if not plan_seconds:
        return {}
    p50, p90, p99 = np.quantile(np.asarray(plan_seconds) * 1000.0, [0.5, 0.9, 0.99])
    return {"plan_ms_p50": float(p50), "plan_ms_p90": float(p90), "plan_ms_p99": float(p99)}


def check_fit(model: TrajectoryModel, env_id: str, dims: tuple[int, int, int], map_shape: tuple[int, ...] = ()) -> None:
    """Refuse an environment whose observation, goal, action and map sizes are not the model's."""
    layout = model.layout
    wanted = (layout.observation_dim, layout.goal_dim, layout.action_dim)
    if (dims[0], dims[2]) != (wanted[0], wanted[2]) or dims[1] < wanted[1]:
        raise ValueError(
            f"environment {env_id!r} does not fit the model: it has {dims[0]} observation, {dims[1]} goal and "
            f"{dims[2]} action dimensions, the model was trained on {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    if layout.map_shape and map_shape != layout.map_shape:
        raise ValueError(
            f"environment {env_id!r} does not fit the model: it shows "
            f"{f'a map of shape {map_shape}' if map_shape else 'no map'}, "
            f"the model was trained on {layout.map_shape}"
        )
