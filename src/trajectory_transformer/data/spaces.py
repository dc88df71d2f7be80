"""Flatten values of Gymnasium spaces to rows of numbers, and name the dimensions.

Order: keys of a dictionary alphabetically, entries of a tuple by position, nested spaces depth first, arrays in C
order. A discrete value becomes one number, counted from the start of its space.
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
    """One array of a space, and its path through nested dictionaries and tuples."""

    path: Path
    space: Space

    @cached_property
    def dim(self) -> int:
        """Number of entries."""
        return int(np.prod(self.space.shape or ()))

    @cached_property
    def categories(self) -> tuple[int, ...]:
        """Number of categories of each entry; 0: continuous."""
        if isinstance(self.space, spaces.Discrete):
            return (int(self.space.n),)
        if isinstance(self.space, spaces.MultiDiscrete):
            return tuple(int(count) for count in self.space.nvec.ravel())
        return (2 if isinstance(self.space, spaces.MultiBinary) else 0,) * self.dim

    @cached_property
    def start(self) -> npt.NDArray[np.int64]:
        """Value of category 0, in the shape of the space."""
        space = self.space
        return np.asarray(space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0, np.int64)

    def dimensions(self, kind: str) -> tuple[Dimension, ...]:
        """One dimension per entry, named after the path (`arm.angle[2]`), or `kind 2` if the path is () or (kind,)."""
        if self.path in ((), (kind,)):
            names = [f"{kind} {index}" for index in range(self.dim)]
        else:
            name = ".".join(str(key) for key in self.path)
            names = [name] if self.dim == 1 else [f"{name}[{index}]" for index in range(self.dim)]
        starts = np.broadcast_to(self.start, self.space.shape or ()).ravel().tolist()
        return tuple(
            Dimension(name, count, tuple(range(start, start + count)) if start else ())
            for name, count, start in zip(names, self.categories, starts, strict=True)
        )


def leaves(space: Space, what: str, path: Path = ()) -> list[Leaf]:
    """The arrays of a space in order; `what` names the space in errors."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in leaves(space[key], what, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for index, part in enumerate(space) for leaf in leaves(part, what, (*path, index))]
    if not isinstance(space, _LEAVES):
        raise ValueError(f"{what} must consist of Box, Discrete, MultiDiscrete and MultiBinary spaces, got {space}")
    return [Leaf(path, space)]


def map_leaf(space: Space) -> Leaf | None:
    """The map of a dictionary space: a Box [C, H, W] `map` next to `observation`; None without one."""
    if not isinstance(space, spaces.Dict) or not {MAP, "observation"} <= set(space):
        return None
    map = space[MAP]
    return Leaf((MAP,), map) if isinstance(map, spaces.Box) and len(map.shape) == 3 else None


def split_goal(space: Space) -> tuple[list[Leaf], list[Leaf]]:
    """Arrays of the observation and arrays of the goal; the map (`map_leaf`) is in neither.

    In a dictionary, `desired_goal` is the goal and all other entries are the observation. `achieved_goal` is left out
    if it has the same space as `observation`, because it then repeats the observation.
    """
    map = map_leaf(space)
    every = [leaf for leaf in leaves(space, "observations") if map is None or leaf.path != map.path]
    for leaf in every:
        _refuse_image(leaf)
    if not isinstance(space, spaces.Dict) or not {GOAL, "observation"} <= set(space):
        return every, []
    repeats = ACHIEVED in space.spaces and space[ACHIEVED] == space["observation"]
    left_out = {GOAL, ACHIEVED} if repeats else {GOAL}
    return [leaf for leaf in every if leaf.path[0] not in left_out], [leaf for leaf in every if leaf.path[0] == GOAL]


def _refuse_image(leaf: Leaf) -> None:
    """Refuse images: every number of an observation becomes a token, so one image would be thousands of them."""
    shape = leaf.space.shape or ()
    if len(shape) >= 3 or (len(shape) == 2 and leaf.space.dtype == np.uint8):
        name = ".".join(map(str, leaf.path))
        raise ValueError(
            f"observations{f' {name!r}' if name else ''} of shape {shape} are images, which are not supported: every "
            f"number becomes a token, {leaf.dim:,} for each step. Encode them as vectors of a few dozen numbers first "
            "(gymnasium.ObservationWrapper), or observe the state of the simulator instead"
        )


def total_dim(parts: Sequence[Leaf]) -> int:
    """Number of entries of all arrays."""
    return sum(leaf.dim for leaf in parts)


def flatten(values: object, parts: Sequence[Leaf], count: int) -> FloatArray:
    """Flatten a batch of `count` values of a space to rows [count, D]."""
    rows = []
    for leaf in parts:
        array = _at(values, leaf.path)
        if array.size != count * leaf.dim:
            name = ".".join(map(str, leaf.path)) or "the array"
            raise ValueError(f"{name} must have {leaf.dim} entries in each of {count} rows, got shape {array.shape}")
        if not isinstance(leaf.space, spaces.Box):
            array = array.astype(np.int64) - leaf.start
        rows.append(array.reshape(count, leaf.dim).astype(np.float32))
    if not rows:
        return np.zeros((count, 0), dtype=np.float32)
    return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)


def maps_of(values: object, leaf: Leaf, count: int) -> MapArray:
    """The maps [count, C, H, W] in a batch of `count` values of a space, as uint8 or float32."""
    array = _at(values, leaf.path).reshape(count, *(leaf.space.shape or ()))
    return array.astype(np.uint8) if leaf.space.dtype == np.uint8 else array.astype(np.float32)


def _at(values: Any, path: Path) -> npt.NDArray[np.generic]:
    """The array at a path."""
    for key in path:
        if isinstance(values, Mapping) and key not in values:
            raise ValueError(f"the entry {'.'.join(map(str, path))!r} is missing, got {sorted(values)}")
        values = values[key]
    return np.asarray(values)


def action_leaf(space: Space) -> Leaf:
    """The array of an action space; dictionaries and tuples are not supported."""
    if not isinstance(space, _LEAVES):
        raise ValueError(f"the action space must be a Box, Discrete, MultiDiscrete or MultiBinary, got {space}")
    return Leaf((), space)


def env_actions(actions: npt.NDArray[np.floating], leaf: Leaf) -> npt.NDArray[np.generic]:
    """Convert flat actions to the format of the action space, categories to integers: [E, A] -> [E, ...]."""
    if actions.ndim != 2 or actions.shape[1] != leaf.dim:
        raise ValueError(
            f"actions of the policy must have {leaf.dim} dimensions to fit {leaf.space}, got shape {actions.shape[1:]}"
        )
    if not np.isfinite(actions).all():
        raise ValueError(f"actions of the policy must be finite, got {actions[~np.isfinite(actions)][0]}")
    shape = (len(actions), *(leaf.space.shape or ()))
    if isinstance(leaf.space, spaces.Box):
        return actions.reshape(shape)
    integers = np.rint(actions).astype(np.int64)
    bad = (integers != actions) | (integers < 0) | (integers >= np.array(leaf.categories))
    if bad.any():
        raise ValueError(f"actions of the policy must be categories of {leaf.space}, got {actions[bad][0]}")
    return np.asarray(integers.reshape(shape) + leaf.start)
