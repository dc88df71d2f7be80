"""Rollouts to numbers: returns, success, and whatever else the environment reports of an episode."""

from collections.abc import Sequence

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import summarize


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes with standard errors and counts.

    Where the environment reports `success`, its other reports (a path's length, say) are averaged over successes: of
    an episode that failed they say nothing.
    """
    metrics = summarize("return", [episode.total_reward for episode in episodes])
    metrics |= summarize("steps", [len(episode) for episode in episodes])
    reports = sorted(set.intersection(*(set(episode.outcome) for episode in episodes)))
    counted = list(episodes)
    if "success" in reports:
        metrics |= summarize("success_rate", [episode.outcome["success"] for episode in episodes])
        counted = [episode for episode in episodes if episode.outcome["success"]]
    for name in reports:
        if name != "success" and counted:
            metrics |= summarize(name, [episode.outcome[name] for episode in counted])
    return metrics


def check_fit(model: TrajectoryModel, env_id: str, dims: tuple[int, int, int]) -> None:
    """Refuse an environment whose observation, goal and action sizes are not the model's."""
    layout = model.layout
    wanted = (layout.observation_dim, layout.goal_dim, layout.action_dim)
    if (dims[0], dims[2]) != (wanted[0], wanted[2]) or dims[1] < wanted[1]:
        raise ValueError(
            f"environment {env_id!r} does not fit the model: it has {dims[0]} observation, {dims[1]} goal and "
            f"{dims[2]} action dimensions, the model was trained on {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
