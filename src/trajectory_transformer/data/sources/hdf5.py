"""D4RL files: the steps of all episodes in one HDF5 file; `terminals` or `timeouts` mark the last step of an episode.

Arrays: `observations` [N, O], `actions` [N, A] (or integers [N]: one discrete action), `terminals` and `timeouts` [N];
optional `rewards` [N], `next_observations` [N, O] and `infos/goal` [N, G].
"""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, check_description, dimensions_from
from trajectory_transformer.data.sources.columns import Columns
from trajectory_transformer.data.sources.rows import Rows, build_dataset, check_numbers, description
from trajectory_transformer.files import parse_json, replacing
from trajectory_transformer.limits import check_size

_NEEDED = ("observations", "actions", "terminals")
_OPTIONAL = ("timeouts", "rewards", "next_observations", "infos/goal")
_DESCRIPTION = "trajectory_transformer"
_HEAP = b"GCOL\x01\x00\x00\x00"  # how a heap of texts starts


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("reading and writing HDF5 needs: pip install 'trajectory-transformer[hdf5]'") from error
    module: ModuleType = h5py
    return module


def load_hdf5(path: str | Path, columns: Columns | None = None) -> Dataset:
    """Read a D4RL file; see `EpisodeBuilder` for files without `next_observations`."""
    path, columns = Path(path), columns or Columns()
    arrays, stored = _read(path)
    if "timeouts" not in arrays and columns.max_episode_steps is None:
        raise ValueError(
            f"{path}: the array 'timeouts' is missing, and without it an episode that reached its time limit continues "
            "into the next one; give the limit, for example --max_episode_steps 1000"
        )
    return _dataset(path, arrays, columns, stored)


def _dataset(path: Path, arrays: dict[str, npt.NDArray[Any]], columns: Columns, stored: dict[str, Any]) -> Dataset:
    """Episodes from the arrays of a file."""
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(arrays["observations"]):
            raise ValueError(
                f"{path}: {name} must have {len(arrays['observations'])} rows, one per observation, "
                f"got {len(array) if array.ndim else 'a single value'}"
            )
    actions, categories = arrays["actions"], tuple(stored.get("action_categories", ()))
    if actions.ndim == 1:
        discrete = np.issubdtype(actions.dtype, np.integer)
        actions, categories = actions[:, None], categories or ((int(actions.max()) + 1,) if discrete else ())
    numbers = {"actions": check_numbers(path, "actions", actions, ndim=2)}
    for name in ("observations", "rewards", "next_observations", "infos/goal"):
        if name in arrays:
            numbers[name] = check_numbers(path, name, arrays[name], ndim=1 if name == "rewards" else 2)
    flags = {name: arrays[name].astype(np.bool_).ravel() for name in ("terminals", "timeouts") if name in arrays}
    last = np.logical_or.reduce(list(flags.values()))
    last[-1] = True  # the last episode is truncated
    stored["action_categories"] = categories
    try:
        dimensions = [dimensions_from(kind, stored) for kind in ("observation", "action")]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    rows = Rows(
        observations=numbers["observations"],
        actions=numbers["actions"],
        last=last,
        terminated=flags["terminals"],
        rewards=numbers.get("rewards"),
        goals=numbers.get("infos/goal"),
        next_observations=numbers.get("next_observations"),
    )
    return build_dataset(
        path,
        rows,
        columns,
        found_by=f"the arrays {' and '.join(flags)}" if len(flags) > 1 else "the array terminals",
        metadata=stored.get("metadata", {}),
        observation_dimensions=dimensions[0],
        action_dimensions=dimensions[1],
        outcomes=stored.get("outcomes", []),
    )


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the description that `save_hdf5` stored."""
    h5py = _h5py()
    try:
        with h5py.File(path, "r") as file:
            check_contents(path, file, [*_NEEDED, *_OPTIONAL])
            found = sorted(key for key in file if isinstance(file.get(key), h5py.Dataset))
            missing = [name for name in _NEEDED if name not in found]
            known = [name for name in (*_NEEDED, *_OPTIONAL) if isinstance(file.get(name), h5py.Dataset)]
            arrays = {} if missing else {name: np.asarray(file[name][()]) for name in known}
            text = file.attrs.get(_DESCRIPTION, "{}")
    except (OSError, RuntimeError, KeyError, TypeError, MemoryError, ValueError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: not a complete HDF5 file; it may be truncated ({error})") from error
    stored = check_description(parse_json(str(text), f"{path}: its description"), path)
    if missing:
        raise ValueError(f"{path}: a D4RL file needs the array {missing[0]!r}, got {found}")
    return arrays, stored


def _check_texts(path: Path) -> None:
    """Refuse a damaged heap of texts, in which the HDF5 library would search forever.

    A heap is `GCOL`, version 1, three zeros, its size, then objects: number, references, zeros, size and data in
    multiples of 8 bytes. Number 0 is the free rest.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_HEAP)
        while start >= 0:
            end = start + int.from_bytes(content[start + 8 : start + 16], "little")
            place = start + 16
            while place + 16 <= end and end <= len(content):
                size = int.from_bytes(content[place + 8 : place + 16], "little")
                if not int.from_bytes(content[place : place + 2], "little"):
                    place += size if size >= 16 else len(content)
                else:
                    place += 16 + -(-size // 8) * 8
            if end > len(content) or place > end:
                raise ValueError(f"{path}: not a complete HDF5 file: its heap of texts is damaged")
            start = content.find(_HEAP, start + 8)


def _check_chunks(path: Path, entry: Any) -> None:
    """Refuse an array with parts that are not stored: the HDF5 library would fill them in, chunk by chunk."""
    if not entry.chunks:
        return
    needed = math.prod(-(-size // chunk) for size, chunk in zip(entry.shape, entry.chunks, strict=True))
    stored = entry.id.get_num_chunks()
    if stored < needed:
        raise ValueError(f"{path}: {entry.name} is not complete: {stored} of {needed} blocks are stored")


def check_contents(path: Path, file: Any, names: Sequence[str] | None = None) -> None:
    """Refuse an HDF5 file that refers to other files, or whose arrays of these names (None: all) are too large."""
    h5py = _h5py()
    _check_texts(path)
    groups, visited, arrays = [file], 0, []
    while groups:
        group = groups.pop()
        for key in group:
            visited += 1
            if isinstance(group.get(key, getlink=True), h5py.ExternalLink):
                raise ValueError(f"{path}: {group.name.rstrip('/')}/{key} is a link to another file, which is not read")
            if isinstance(group.get(key, getlink=True), h5py.SoftLink):
                continue  # its target is visited under its own name, or is a link to another file
            entry = group[key]
            if isinstance(entry, h5py.Group):
                groups.append(entry)
            elif isinstance(entry, h5py.Dataset):
                if entry.external or entry.is_virtual:
                    raise ValueError(f"{path}: the numbers of {entry.name} are in other files, which are not read")
                if names is None or entry.name.lstrip("/") in names:
                    arrays.append(entry)
        if visited > path.stat().st_size:
            raise ValueError(f"{path}: its groups contain each other")
    check_size(path, sum(entry.nbytes for entry in arrays))
    for entry in arrays:
        _check_chunks(path, entry)


def save_hdf5(dataset: Dataset, path: str | Path, *, overwrite: bool = True) -> None:
    """Write a D4RL file, with `next_observations` so that final states are kept."""
    h5py = _h5py()
    episodes = dataset.episodes
    last = [np.arange(len(episode)) == len(episode) - 1 for episode in episodes]
    terminals = [mask & episode.terminated for mask, episode in zip(last, episodes, strict=True)]
    timeouts = [mask & (not episode.terminated) for mask, episode in zip(last, episodes, strict=True)]
    arrays = {
        "observations": np.concatenate([episode.observations[:-1] for episode in episodes]),
        "next_observations": np.concatenate([episode.observations[1:] for episode in episodes]),
        "actions": np.concatenate([episode.actions for episode in episodes]),
        "terminals": np.concatenate(terminals),
        "timeouts": np.concatenate(timeouts),
    }
    rewards = [episode.rewards for episode in episodes if episode.rewards is not None]
    if rewards:
        arrays["rewards"] = np.concatenate(rewards)
    goals = [np.tile(episode.goal, (len(episode), 1)) for episode in episodes if episode.goal is not None]
    if goals:
        arrays["infos/goal"] = np.concatenate(goals)
    # Only the latest file format allows attributes larger than 64 KiB.
    with replacing(path, overwrite=overwrite) as temporary, h5py.File(temporary, "w", libver="latest") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
        file.attrs[_DESCRIPTION] = description(dataset)
