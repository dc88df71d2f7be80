"""Episodes in the four rooms by the doors on their way."""

from collections.abc import Sequence

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.envs.rooms import doors_between


def doors_of(episode: Episode) -> int:
    """Doors between the start and the goal of an episode: 0, 1 or 2."""
    goal = episode.observations[-1] if episode.goal is None else episode.goal
    return doors_between(episode.observations[0], goal)


def success_by_doors(episodes: Sequence[Episode]) -> str:
    """How many goals were reached, by the number of doors on the way, as a sentence."""
    parts = []
    for doors in range(3):
        reached = [bool(episode.outcome.get("success")) for episode in episodes if doors_of(episode) == doors]
        if reached:
            parts.append(f"{sum(reached)} of {len(reached)} through {doors} door{'' if doors == 1 else 's'}")
    return "goals reached: " + ", ".join(parts)


def between_rooms(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """The first episodes whose goal is in another room than the start; others only if there are too few."""
    return sorted(episodes, key=lambda episode: doors_of(episode) == 0)[:count]
