"""Any recorded data in, by name: one call to load, one to write, whatever holds the episodes."""

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


def is_minari_id(name: str) -> bool:
    """Whether a name reads `(namespace/)name-v0` and not as a file that we know how to read."""
    return _MINARI_ID.fullmatch(name) is not None


def load_dataset(name: str, columns: Columns | None = None) -> Dataset:
    """A dataset by file (`.npz`, `.hdf5`, `.parquet`, `.csv`), Minari id or benchmark task (`hopper-medium`).

    `columns` says how to read a table; without it, the file beside it does: `log.csv.columns.yaml` for `log.csv`.
    """
    path = Path(name)
    if path.suffix in _READERS or path.suffix in _TABLES:
        if not path.exists():
            raise ValueError(f"{name}: no such dataset file; `tt collect` makes one")
        return load_table(path, columns) if path.suffix in _TABLES else _READERS[path.suffix](path)
    if is_minari_id(name):
        return load_minari(name)
    if is_task(name):
        return load_task(name)
    known = ", ".join([*_READERS, *_TABLES])
    raise ValueError(
        f"{name}: no such dataset: neither a file with one of {known} nor a Minari id like hopper/medium-v0"
    )


def save_dataset(dataset: Dataset, target: str) -> None:
    """Write a dataset as the file or the Minari id that `target` names."""
    path = Path(target)
    if dataset.map_shape and path.suffix != ".npz":
        raise ValueError(f"{target}: only .npz files hold the maps of episodes; name one of those")
    if path.suffix in _WRITERS:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](dataset, path)
    elif is_minari_id(target):
        save_minari(dataset, target)
    else:
        raise ValueError(f"{target}: name a file with one of {', '.join(_WRITERS)}, or a Minari id like hopper/mine-v0")
