"""Gymnasium spaces as flat rows of numbers: what comes where, what it is called, which actions are categories.

One order everywhere: the entries of a dictionary by key in alphabetical order, those of a tuple by position, nested
ones depth first, an array row by row. A discrete entry is one number: how far its value lies above the space's start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from trajectory_transformer.data.episode import Dimension, FloatArray, MapArray

Space = spaces.Space[Any]
Path = tuple[str | int, ...]

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
GOAL, ACHIEVED, MAP = "desired_goal", "achieved_goal", "map"


@dataclass(frozen=True)
class Leaf:
    """One array within a space, and the way to it through dictionaries and tuples."""

    path: Path
    space: Space

    @cached_property
    def dim(self) -> int:
        """Numbers in it."""
        return int(np.prod(self.space.shape or ()))

    @cached_property
    def categories(self) -> tuple[int, ...]:
        """Categories of each number, 0 where it is continuous."""
        if isinstance(self.space, spaces.Discrete):
            return (int(self.space.n),)
        if isinstance(self.space, spaces.MultiDiscrete):
            return tuple(int(count) for count in self.space.nvec.ravel())
        return (2 if isinstance(self.space, spaces.MultiBinary) else 0,) * self.dim

    @cached_property
    def start(self) -> npt.NDArray[np.int64]:
        """The value of category 0, in the space's own shape."""
        space = self.space
        return np.asarray(space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0, np.int64)

    def dimensions(self, kind: str) -> tuple[Dimension, ...]:
        """Its dimensions, named `arm.angle[2]` by the path, or `kind 2` if the path is empty or just `kind`."""
        if self.path in ((), (kind,)):
            names = [f"{kind} {index}" for index in range(self.dim)]
        else:
            name = ".".join(str(key) for key in self.path)
            names = [name] if self.dim == 1 else [f"{name}[{index}]" for index in range(self.dim)]
        return tuple(map(Dimension, names, self.categories))


def leaves(space: Space, what: str, path: Path = ()) -> list[Leaf]:
    """The arrays of a space in their order; `what` says in an error what the space is for."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in leaves(space[key], what, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for index, part in enumerate(space) for leaf in leaves(part, what, (*path, index))]
    if not isinstance(space, _LEAVES):
        raise ValueError(f"{what} must be made of Box, Discrete, MultiDiscrete and MultiBinary, got {space}")
    return [Leaf(path, space)]


def map_leaf(space: Space) -> Leaf | None:
    """The array that holds for a whole episode: an image `map` beside `observation` in a dictionary."""
    if not isinstance(space, spaces.Dict) or not {MAP, "observation"} <= set(space):
        return None
    map = space[MAP]
    return Leaf((MAP,), map) if isinstance(map, spaces.Box) and len(map.shape) == 3 else None


def split_goal(space: Space) -> tuple[list[Leaf], list[Leaf]]:
    """Arrays of the observation and of the goal; what holds for a whole episode (`map_leaf`) is in neither.

    In a dictionary, `desired_goal` is the goal and the rest the observation. `achieved_goal` belongs to it, except
    where it has the very space of `observation`: then it repeats it and is left out.
    """
    aside = map_leaf(space)
    every = [leaf for leaf in leaves(space, "observations") if aside is None or leaf.path != aside.path]
    if not isinstance(space, spaces.Dict) or not {GOAL, "observation"} <= set(space):
        return every, []
    repeats = ACHIEVED in space.spaces and space[ACHIEVED] == space["observation"]
    left_out = {GOAL, ACHIEVED} if repeats else {GOAL}
    return [leaf for leaf in every if leaf.path[0] not in left_out], [leaf for leaf in every if leaf.path[0] == GOAL]


def total_dim(parts: Sequence[Leaf]) -> int:
    """Numbers in all of the arrays."""
    return sum(leaf.dim for leaf in parts)


def flatten(values: object, parts: Sequence[Leaf], count: int) -> FloatArray:
    """Rows of numbers from `count` values of a space, batched array by array: -> [count, D]."""
    rows = []
    for leaf in parts:
        array = _at(values, leaf.path)
        if array.size != count * leaf.dim:
            name = ".".join(map(str, leaf.path)) or "an array"
            raise ValueError(f"{name} must have {leaf.dim} numbers in each of {count} rows, got shape {array.shape}")
        if not isinstance(leaf.space, spaces.Box):
            array = array.astype(np.int64) - leaf.start
        rows.append(array.reshape(count, leaf.dim).astype(np.float32))
    if not rows:
        return np.zeros((count, 0), dtype=np.float32)
    return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)


def maps_of(values: object, leaf: Leaf, count: int) -> MapArray:
    """The maps in `count` batched values of a space, small whole numbers as bytes: -> [count, C, H, W]."""
    array = _at(values, leaf.path).reshape(count, *(leaf.space.shape or ()))
    return array.astype(np.uint8) if leaf.space.dtype == np.uint8 else array.astype(np.float32)


def _at(values: Any, path: Path) -> npt.NDArray[np.generic]:
    """The array at the end of a path."""
    for key in path:
        if isinstance(values, Mapping) and key not in values:
            raise ValueError(f"the entry {'.'.join(map(str, path))!r} is missing, found {sorted(values)}")
        values = values[key]
    return np.asarray(values)


def action_leaf(space: Space) -> Leaf:
    """The one array that an action is; dictionaries and tuples of actions cannot be sent to an environment."""
    if not isinstance(space, _LEAVES):
        raise ValueError(f"actions must be a Box, Discrete, MultiDiscrete or MultiBinary, the environment has {space}")
    return Leaf((), space)


def env_actions(actions: npt.NDArray[np.floating], leaf: Leaf) -> npt.NDArray[np.generic]:
    """Rows of numbers as an environment takes them, categories as integers: actions [E, A] -> [E, ...]."""
    if actions.ndim != 2 or actions.shape[1] != leaf.dim:
        raise ValueError(
            f"the policy's actions must have {leaf.dim} dimensions to fit {leaf.space}, got shape {actions.shape[1:]}"
        )
    if not np.isfinite(actions).all():
        raise ValueError(f"the policy's actions must be finite, got {actions[~np.isfinite(actions)][0]}")
    shape = (len(actions), *(leaf.space.shape or ()))
    if isinstance(leaf.space, spaces.Box):
        return actions.reshape(shape)
    whole = np.rint(actions).astype(np.int64)
    bad = (whole != actions) | (whole < 0) | (whole >= np.array(leaf.categories))
    if bad.any():
        raise ValueError(f"the policy's actions must be categories of {leaf.space}, got {actions[bad][0]}")
    return np.asarray(whole.reshape(shape) + leaf.start)
