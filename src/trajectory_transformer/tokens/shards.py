"""Tokens larger than memory: a folder of token files that training maps, so that a batch touches only its rows.

The folder holds one file per array of a `TokenizedDataset`, the discretiser, and `index.json`, which says what is what.
It is written aside and renamed: either all of it is there, or none. Episodes are read one at a time, twice: once to
fit the discretiser, once to write their tokens.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode, Metadata
from trajectory_transformer.files import replacing, write_atomically
from trajectory_transformer.tokens.discretizer import Discretizer, discretizer_from, discretizer_tensors
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import (
    TokenizedDataset,
    encode_goals,
    encode_transitions,
    episode_columns,
    layout_of,
    token_type,
)

FORMAT = 1
KIND = "trajectory-transformer tokens"
INDEX, DISCRETIZER = "index.json", "discretizer.safetensors"
SAMPLE_VALUES = 2**24  # real numbers kept to fit a discretiser on a stream: 128 MiB

Array = npt.NDArray[Any]  # of the types the index names


@dataclass(frozen=True)
class Shards:
    """An opened folder: tokens in mapped memory, and what a model of them needs to know."""

    data: TokenizedDataset
    discretizer: Discretizer
    layout: TokenLayout
    tokens: TokenConfig
    metadata: Metadata
    source: str  # what the tokens were made from, in the words of whoever made them


class Reservoir:
    """A uniform sample of the rows of a stream: all of them, in order, while there is room."""

    def __init__(self, capacity: int, num_columns: int, rng: np.random.Generator) -> None:
        """Make room for `capacity` rows; memory is taken as they come."""
        self._rows = np.empty((capacity, num_columns))
        self._rng = rng
        self._seen = 0
        self._low = np.full(num_columns, np.inf)
        self._high = np.full(num_columns, -np.inf)

    def add(self, rows: DoubleArray) -> None:
        """Take in more of the stream: rows [n, C]."""
        capacity = len(self._rows)
        self._low = np.minimum(self._low, rows.min(axis=0))
        self._high = np.maximum(self._high, rows.max(axis=0))
        room = min(max(capacity - self._seen, 0), len(rows))
        self._rows[self._seen : self._seen + room] = rows[:room]
        # Row i of the stream takes a place with probability capacity / (i + 1), any place alike (Vitter's R).
        late = np.arange(self._seen + room, self._seen + len(rows))
        place = self._rng.integers(0, late + 1)
        taken = place < capacity
        self._rows[place[taken]] = rows[room:][taken]
        self._seen += len(rows)

    def columns(self) -> list[DoubleArray]:
        """The sample of each column; where some rows were left out, the stream's extremes are put in again."""
        if self._seen <= len(self._rows):
            return list(self._rows[: self._seen].T)
        return [np.append(row, [low, high]) for row, low, high in zip(self._rows.T, self._low, self._high, strict=True)]


def fit_stream(
    episodes: Iterable[Episode],
    config: TokenConfig,
    *,
    action_categories: Sequence[int] = (),
    sample_values: int = SAMPLE_VALUES,
    seed: int = 0,
) -> Discretizer:
    """Fit every slot on a stream of episodes, of which at most so many real numbers are kept.

    `action_categories` says of each action how many values it has, 0 (or nothing at all) for a continuous one. Where
    all numbers fit, the result is that of `fit_discretizer`. Where not, it is fitted on a seeded uniform sample of the
    steps and the exact extremes.
    """
    reservoirs: list[Reservoir] = []
    for episode in episodes:
        observations, *others = episode_columns(episode, config)
        parts = [observations, np.concatenate(others, axis=1)]
        if not reservoirs:
            steps = max(sample_values // sum(part.shape[1] for part in parts), 1)
            streams = np.random.default_rng(seed).spawn(2)
            reservoirs = [Reservoir(steps, part.shape[1], rng) for part, rng in zip(parts, streams, strict=True)]
        for reservoir, part in zip(reservoirs, parts, strict=True):
            reservoir.add(part)
    by_part = [reservoir.columns() for reservoir in reservoirs]
    columns = [column for part in by_part for column in part]
    before = len(by_part[0]) if by_part else 0
    categories = (*[0] * before, *action_categories, *[0] * (len(columns) - before - len(action_categories)))
    return Discretizer.fit(
        columns, config.num_bins, edges=config.discretizer, bin_value=config.bin_value, categories=categories
    )


def build_shards(
    folder: Path,
    read: Callable[[], Iterable[Episode]],
    config: TokenConfig,
    *,
    metadata: Metadata | None = None,
    source: str = "",
    action_categories: Sequence[int] = (),
    discretizer: Discretizer | None = None,
    sample_values: int = SAMPLE_VALUES,
    seed: int = 0,
) -> None:
    """Write the tokens of a stream of episodes as a folder.

    `read` starts the stream anew each time it is called: twice, or once where the discretiser is given. No more than
    one episode and the sample of `fit_stream` are held at a time.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists already; choose another place or remove it")
    first = next(iter(read()), None)
    if first is None:
        raise ValueError("a dataset needs at least one episode, got none")
    layout = layout_of(Dataset((first,)), config)
    discretizer = discretizer or fit_stream(
        read(), config, action_categories=action_categories, sample_values=sample_values, seed=seed
    )
    map_type = np.uint8 if first.map is None else first.map.dtype
    with replacing(folder) as temporary:
        temporary.mkdir()
        arrays = _write_arrays(temporary, read(), discretizer, layout, config, map_type)
        write_tensors(temporary / DISCRETIZER, discretizer_tensors(discretizer))
        index = {
            "format": FORMAT,
            "kind": KIND,
            "source": source,
            "layout": asdict(layout),
            "tokens": asdict(config),
            "metadata": dict(metadata or {}),
            "arrays": arrays,
        }
        write_atomically(temporary / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def open_shards(folder: Path) -> Shards:
    """Map a folder that `build_shards` wrote; every fault is a ValueError that names the file."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; a folder of token shards needs it")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON, was it truncated? ({error})") from error
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise ValueError(f"{path}: not the index of {KIND}")
    if not isinstance(index.get("format"), int) or index["format"] > FORMAT:
        raise ValueError(f"{path}: shard format {index.get('format')} is newer than {FORMAT}, the newest read here")
    try:
        names = [*_types(np.uint8), *(["maps"] if "maps" in index["arrays"] else [])]
        arrays = {name: _map(folder / f"{name}.bin", index["arrays"][name]) for name in names}
        tokens = TokenConfig(**{**index["tokens"], "goal_dims": tuple(index["tokens"]["goal_dims"])})
        discretizer = discretizer_from(read_tensors(folder / DISCRETIZER)[0])
        return Shards(
            data=TokenizedDataset(**arrays, first_row=arrays["num_rows"].cumsum(0) - arrays["num_rows"]),
            discretizer=discretizer,
            layout=TokenLayout(**index["layout"]),
            tokens=tokens,
            metadata=index["metadata"],
            source=index["source"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the index of {KIND} ({error})") from error


def _types(token: npt.DTypeLike) -> dict[str, npt.DTypeLike]:
    """Arrays of a folder and their types."""
    return {"rows": token, "goals": token, "num_steps": np.int64, "num_rows": np.int64, "terminated": np.bool_}


def _write_arrays(
    folder: Path,
    episodes: Iterable[Episode],
    discretizer: Discretizer,
    layout: TokenLayout,
    config: TokenConfig,
    map_type: npt.DTypeLike,
) -> dict[str, dict[str, object]]:
    """Write the arrays episode by episode; returns their part of the index."""
    types = _types(token_type(discretizer))
    if layout.map_shape:
        types["maps"] = map_type
    files = {name: (folder / f"{name}.bin").open("wb") for name in types}
    counts = dict.fromkeys(types, 0)
    widths: dict[str, tuple[int, ...]] = {"rows": (layout.size,), "goals": (layout.goal_dim,)}
    widths["maps"] = layout.map_shape
    try:
        for number, episode in enumerate(episodes):
            dims = episode.observations.shape[1], episode.actions.shape[1]
            if dims != (layout.observation_dim, layout.action_dim) or (layout.rewards and episode.rewards is None):
                raise ValueError(
                    f"episode {number}: every episode must have {layout.observation_dim} observation and "
                    f"{layout.action_dim} action dimensions{' and rewards' * layout.rewards} as episode 0"
                )
            rows = encode_transitions(episode, discretizer, layout, config)
            parts: dict[str, object] = {
                "rows": rows,
                "goals": encode_goals(episode.observations[-1:, list(config.goal_dims)], discretizer, config),
                "num_steps": [len(episode)],
                "num_rows": [len(rows)],
                "terminated": [episode.terminated],
            }
            if layout.map_shape:
                if episode.map is None or episode.map.shape != layout.map_shape:
                    shape = layout.map_shape
                    raise ValueError(f"episode {number}: every episode must have a map of shape {shape} as episode 0")
                parts["maps"] = episode.map[None]
            for name, part in parts.items():
                array = np.asarray(part, dtype=types[name])
                files[name].write(array.tobytes())
                counts[name] += len(array)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    return {
        name: {"type": np.dtype(kind).name, "shape": [counts[name], *widths.get(name, ())]}
        for name, kind in types.items()
    }


def _map(path: Path, entry: Mapping[str, Any]) -> Tensor:
    """A file of the folder as a tensor whose pages are read when they are touched."""
    kind, shape = np.dtype(entry["type"]), tuple(entry["shape"])
    wanted = kind.itemsize * int(np.prod(shape))
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; {INDEX} names it")
    if path.stat().st_size != wanted:
        raise ValueError(f"{path}: {INDEX} says {wanted} bytes, the file has {path.stat().st_size}; was it truncated?")
    if wanted == 0:
        return torch.from_numpy(np.zeros(shape, kind))
    # Copy-on-write: torch wants memory it may write to, and nothing ever reaches the file.
    return torch.from_numpy(np.memmap(path, kind, mode="c", shape=shape))
