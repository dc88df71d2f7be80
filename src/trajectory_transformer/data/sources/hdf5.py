"""D4RL files: the steps of all episodes in one HDF5 file; `terminals` or `timeouts` mark the last step of an episode.

Arrays: `observations` [N, O], `actions` [N, A] (or integers [N]: one discrete action), `terminals` and `timeouts` [N];
optional `rewards` [N], `next_observations` [N, O] and `infos/goal` [N, G].
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, DoubleArray, join_dimensions
from trajectory_transformer.data.sources.rows import EpisodeBuilder, check_finite, description
from trajectory_transformer.files import replacing

_NEEDED = ("observations", "actions", "terminals", "timeouts")
_OPTIONAL = ("rewards", "next_observations", "infos/goal")
_DESCRIPTION = "trajectory_transformer"


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("reading and writing HDF5 needs: pip install 'trajectory-transformer[hdf5]'") from error
    module: ModuleType = h5py
    return module


def load_hdf5(path: str | Path) -> Dataset:
    """Read a D4RL file; see `EpisodeBuilder` for files without `next_observations`."""
    path = Path(path)
    arrays, stored = _read(path)
    for name in (*_NEEDED, *_OPTIONAL):
        if name in arrays and len(arrays[name]) != len(arrays["observations"]):
            raise ValueError(
                f"{path}: {name} must have {len(arrays['observations'])} rows, one per observation, "
                f"got {len(arrays[name])}"
            )
    actions, categories = arrays["actions"], tuple(stored.get("action_categories", ()))
    if actions.ndim == 1:
        discrete = np.issubdtype(actions.dtype, np.integer)
        actions, categories = actions[:, None], categories or ((int(actions.max()) + 1,) if discrete else ())
    numbers: dict[str, DoubleArray] = {}
    for name in ("observations", "rewards", "next_observations", "infos/goal"):
        if name in arrays:
            numbers[name] = _numbers(path, name, arrays[name])
    numbers["actions"] = _numbers(path, "actions", actions)

    terminals, timeouts = (arrays[name].astype(np.bool_).ravel() for name in ("terminals", "timeouts"))
    ends = np.flatnonzero(terminals | timeouts).tolist()
    if not ends or ends[-1] != len(terminals) - 1:
        ends.append(len(terminals) - 1)  # the last episode is truncated
    builder = EpisodeBuilder(path)
    outcomes = stored.get("outcomes", [])
    goals, finals = numbers.get("infos/goal"), numbers.get("next_observations")
    start = 0
    for end in ends:
        span = slice(start, end + 1)
        index = len(builder.episodes)
        builder.add(
            numbers["observations"][span],
            numbers["actions"][span],
            numbers["rewards"][span] if "rewards" in numbers else None,
            terminated=bool(terminals[end]),
            final=None if finals is None else finals[end],
            goal=None if goals is None else goals[start],
            outcome=outcomes[index] if index < len(outcomes) else None,
            place=f" (rows {start + 1} to {end + 1})",
        )
        start = end + 1
    stored["action_categories"] = categories
    try:
        observation_dimensions, action_dimensions = (
            join_dimensions(kind, stored.get(f"{kind}_names", ()), stored.get(f"{kind}_categories", ()))
            for kind in ("observation", "action")
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return builder.dataset(stored.get("metadata", {}), observation_dimensions, action_dimensions)


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the description that `save_hdf5` stored."""
    h5py = _h5py()
    try:
        with h5py.File(path, "r") as file:
            found = sorted(key for key in file if isinstance(file[key], h5py.Dataset))
            missing = [name for name in _NEEDED if name not in found]
            if not missing:
                arrays = {name: file[name][()] for name in (*_NEEDED, *_OPTIONAL) if name in file}
            stored = json.loads(file.attrs.get(_DESCRIPTION, "{}"))
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{path}: not a complete HDF5 file; it may be truncated ({error})") from error
    if missing:
        raise ValueError(f"{path}: a D4RL file needs the array {missing[0]!r}, got {found}")
    return arrays, stored


def _numbers(path: Path, name: str, values: npt.NDArray[Any]) -> DoubleArray:
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {name} must hold numbers, got {values.dtype}")
    ndim = 1 if name == "rewards" else 2
    if name == "rewards" and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != ndim:
        raise ValueError(f"{path}: {name} must have {ndim} axes, got shape {values.shape}")
    check_finite(path, name, values)
    return values.astype(np.float64)


def save_hdf5(dataset: Dataset, path: str | Path) -> None:
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
    with replacing(path) as temporary, h5py.File(temporary, "w", libver="latest") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
        file.attrs[_DESCRIPTION] = description(dataset)
