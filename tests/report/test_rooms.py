"""Doors on the way: counted by room, and the figure prefers goals in another room."""

import numpy as np

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.envs.rooms import doors_between
from trajectory_transformer.report.rooms import between_rooms, success_by_doors


def walk(start: tuple[float, float], goal: tuple[float, float], *, success: bool = True) -> Episode:
    """An episode of one step."""
    places = np.array([start, goal], dtype=np.float32)
    return Episode(places, np.zeros((1, 2), np.float32), None, success, places[1], {"success": float(success)})


def test_opposite_rooms_are_two_doors_apart() -> None:
    assert doors_between((0.1, 0.1), (0.4, 0.4)) == 0
    assert doors_between((0.1, 0.1), (0.6, 0.4)) == doors_between((0.1, 0.9), (0.1, 0.1)) == 1
    assert doors_between((0.9, 0.1), (0.1, 0.9)) == 2


def test_success_is_counted_by_doors() -> None:
    episodes = [
        walk((0.1, 0.1), (0.2, 0.2)),
        walk((0.1, 0.1), (0.9, 0.2), success=False),
        walk((0.1, 0.1), (0.9, 0.1)),
        walk((0.1, 0.1), (0.9, 0.9)),
    ]
    found = success_by_doors(episodes)
    assert found == "goals reached: 1 of 1 through 0 doors, 1 of 2 through 1 door, 1 of 1 through 2 doors"
    assert between_rooms(episodes, 3) == episodes[1:]
    assert between_rooms(episodes, 4) == [*episodes[1:], episodes[0]]
