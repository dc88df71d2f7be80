"""Load and save datasets by name: files (.npz, .hdf5, .parquet, .csv), Minari ids and benchmark tasks."""

import re
from collections.abc import Callable
from pathlib import Path

from trajectory_transformer.data.episode import Dataset, load_npz, save_npz
from trajectory_transformer.data.sources.hdf5 import load_hdf5, save_hdf5
from trajectory_transformer.data.sources.minari import load_minari, save_minari
from trajectory_transformer.data.sources.tables import Columns, load_table, save_table
from trajectory_transformer.data.sources.tasks import is_task, load_task

__all__ = ["Columns", "is_minari_id", "load_dataset", "save_dataset"]

_TABLES = (".csv", ".parquet")
_READERS: dict[str, Callable[[Path], Dataset]] = {".npz": load_npz, ".hdf5": load_hdf5, ".h5": load_hdf5}
_WRITERS: dict[str, Callable[[Dataset, Path], None]] = {
    ".npz": save_npz,
    ".hdf5": save_hdf5,
    ".h5": save_hdf5,
    ".csv": save_table,
    ".parquet": save_table,
}
_MINARI_ID = re.compile(r"(\w+://[\w.-]+/)?([\w-]+/)*[\w.-]+-v\d+")


def is_minari_id(name: str | Path) -> bool:
    """Whether a name has the form of a Minari id: `(namespace/)name-v0`."""
    return _MINARI_ID.fullmatch(str(name)) is not None


def load_dataset(name: str | Path, columns: Columns | None = None) -> Dataset:
    """Load a dataset: a file (`.npz`, `.hdf5`, `.parquet`, `.csv`), a Minari id or a benchmark task (`hopper-medium`).

    `columns` says which columns of a table hold what; the default is the YAML file next to the table,
    `log.csv.columns.yaml` for `log.csv`.
    """
    name, path = str(name), Path(name)
    if path.suffix in _READERS or path.suffix in _TABLES:
        if not path.exists():
            raise ValueError(f"{name}: no such dataset file; collect one with `tt collect`")
        return load_table(path, columns) if path.suffix in _TABLES else _READERS[path.suffix](path)
    if is_minari_id(name):
        return load_minari(name)
    if is_task(name):
        return load_task(name)
    known = ", ".join([*_READERS, *_TABLES])
    raise ValueError(
        f"{name}: not a dataset; expected a file ({known}), a Minari id such as mujoco/hopper/medium-v0, "
        "or a benchmark task such as hopper-medium"
    )


def save_dataset(dataset: Dataset, target: str | Path) -> None:
    """Save a dataset to a file (`.npz`, `.hdf5`, `.parquet`, `.csv`) or as a local Minari dataset."""
    target, path = str(target), Path(target)
    if dataset.map_shape and path.suffix != ".npz":
        raise ValueError(f"{target}: only .npz files can store the maps of episodes; save to a .npz file")
    if path.suffix in _WRITERS:
        _WRITERS[path.suffix](dataset, path)
    elif is_minari_id(target):
        save_minari(dataset, target)
    else:
        raise ValueError(
            f"{target}: cannot be saved; expected a file ({', '.join(_WRITERS)}) or a Minari id such as hopper/mine-v0"
        )
