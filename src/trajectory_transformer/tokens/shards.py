"""Tokens larger than memory: a folder of memory-mapped token files, so that a batch reads only its own rows.

The folder holds one file per array of a `TokenizedDataset`, the discretizer, and `index.json`, which describes them. It
is written to a temporary folder and renamed, so it is complete or absent. Episodes are read one at a time, twice: once
to fit the discretizer, once to write their tokens.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import read_tensors, token_config_from, write_tensors
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import (
    Dataset,
    DoubleArray,
    Episode,
    Metadata,
    check_description,
    dimensions_from,
)
from trajectory_transformer.files import naming, read_json, replacing, write_atomically
from trajectory_transformer.tokens.discretizer import Discretizer, discretizer_from, discretizer_tensors
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import CONVENTIONS, Tokenizer, layout_of, slot_values, with_penalty
from trajectory_transformer.tokens.windows import TokenizedDataset, token_type

FORMAT = 2
KIND = "trajectory-transformer tokens"
INDEX, DISCRETIZER = "index.json", "discretizer.safetensors"
_TOKEN_TYPES = ("uint8", "int16")
_ALLOWED_TYPES = {
    "rows": _TOKEN_TYPES,
    "goals": _TOKEN_TYPES,
    "num_steps": ("int64",),
    "num_rows": ("int64",),
    "terminated": ("bool",),
    "maps": ("uint8", "float32"),
}
_CHECK_ROWS = 2**20
SAMPLE_VALUES = 2**24  # real numbers kept to fit a discretizer on a stream: 128 MiB

Array = npt.NDArray[Any]  # of the types the index names


@dataclass(frozen=True)
class Shards:
    """An opened folder: memory-mapped tokens, and the tokenizer that made them."""

    data: TokenizedDataset
    tokenizer: Tokenizer
    metadata: Metadata
    source: str  # identifies the data that the tokens were made from


class Reservoir:
    """A uniform sample of the rows of a stream: all rows, in order, until the capacity is reached."""

    def __init__(self, capacity: int, num_columns: int, rng: np.random.Generator) -> None:
        """Reserve `capacity` rows; the operating system allocates memory as they are filled."""
        self._rows = np.empty((capacity, num_columns))
        self._rng = rng
        self._seen = 0
        self._low = np.full(num_columns, np.inf)
        self._high = np.full(num_columns, -np.inf)

    def add(self, rows: DoubleArray) -> None:
        """Add more rows of the stream: rows [n, C]."""
        capacity = len(self._rows)
        self._low = np.minimum(self._low, rows.min(axis=0))
        self._high = np.maximum(self._high, rows.max(axis=0))
        room = min(max(capacity - self._seen, 0), len(rows))
        self._rows[self._seen : self._seen + room] = rows[:room]
        # Row i of the stream replaces a random row with probability capacity / (i + 1) (Vitter's algorithm R).
        late = np.arange(self._seen + room, self._seen + len(rows))
        place = self._rng.integers(0, late + 1)
        taken = place < capacity
        self._rows[place[taken]] = rows[room:][taken]
        self._seen += len(rows)

    def columns(self) -> list[DoubleArray]:
        """The sample of each column; if rows were left out, with the exact minimum and maximum of the stream."""
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
    """Fit every slot on a stream of episodes, keeping at most `sample_values` real numbers.

    `action_categories` gives the number of categories of each action dimension, 0 for a continuous one. If all numbers
    fit, the result is that of `Tokenizer.fit`. If not, the bins are fitted on a seeded uniform sample of the steps and
    the exact minimum and maximum. A termination penalty of `auto` must be a number by now (`with_penalty`).
    """
    reservoirs: list[Reservoir] = []
    for episode in episodes:
        observations, *others = slot_values(episode, config)
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
    bin_value = CONVENTIONS[config.authors_conventions].bin_value
    return Discretizer.fit(
        columns, config.num_bins, edges=config.discretizer, bin_value=bin_value, categories=categories
    )


def build_shards(
    folder: str | Path,
    read: Callable[[], Iterable[Episode]],
    config: TokenConfig,
    *,
    metadata: Metadata | None = None,
    source: str = "",
    action_categories: Sequence[int] = (),
    discretizer: Discretizer | None = None,
    dimensions: Mapping[str, Sequence[Any]] | None = None,
    sample_values: int = SAMPLE_VALUES,
    seed: int = 0,
) -> None:
    """Write the tokens of a stream of episodes as a folder.

    `read` is called once per pass over the stream: to look at the first episode, to find the termination penalty
    if it is `auto`, to fit the discretizer if none is given, and to write. At most one episode and the sample of
    `fit_stream` are in memory at a time. `dimensions` has the names, categories and labels of `dimension_fields`.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists already; choose another folder or remove it")
    first = next(iter(read()), None)
    if first is None:
        raise ValueError("a dataset needs at least one episode, got none")
    layout = layout_of(Dataset((first,)), config)
    config = with_penalty(config, read())
    discretizer = discretizer or fit_stream(
        read(), config, action_categories=action_categories, sample_values=sample_values, seed=seed
    )
    tokenizer = Tokenizer(layout, discretizer, config)
    with replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        map_type = np.uint8 if first.map is None else first.map.dtype
        arrays = _write_arrays(temporary, read(), tokenizer, map_type)
        write_tensors(temporary / DISCRETIZER, discretizer_tensors(discretizer))
        index = {
            "format": FORMAT,
            "kind": KIND,
            "source": source,
            "layout": asdict(layout),
            "tokens": asdict(config),
            "metadata": dict(metadata or {}),
            "dimensions": dict(dimensions or {}),
            "arrays": arrays,
        }
        write_atomically(temporary / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def open_shards(folder: str | Path, *, check: bool = True) -> Shards:
    """Map a folder that `build_shards` wrote; every error is a ValueError that names the file.

    With `check`, all tokens are read once: one outside the vocabulary would end training on a GPU without a message.
    """
    folder = Path(folder)
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; a folder of token shards needs it")
    index = read_json(path)
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise ValueError(f"{path}: not the index of {KIND}")
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{path}: shard format {index.get('format')} cannot be read by this version, which reads format {FORMAT}; "
            "remove the folder and let `tt train --shards` write it again"
        )
    kinds = (KeyError, TypeError, AttributeError, OverflowError)
    with naming(folder, f"not a folder of {KIND}", *kinds):
        names = [*_types(np.uint8), *(["maps"] if "maps" in index["arrays"] else [])]
        arrays = {name: _map(folder / f"{name}.bin", index["arrays"][name], _ALLOWED_TYPES[name]) for name in names}
        discretizer = discretizer_from(read_tensors(folder / DISCRETIZER)[0])
        named = [dimensions_from(kind, index.get("dimensions", {})) for kind in ("observation", "action")]
        layout, tokens = TokenLayout(**index["layout"]), token_config_from(index["tokens"])
        if discretizer.values.shape != (layout.size, tokens.num_bins):
            raise ValueError(f"{folder}: the layout needs {layout.size} slots of {tokens.num_bins} bins")
        _check_shapes(folder, arrays, layout)
        if check:
            _check_values(folder, arrays, discretizer)
        return Shards(
            data=TokenizedDataset(**arrays, first_row=arrays["num_rows"].cumsum(0) - arrays["num_rows"]),
            tokenizer=Tokenizer(layout, discretizer, tokens, *named),
            metadata=check_description({"metadata": index["metadata"]}, path)["metadata"],
            source=str(index["source"]),
        )


def _check_shapes(folder: Path, arrays: Mapping[str, Tensor], layout: TokenLayout) -> None:
    """Refuse arrays that do not fit each other; reads only the lengths of the episodes."""
    episodes = arrays["num_rows"].shape
    rows, steps = arrays["num_rows"], arrays["num_steps"]
    wanted = {"rows": (layout.size,), "goals": (layout.goal_dim,), "maps": layout.map_shape}
    for name, array in arrays.items():
        if array.shape[1:] != wanted.get(name, ()) or (name != "rows" and array.shape[:1] != episodes):
            raise ValueError(f"{folder / name}.bin: has shape {list(array.shape)}, which does not fit the layout")
    if len(rows) == 0 or int(rows.min()) < 1 or int(steps.min()) < 1 or bool(((rows - steps).abs() > 1).any()):
        raise ValueError(f"{folder / 'num_rows'}.bin: every episode needs at least one row, and one or none per step")
    if int(rows.sum()) != len(arrays["rows"]):
        raise ValueError(f"{folder / 'rows'}.bin: has {len(arrays['rows'])} rows, its episodes need {int(rows.sum())}")


def _check_values(folder: Path, arrays: Mapping[str, Tensor], discretizer: Discretizer) -> None:
    """Refuse tokens outside the vocabulary, in chunks: the arrays may be larger than memory."""
    limits = {"rows": discretizer.stop, "goals": discretizer.stop - 1}
    for name, largest in limits.items():
        array = arrays[name]
        for start in range(0, len(array), _CHECK_ROWS):
            part = array[start : start + _CHECK_ROWS]
            if part.numel() and (int(part.max()) > largest or int(part.min()) < 0):
                raise ValueError(
                    f"{folder / name}.bin: tokens must lie in [0, {largest}], got {int(part.min())} to "
                    f"{int(part.max())}; the file is damaged, remove the folder and write it again"
                )
    if int(arrays["terminated"].view(torch.uint8).max()) > 1:
        raise ValueError(f"{folder / 'terminated'}.bin: must hold 0 or 1 for every episode")
    if "maps" in arrays and arrays["maps"].is_floating_point() and not arrays["maps"].isfinite().all():
        raise ValueError(f"{folder / 'maps'}.bin: maps must be finite")


def _types(token: npt.DTypeLike) -> dict[str, npt.DTypeLike]:
    """Arrays of a folder and their types, maps apart."""
    return {"rows": token, "goals": token, "num_steps": np.int64, "num_rows": np.int64, "terminated": np.bool_}


def _write_arrays(
    folder: Path, episodes: Iterable[Episode], tokenizer: Tokenizer, map_type: npt.DTypeLike
) -> dict[str, dict[str, object]]:
    """Write the arrays episode by episode; returns their part of the index."""
    layout = tokenizer.layout
    types = _types(token_type(tokenizer.discretizer))
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
            rows = tokenizer.encode(episode)
            parts: dict[str, object] = {
                "rows": rows,
                "goals": tokenizer.goals_of([episode]),
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


def _map(path: Path, entry: Mapping[str, Any], allowed: Sequence[str]) -> Tensor:
    """A file of the folder as a memory-mapped tensor of one of the allowed types."""
    if entry["type"] not in allowed or not all(type(size) is int and size >= 0 for size in entry["shape"]):
        raise ValueError(f"{path}: {INDEX} declares the type {entry['type']!r} and the shape {entry['shape']!r}")
    kind, shape = np.dtype(entry["type"]), tuple(entry["shape"])
    wanted = kind.itemsize * prod(shape)
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; {INDEX} names it")
    if path.stat().st_size != wanted:
        raise ValueError(f"{path}: {INDEX} says {wanted} bytes, the file has {path.stat().st_size}; was it truncated?")
    if wanted == 0:
        return torch.from_numpy(np.zeros(shape, kind))
    # Copy-on-write: torch needs writable memory, and nothing is ever written to the file.
    return torch.from_numpy(np.memmap(path, kind, mode="c", shape=shape))
