"""Episodes, datasets of episodes, and the `.npz` files that store a dataset."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format

from trajectory_transformer.files import naming, parse_json, replacing
from trajectory_transformer.limits import check_size

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
MapArray = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
Metadata = Mapping[str, str | int | float | bool | None]

FORMAT = 1

_DIMENSIONS = [f"{kind}_{part}" for kind in ("observation", "action") for part in ("names", "categories", "labels")]
_NUMBERS = ("format", "lengths", "terminated", "observations", "actions", "rewards", "goals", "maps", "contexts")
_ARRAYS = (*_NUMBERS, "outcomes", "metadata", *_DIMENSIONS)  # of a `.npz` file
_ZIP_END_SIZE = 22 + 65_535  # bytes of the end record of a zip file with its longest comment


@dataclass(frozen=True)
class Episode:
    """One recorded episode of T steps."""

    observations: FloatArray  # [T + 1, O], final state included
    actions: FloatArray  # [T, A]
    rewards: FloatArray | None  # [T]; None if not recorded
    terminated: bool  # the task ended the episode; False if it was truncated, for example by a time limit
    goal: FloatArray | None = None  # [G], what the agent was to reach
    outcome: Mapping[str, float] = field(
        default_factory=dict
    )  # what the environment reported at the last step: success, ...
    map: MapArray | None = None  # [C, H, W], an image-like array that does not change during the episode

    def __post_init__(self) -> None:
        """Check shapes and values."""
        if self.observations.ndim != 2 or self.actions.ndim != 2:
            raise ValueError(
                "an episode needs observations [T + 1, O] and actions [T, A], "
                f"got shapes {self.observations.shape} and {self.actions.shape}"
            )
        steps = len(self.actions)
        if steps == 0:
            raise ValueError("an episode needs at least one action, got none")
        if len(self.observations) != steps + 1:
            raise ValueError(
                f"an episode of {steps} actions needs {steps + 1} observations "
                f"(the final state included), got {len(self.observations)}"
            )
        if self.rewards is not None and self.rewards.shape != (steps,):
            raise ValueError(
                f"an episode of {steps} actions needs rewards of shape ({steps},), got {self.rewards.shape}"
            )
        if self.map is not None and (self.map.ndim != 3 or self.map.dtype not in (np.uint8, np.float32)):
            raise ValueError(
                "a map must be a uint8 or float32 array [channels, height, width], "
                f"got {self.map.dtype} of shape {self.map.shape}"
            )
        for name in ("observations", "actions", "rewards", "goal", "map"):
            values = getattr(self, name)
            if values is not None and not np.isfinite(values).all():
                place = ", ".join(str(index) for index in np.argwhere(~np.isfinite(values))[0])
                raise ValueError(f"{name} must be finite, got {values[~np.isfinite(values)][0]} at [{place}]")

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.actions)

    @property
    def total_reward(self) -> float:
        """Undiscounted return; 0 without rewards."""
        return 0.0 if self.rewards is None else float(self.rewards.sum(dtype=np.float64))


@dataclass(frozen=True)
class Dimension:
    """One entry of an observation or action vector."""

    name: str
    categories: int = 0  # number of categories; their numbers are 0, 1, ...; 0: continuous
    labels: tuple[str | int, ...] = ()  # what was recorded for each category; empty: its number

    def __post_init__(self) -> None:
        """Check the number of categories."""
        object.__setattr__(self, "labels", tuple(self.labels))  # a list if it was read from JSON
        if self.categories < 0:
            raise ValueError(f"dimension {self.name!r}: categories must not be negative, got {self.categories}")
        if self.labels and (len(self.labels) != self.categories or len(set(self.labels)) != self.categories):
            raise ValueError(
                f"dimension {self.name!r}: {self.categories} categories need as many different labels, "
                f"got {list(self.labels)}"
            )


def dimension_fields(observations: Sequence[Dimension], actions: Sequence[Dimension]) -> dict[str, list[Any]]:
    """Dimensions as lists for JSON: names, categories and labels."""
    fields: dict[str, list[Any]] = {}
    for kind, dimensions in (("observation", observations), ("action", actions)):
        fields[f"{kind}_names"] = [each.name for each in dimensions]
        fields[f"{kind}_categories"] = [each.categories for each in dimensions]
        if any(each.labels for each in dimensions):
            fields[f"{kind}_labels"] = [list(each.labels) for each in dimensions]
    return fields


def dimensions_from(kind: str, stored: Mapping[str, Sequence[Any]]) -> tuple[Dimension, ...]:
    """The dimensions of a kind from what `dimension_fields` made; each list may be missing or empty."""
    given = {part: stored.get(f"{kind}_{part}", ()) for part in ("names", "categories", "labels")}
    lengths = {f"{kind}_{part}": len(values) for part, values in given.items() if len(values)}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{' and '.join(lengths)} must have the same length, got {' and '.join(map(str, lengths.values()))}"
        )
    count = max(lengths.values(), default=0)
    names = given["names"] or _default_names(kind, count)
    counts, labels = given["categories"] or [0] * count, given["labels"] or [()] * count
    return tuple(Dimension(str(name), int(n), tuple(each)) for name, n, each in zip(names, counts, labels, strict=True))


def default_dimensions(kind: str, count: int) -> tuple[Dimension, ...]:
    """Continuous dimensions with numbers for names."""
    return tuple(map(Dimension, _default_names(kind, count)))


def _default_names(kind: str, count: int) -> list[str]:
    return [f"{kind} {index}" for index in range(count)]


@dataclass(frozen=True)
class Dataset:
    """Episodes of one task, with metadata and one `Dimension` per entry of an observation and of an action."""

    episodes: tuple[Episode, ...]
    metadata: Metadata = field(default_factory=dict)
    observation_dimensions: tuple[Dimension, ...] = ()  # [O]; empty: continuous, named "observation 0", ...
    action_dimensions: tuple[Dimension, ...] = ()  # [A]; empty: continuous, named "action 0", ...

    def __post_init__(self) -> None:
        """Check that all episodes have the same structure, and fill in default dimensions."""
        if not self.episodes:
            raise ValueError("a dataset needs at least one episode, got none")
        first = _structure(self.episodes[0])
        for index, episode in enumerate(self.episodes):
            if _structure(episode) != first:
                raise ValueError(
                    f"episode {index}: every episode must have {first}, as episode 0 does, got {_structure(episode)}"
                )
        for kind, count in (("observation", self.observation_dim), ("action", self.action_dim)):
            name = f"{kind}_dimensions"
            given = tuple(getattr(self, name)) or default_dimensions(kind, count)
            if len(given) != count:
                raise ValueError(f"{name} must have {count} entries, one per {kind} dimension, got {len(given)}")
            object.__setattr__(self, name, given)  # the dataclass is frozen
        for index, episode in enumerate(self.episodes):
            _check_categories(index, episode.actions, self.action_dimensions)
            _check_categories(index, episode.observations, self.observation_dimensions)

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    def __iter__(self) -> Iterator[Episode]:
        """Iterate over the episodes."""
        return iter(self.episodes)

    @property
    def num_steps(self) -> int:
        """Number of steps of all episodes."""
        return sum(len(episode) for episode in self.episodes)

    @property
    def observation_dim(self) -> int:
        """Size of an observation."""
        return int(self.episodes[0].observations.shape[1])

    @property
    def action_dim(self) -> int:
        """Size of an action."""
        return int(self.episodes[0].actions.shape[1])

    @property
    def map_shape(self) -> tuple[int, ...]:
        """Channels, height and width of the maps; () without maps."""
        map = self.episodes[0].map
        return () if map is None else map.shape

    @property
    def has_rewards(self) -> bool:
        """Whether the episodes have rewards."""
        return self.episodes[0].rewards is not None


def _structure(episode: Episode) -> str:
    """What all episodes of a dataset have in common, as text for errors."""
    rewards = "no rewards" if episode.rewards is None else "rewards"
    goal = "no goal" if episode.goal is None else f"a goal of {episode.goal.size} dimensions"
    dims = f"{episode.observations.shape[1]} observation and {episode.actions.shape[1]} action dimensions"
    map = "" if episode.map is None else f", a map of shape {episode.map.shape}"
    return f"{dims}{map}, {rewards} and {goal}"


def _check_categories(index: int, rows: FloatArray, dimensions: Sequence[Dimension]) -> None:
    """Check that the values of discrete dimensions are integers in [0, categories): rows [N, D]."""
    for column, dimension in zip(rows.T, dimensions, strict=True):
        if not dimension.categories:
            continue
        wrong = (column != np.rint(column)) | (column < 0) | (column >= dimension.categories)
        if wrong.any():
            raise ValueError(
                f"episode {index}: {dimension.name} must be an integer from 0 to {dimension.categories - 1}, "
                f"got {column[wrong][0]:g}"
            )


def returns_to_go(
    rewards: npt.NDArray[np.floating], discount: float, *, include_own: bool = False, after: float = 0.0
) -> DoubleArray:
    """Discounted return after each step, with `include_own` also of the step's own reward: rewards [T] -> [T].

    `after` is the return that follows the last step.
    """
    returns = np.full(len(rewards) + 1, after, dtype=np.float64)
    for step in range(len(rewards) - 1, -1, -1):
        returns[step] = float(rewards[step]) + discount * returns[step + 1]
    return returns[:-1] if include_own else returns[1:]


def save_npz(dataset: Dataset, path: str | Path, *, overwrite: bool = True) -> None:
    """Write a dataset to a `.npz` file: concatenated arrays of all episodes, their lengths, and metadata as JSON."""
    episodes = dataset.episodes
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "format": np.array(FORMAT),
        "lengths": np.array([len(episode) for episode in episodes], dtype=np.int64),
        "terminated": np.array([episode.terminated for episode in episodes], dtype=np.bool_),
        "observations": np.concatenate([episode.observations for episode in episodes]),
        "actions": np.concatenate([episode.actions for episode in episodes]),
        "outcomes": np.array(json.dumps([dict(episode.outcome) for episode in episodes])),
        "metadata": np.array(json.dumps(dict(dataset.metadata))),
    }
    for name, values in dimension_fields(dataset.observation_dimensions, dataset.action_dimensions).items():
        arrays[name] = np.array(json.dumps(values) if name.endswith("_labels") else values)
    rewards = [episode.rewards for episode in episodes if episode.rewards is not None]
    goals = [episode.goal for episode in episodes if episode.goal is not None]
    maps = [episode.map for episode in episodes if episode.map is not None]
    if rewards:
        arrays["rewards"] = np.concatenate(rewards)
    if goals:
        arrays["goals"] = np.stack(goals)
    if maps:
        arrays["maps"] = np.stack(maps)
    with replacing(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_npz(path: Path, only: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a `.npz` file whose names are in `only`; others are not read."""
    kinds = (zipfile.BadZipFile, zlib.error, EOFError, OSError, TypeError, RuntimeError, KeyError, NotImplementedError)
    with naming(path, "not a readable .npz dataset", *kinds), zipfile.ZipFile(path) as archive:
        _check_directory(path, len(archive.infolist()))
        for info in archive.infolist():
            archive.open(info).close()  # refuses a name that was damaged: the array would seem to be missing
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        members = {name: info for name, info in members.items() if name in only}
        check_size(path, sum(info.file_size for info in members.values()))
        return {name: _read_array(archive, info) for name, info in members.items()}


def _check_directory(path: Path, found: int) -> None:
    """Refuse a zip file whose directory is damaged: arrays after the damage would seem to be missing."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _ZIP_END_SIZE, 0))
        end = file.read()
    # The end record holds the number of entries; 65,535 says that it is elsewhere.
    place = end.rfind(b"PK\x05\x06") + 10
    declared = int.from_bytes(end[place : place + 2], "little")
    if declared not in (found, 0xFFFF):
        raise ValueError(f"its directory lists {found} of {declared} arrays")


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """One array. Its header may declare any size, and NumPy would allocate it before it reads the numbers."""
    with archive.open(info) as file:
        version = format.read_magic(file)
        read_header = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}.get(version)
        if read_header is None:
            raise ValueError(f"{info.filename} has the unknown version {version}")
        shape, _, kind = read_header(file)
        if min(shape, default=0) < 0 or prod(shape) * kind.itemsize > info.file_size:
            raise ValueError(f"{info.filename} declares {shape} of {kind}, more than its {info.file_size} bytes")
    with archive.open(info) as file:
        array: npt.NDArray[Any] = format.read_array(file, allow_pickle=False)
        return array


def check_description(stored: object, place: str | Path) -> dict[str, Any]:
    """What a file says about its arrays: metadata, dimensions, outcomes; refuses what has another form."""
    if not isinstance(stored, dict):
        raise ValueError(f"{place}: the description must be a mapping, got {type(stored).__name__}")
    outcomes, metadata = stored.get("outcomes", []), stored.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{place}: metadata must be a mapping, got {type(metadata).__name__}")
    is_list = isinstance(outcomes, list) and all(isinstance(each, dict) for each in outcomes)
    if not is_list or not all(isinstance(v, int | float) for each in outcomes for v in each.values()):
        raise ValueError(f"{place}: outcomes must be a list of mappings of names to numbers")
    for name in _DIMENSIONS:
        if not isinstance(stored.get(name, []), list):
            raise ValueError(f"{place}: {name} must be a list, got {type(stored[name]).__name__}")
    return stored


def load_npz(path: str | Path) -> Dataset:
    """Read a dataset that `save_npz` wrote; raises a ValueError that names file and episode if it is invalid."""
    path = Path(path)
    # Files written before version 0.1 store maps as "contexts".
    arrays = {"maps" if name == "contexts" else name: array for name, array in read_npz(path, _ARRAYS).items()}
    missing = [name for name in ("format", "lengths", "terminated", "observations", "actions") if name not in arrays]
    if missing:
        raise ValueError(f"{path}: a dataset file needs the array {missing[0]!r}, got {sorted(arrays)}")
    if arrays["format"].ndim or arrays["format"].dtype.kind not in "iu" or arrays["format"] > FORMAT:
        raise ValueError(
            f"{path}: dataset format {arrays['format']} is not supported, expected at most {FORMAT}; "
            "upgrade trajectory-transformer"
        )

    lengths = arrays["lengths"]
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or (lengths < 0).any():
        raise ValueError(f"{path}: lengths must be integers, one per episode, for at least one episode, got {lengths}")
    num_episodes, num_actions = len(lengths), sum(lengths.tolist())
    for name in arrays.keys() & {"observations", "actions", "rewards", "terminated", "goals", "maps"}:
        if arrays[name].dtype.kind not in "biuf":
            raise ValueError(f"{path}: {name} must hold numbers, got {arrays[name].dtype}")
    texts = [name for name in arrays if name in ("outcomes", "metadata") or name.endswith("_labels")]
    stored = {name: array.tolist() for name, array in arrays.items() if name.endswith(("_names", "_categories"))}
    stored |= {name: parse_json(str(arrays[name]), f"{path}: {name}") for name in texts}
    check_description(stored, path)
    outcomes, metadata = stored.get("outcomes", [{}] * num_episodes), stored.get("metadata", {})
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()} | {"outcomes": len(outcomes)}
    needed = {"observations": num_actions + num_episodes, "actions": num_actions, "rewards": num_actions}
    needed |= dict.fromkeys(("terminated", "goals", "maps", "outcomes"), num_episodes)
    for name in needed.keys() & rows.keys():
        if rows[name] != needed[name]:
            raise ValueError(
                f"{path}: {num_episodes} episodes of {num_actions} actions in total need {needed[name]} rows of {name} "
                f"(an episode has one more observation than actions), got {rows[name]}"
            )
    episodes = []
    end = 0
    for index, length in enumerate(lengths.tolist()):
        start, end = end, end + length
        try:
            # Values outside the range of float32 become infinite, and Episode refuses them.
            with np.errstate(over="ignore"):
                episode = Episode(
                    observations=arrays["observations"][start + index : end + index + 1].astype(np.float32),
                    actions=arrays["actions"][start:end].astype(np.float32),
                    rewards=arrays["rewards"][start:end].astype(np.float32) if "rewards" in arrays else None,
                    terminated=bool(arrays["terminated"][index]),
                    goal=arrays["goals"][index].astype(np.float32) if "goals" in arrays else None,
                    outcome=outcomes[index],
                    map=arrays["maps"][index] if "maps" in arrays else None,
                )
            episodes.append(episode)
        except ValueError as error:
            raise ValueError(f"{path}, episode {index}: {error}") from error
    try:
        observation_dimensions, action_dimensions = (
            dimensions_from(kind, stored) for kind in ("observation", "action")
        )
        return Dataset(tuple(episodes), metadata, observation_dimensions, action_dimensions)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}, {error}") from error
