"""Observations and actions as a system has them, against what the data of the same environment holds."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from trajectory_transformer.data.episode import Dimension
from trajectory_transformer.data.spaces import flatten, map_leaf, split_goal
from trajectory_transformer.data.values import action_of, row_of, split_observation

NUMBERS = (Dimension("x"), Dimension("y"))
SPACES: list[gymnasium.Space[Any]] = [
    spaces.Dict({"b": spaces.Box(-1, 1, (2, 2)), "a": spaces.Dict({"z": spaces.Discrete(3, start=1)})}),
    spaces.Dict(
        {name: spaces.Box(-1, 1, (2,)) for name in ("observation", "achieved_goal", "desired_goal")}
    ),  # the achieved goal repeats the observation
    spaces.Dict(
        {
            "observation": spaces.Box(-1, 1, (3,)),
            "achieved_goal": spaces.Box(-1, 1, (2,)),
            "desired_goal": spaces.Box(-1, 1, (2,)),
        }
    ),
    spaces.Dict({"observation": spaces.Box(-1, 1, (2,)), "map": spaces.Box(0, 255, (2, 4, 4), np.uint8)}),
    spaces.Dict({"pair": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])))}),
]


@pytest.mark.parametrize("space", SPACES)
def test_dictionaries_are_flattened_as_in_the_data(space: gymnasium.Space[Any]) -> None:
    parts, goal_parts = split_goal(space)
    dimensions = [dimension for part in parts for dimension in part.dimensions("observation")]
    space.seed(0)
    for _ in range(5):
        value = space.sample()
        unordered = {key: value[key] for key in reversed(value)}
        row, goal, map = split_observation(unordered, dimensions)
        np.testing.assert_array_equal(row, flatten(value, parts, 1)[0])
        if goal_parts:
            np.testing.assert_array_equal(goal, flatten(value, goal_parts, 1)[0])
        else:
            assert goal is None
        assert (map is not None) == (map_leaf(space) is not None)


def test_labels_become_numbers_of_categories() -> None:
    dimensions = (Dimension("speed"), Dimension("mode", 2, ("eco", "sport")), Dimension("gear", 3, (1, 2, 3)))
    np.testing.assert_array_equal(row_of([0.5, "sport", 3], dimensions), np.array([0.5, 1, 2], np.float32))
    with pytest.raises(ValueError, match="mode must be one of eco, sport, got 'race'"):
        row_of([0.5, "race", 3], dimensions)
    with pytest.raises(ValueError, match=r"must have 3 numbers \(speed, mode, gear\), got 2"):
        row_of([0.5, "eco"], dimensions)


@pytest.mark.parametrize(
    ("dimensions", "expected"),
    [
        ((Dimension("a", 3),), np.int64(2)),
        ((Dimension("a", 3, (1, 2, 3)),), np.int64(3)),
        ((Dimension("a", 3, ("x", "y", "z")),), "z"),
    ],
)
def test_a_single_category_is_its_recorded_value(dimensions: tuple[Dimension, ...], expected: object) -> None:
    found = action_of(np.array([2], np.float32), dimensions)
    assert found == expected and type(found) is type(expected)


def test_several_categories_are_an_array_of_integers() -> None:
    found = action_of(np.array([2, 1], np.float32), (Dimension("a", 3), Dimension("b", 2, (1, 2))))
    assert found.dtype == np.int64 and found.tolist() == [2, 2]
    mixed = action_of(np.array([0.5, 1], np.float32), (Dimension("a"), Dimension("b", 2, (1, 2))))
    assert mixed.dtype == np.float32 and mixed.tolist() == [0.5, 2.0]
    assert action_of(np.array([0.5, 1], np.float32), (Dimension("a"), Dimension("b", 2, ("x", "y")))) == [0.5, "y"]
    row = np.array([0.5, 1], np.float32)
    assert action_of(row, NUMBERS) is row


def test_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"observations of shape \(32, 32, 3\) are images.* 3,072 for each step"):
        split_goal(spaces.Box(0, 255, (32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"observations 'camera' of shape \(84, 84\) are images"):
        split_goal(spaces.Dict({"camera": spaces.Box(0, 255, (84, 84), np.uint8)}))
