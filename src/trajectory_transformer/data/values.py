"""Observations and actions as a user's system has them: dictionaries, categories by their recorded values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dimension, FloatArray, MapArray
from trajectory_transformer.data.spaces import ACHIEVED, GOAL, MAP

Observation = npt.ArrayLike | Sequence[Any] | Mapping[str, Any]
"""An array [O], a list with categories by their values, or a dictionary of (nested) arrays, as an environment gives it.
"""


def split_observation(
    observation: Observation, dimensions: Sequence[Dimension]
) -> tuple[FloatArray, FloatArray | None, MapArray | None]:
    """The row [O], goal [G] and map [C, H, W] of an observation; dictionaries are flattened as in the data.

    As in `split_goal`, entries follow their keys in alphabetical order, `desired_goal` is the goal, and
    `achieved_goal` is left out where it repeats the observation.
    """
    if not isinstance(observation, Mapping):
        return row_of(observation, dimensions), None, None
    entries = dict(observation)
    goal = map = None
    if "observation" in entries:
        goal = entries.pop(GOAL, None)
        map = entries.pop(MAP) if MAP in entries and np.ndim(entries[MAP]) == 3 else None
        others = {key: value for key, value in entries.items() if key != ACHIEVED}
        if len(list(_scalars(others))) == len(dimensions):
            entries = others
    row = row_of(entries, dimensions)
    return row, None if goal is None else vector(goal, "goal"), map


def vector(values: Any, what: str) -> FloatArray:
    """Numbers as a row."""
    try:
        return np.asarray(values, dtype=np.float32).ravel()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {what} must hold numbers, got {values!r:.60}") from error


def row_of(values: Any, dimensions: Sequence[Dimension]) -> FloatArray:
    """Values as a row [D], categories counted from 0."""
    names = ", ".join(each.name for each in dimensions)
    if not isinstance(values, Mapping) and not any(each.labels for each in dimensions):
        try:
            row = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"an observation must be an array of numbers ({names}), got {values!r:.60}") from error
        if values is None or (row.ndim == 0 and len(dimensions) != 1):
            raise ValueError(f"an observation must be an array of {len(dimensions)} numbers ({names}), got {values!r}")
        return row.reshape(1) if row.ndim == 0 else row
    scalars = list(_scalars(values))
    if len(scalars) != len(dimensions):
        raise ValueError(f"an observation must have {len(dimensions)} numbers ({names}), got {len(scalars)}")
    return np.array([_number(each, dim) for each, dim in zip(scalars, dimensions, strict=True)], dtype=np.float32)


def _scalars(values: Any) -> Iterator[Any]:
    """The numbers of nested values, in the order of `spaces.leaves`."""
    if isinstance(values, Mapping):
        for key in sorted(values):
            yield from _scalars(values[key])
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _scalars(each)
    elif isinstance(values, np.ndarray):
        yield from values.ravel().tolist()
    else:
        yield values


def _number(value: Any, dimension: Dimension) -> float:
    if not dimension.labels:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{dimension.name} must be a number, got {value!r:.60}") from error
    if value not in dimension.labels:
        known = ", ".join(map(str, dimension.labels))
        raise ValueError(f"{dimension.name} must be one of {known}, got {value!r}")
    return float(dimension.labels.index(value))


def action_of(row: FloatArray, dimensions: Sequence[Dimension]) -> Any:
    """An action as the environment's `step` takes it: row [A], categories counted from 0.

    Numbers stay an array. A single category is an integer or its recorded value, several are an array of integers. Text
    among several entries makes a list.
    """
    if not any(each.categories for each in dimensions):
        return row
    values = [
        each.labels[int(number)] if each.labels else np.int64(number) if each.categories else number
        for number, each in zip(row, dimensions, strict=True)
    ]
    if len(values) == 1:
        return np.int64(values[0]) if isinstance(values[0], int) else values[0]
    if any(isinstance(value, str) for value in values):
        return values
    is_discrete = all(each.categories for each in dimensions)
    return np.array(values, dtype=np.int64 if is_discrete else np.float32)
