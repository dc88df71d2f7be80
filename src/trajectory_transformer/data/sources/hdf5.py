"""D4RL files: all steps end to end in one HDF5 file, the last of each episode marked by `terminals` or `timeouts`.

Read are `observations` [N, O], `actions` [N, A] (or [N] whole numbers: one discrete action), `terminals` and
`timeouts` [N], and where they are there `rewards` [N], `next_observations` [N, O] and `infos/goal` [N, G].
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


def load_hdf5(path: Path) -> Dataset:
    """Read a D4RL file; without `next_observations`, `EpisodeBuilder` says how episodes end."""
    arrays, ours = _read(path)
    for name in (*_NEEDED, *_OPTIONAL):
        if name in arrays and len(arrays[name]) != len(arrays["observations"]):
            raise ValueError(
                f"{path}: every array needs a row for each of {len(arrays['observations'])} observations, "
                f"{name} has {len(arrays[name])}"
            )
    actions, categories = arrays["actions"], tuple(ours.get("action_categories", ()))
    if actions.ndim == 1:
        whole = np.issubdtype(actions.dtype, np.integer)
        actions, categories = actions[:, None], categories or ((int(actions.max()) + 1,) if whole else ())
    numbers: dict[str, DoubleArray] = {}
    for name in ("observations", "rewards", "next_observations", "infos/goal"):
        if name in arrays:
            numbers[name] = _numbers(path, name, arrays[name])
    numbers["actions"] = _numbers(path, "actions", actions)

    terminals, timeouts = (arrays[name].astype(np.bool_).ravel() for name in ("terminals", "timeouts"))
    ends = np.flatnonzero(terminals | timeouts).tolist()
    if not ends or ends[-1] != len(terminals) - 1:
        ends.append(len(terminals) - 1)  # the recording ended in the middle of an episode
    builder = EpisodeBuilder(path)
    outcomes = ours.get("outcomes", [])
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
    ours["action_categories"] = categories
    try:
        observation_dimensions, action_dimensions = (
            join_dimensions(kind, ours.get(f"{kind}_names", ()), ours.get(f"{kind}_categories", ()))
            for kind in ("observation", "action")
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return builder.dataset(ours.get("metadata", {}), observation_dimensions, action_dimensions)


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Arrays by name, and what `save_hdf5` said of them."""
    h5py = _h5py()
    try:
        with h5py.File(path, "r") as file:
            found = sorted(key for key in file if isinstance(file[key], h5py.Dataset))
            missing = [name for name in _NEEDED if name not in found]
            if not missing:
                arrays = {name: file[name][()] for name in (*_NEEDED, *_OPTIONAL) if name in file}
            ours = json.loads(file.attrs.get(_DESCRIPTION, "{}"))
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file, was it truncated? ({error})") from error
    if missing:
        raise ValueError(f"{path}: a D4RL file needs the array {missing[0]!r}, found {found}")
    return arrays, ours


def _numbers(path: Path, name: str, values: npt.NDArray[Any]) -> DoubleArray:
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {name} must hold numbers, got {values.dtype}")
    wanted = 1 if name == "rewards" else 2
    if name == "rewards" and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != wanted:
        raise ValueError(f"{path}: {name} must have {wanted} axes, got shape {values.shape}")
    check_finite(path, name, values)
    return values.astype(np.float64)


def save_hdf5(dataset: Dataset, path: Path) -> None:
    """Write a D4RL file with `next_observations`, so that nothing is lost."""
    h5py = _h5py()
    episodes = dataset.episodes
    last = [np.arange(len(episode)) == len(episode) - 1 for episode in episodes]
    ended = [mask & episode.terminated for mask, episode in zip(last, episodes, strict=True)]
    cut = [mask & (not episode.terminated) for mask, episode in zip(last, episodes, strict=True)]
    arrays = {
        "observations": np.concatenate([episode.observations[:-1] for episode in episodes]),
        "next_observations": np.concatenate([episode.observations[1:] for episode in episodes]),
        "actions": np.concatenate([episode.actions for episode in episodes]),
        "terminals": np.concatenate(ended),
        "timeouts": np.concatenate(cut),
    }
    rewards = [episode.rewards for episode in episodes if episode.rewards is not None]
    if rewards:
        arrays["rewards"] = np.concatenate(rewards)
    goals = [np.tile(episode.goal, (len(episode), 1)) for episode in episodes if episode.goal is not None]
    if goals:
        arrays["infos/goal"] = np.concatenate(goals)
    # HDF5 limits an attribute to 64 KiB unless the file may use its newer layout.
    with replacing(path) as temporary, h5py.File(temporary, "w", libver="latest") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
        file.attrs[_DESCRIPTION] = description(dataset)
