"""Load and save datasets by name: files, LeRobot folders, Minari ids and benchmark tasks."""

import re
from collections.abc import Callable
from pathlib import Path

from trajectory_transformer.data.episode import Dataset, load_npz, save_npz
from trajectory_transformer.data.sources.columns import Columns
from trajectory_transformer.data.sources.hdf5 import load_hdf5, save_hdf5
from trajectory_transformer.data.sources.lerobot import is_lerobot, load_lerobot
from trajectory_transformer.data.sources.minari import load_minari, save_minari
from trajectory_transformer.data.sources.ogbench import is_ogbench, load_ogbench
from trajectory_transformer.data.sources.tables import TABLES, load_table, save_table, table_suffix
from trajectory_transformer.data.sources.tasks import is_task, load_task
from trajectory_transformer.files import naming

__all__ = ["Columns", "is_minari_id", "load_dataset", "save_dataset"]

_FILES = (".npz", ".hdf5", ".h5", *TABLES)
_WRITERS: dict[str, Callable[..., None]] = {
    ".npz": save_npz,
    ".hdf5": save_hdf5,
    ".h5": save_hdf5,
    **dict.fromkeys(TABLES, save_table),
}
_MINARI_ID = re.compile(r"(\w+://[\w.-]+/)?([\w-]+/)*[\w.-]+-v\d+")


def is_minari_id(name: str | Path) -> bool:
    """Whether a name has the form of a Minari id: `(namespace/)name-v0`."""
    return _MINARI_ID.fullmatch(str(name)) is not None


def load_dataset(name: str | Path, columns: Columns | None = None) -> Dataset:
    """Load a dataset: a file, the folder of a LeRobot dataset, a Minari id or a benchmark task (`hopper-medium`).

    Files are `.npz` (our own and OGBench's), `.hdf5` (D4RL), `.parquet` and `.csv`, also separated by semicolons or
    tabs (`.tsv`) or compressed (`.csv.gz`).

    `columns` says how rows become episodes: which columns of a table hold what, what to do with missing values, where
    episodes end. A table can have a YAML file next to it, `log.csv.columns.yaml` for `log.csv`; `columns` with
    observations and actions replaces it, `columns` without them adds to it.
    """
    with naming(name, "cannot be read"):
        return _load(str(name), Path(name), columns)


def _load(name: str, path: Path, columns: Columns | None) -> Dataset:
    suffix = table_suffix(path)
    if suffix in _FILES:
        if not path.exists():
            raise ValueError(f"{name}: no such dataset file; collect one with `tt collect`")
        if suffix in TABLES:
            return load_table(path, columns)
        _refuse(name, columns, only_names=suffix != ".npz" or is_ogbench(path))
        if suffix == ".npz":
            return load_ogbench(path, columns) if is_ogbench(path) else load_npz(path)
        return load_hdf5(path, columns)
    if is_lerobot(path):
        return load_lerobot(path, columns)
    if path.is_dir() and any(path.glob("*.parquet")):
        return load_table(path, columns)
    _refuse(name, columns)
    if is_minari_id(name):
        return load_minari(name)
    if is_task(name):
        return load_task(name)
    raise ValueError(
        f"{name}: not a dataset; expected a file ({', '.join(_FILES)}), the folder of a LeRobot dataset (with "
        "meta/info.json), a Minari id such as mujoco/hopper/medium-v0, or a benchmark task such as hopper-medium"
    )


def _refuse(name: str, columns: Columns | None, *, only_names: bool = False) -> None:
    """Refuse settings that a dataset without columns would ignore."""
    if columns is not None and (columns.names_columns if only_names else columns != Columns()):
        what = "names of columns" if columns.names_columns else "missing and max_episode_steps"
        raise ValueError(f"{name}: describes its episodes itself, so it takes no {what}; leave them out")


def save_dataset(dataset: Dataset, target: str | Path, *, overwrite: bool | None = None) -> None:
    """Save a dataset to a file (`.npz`, `.hdf5`, `.parquet`, `.csv`) or as a local Minari dataset.

    It appears complete or not at all. `overwrite` says whether one that exists is replaced or an error; by default
    files are replaced, and Minari datasets are not.
    """
    target, path = str(target), Path(target)
    suffix = table_suffix(path)
    if dataset.map_shape and suffix != ".npz":
        raise ValueError(f"{target}: only .npz files can store the maps of episodes; save to a .npz file")
    if suffix in _WRITERS:
        _WRITERS[suffix](dataset, path, overwrite=overwrite is not False)
    elif is_minari_id(target):
        save_minari(dataset, target, overwrite=bool(overwrite))
    else:
        raise ValueError(
            f"{target}: cannot be saved; expected a file ({', '.join(_WRITERS)}) or a Minari id such as hopper/mine-v0"
        )
