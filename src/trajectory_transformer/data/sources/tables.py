"""CSV and Parquet logs: one row per step, with the columns that `Columns` names.

A row holds an observation, the action taken after it and the reward of that action. A last row without an action holds
the final state of its episode; see `EpisodeBuilder` for episodes without such a row. Errors count rows from 1, without
the header.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, DoubleArray, join_dimensions
from trajectory_transformer.data.sources.columns import (
    Columns,
    columns_path,
    guess_columns,
    parse_columns,
    read_columns,
)
from trajectory_transformer.data.sources.rows import EpisodeBuilder, check_finite, description
from trajectory_transformer.files import replacing, write_atomically

__all__ = ["Columns", "load_table", "save_table"]

Arrays = dict[str, npt.NDArray[Any]]
_DESCRIPTION = b"trajectory_transformer"
_CHUNK = 65536
_TRUTH = {"true": "1", "false": "0", "": "nan"}
_MAX_CATEGORIES = 64  # integers with more values are rather numbers than categories


def load_table(path: str | Path, columns: Columns | None = None) -> Dataset:
    """Read a table; the columns are given, in the YAML file next to it, or stored in the table itself."""
    path = Path(path)
    names, stored = _header(path)
    if columns is None and columns_path(path).is_file():
        columns = read_columns(columns_path(path))
    if columns is not None:
        stored = {}  # the stored description belongs to the stored columns
    elif "columns" in stored:
        columns = parse_columns(stored["columns"], str(path))
    else:
        raise ValueError(_suggestion(path, names))
    missing = [name for name in (*columns.numeric, *columns.labels) if name not in names]
    if missing:
        raise ValueError(f"{path}: the table has no column {missing[0]!r}; its columns are {', '.join(names)}")
    read = _read_csv if path.suffix == ".csv" else _read_parquet
    table = read(path, columns.numeric, columns.labels)

    observations, observation_names = _matrix(table, columns.observations)
    actions, action_names = _matrix(table, columns.actions)
    goals, _ = _matrix(table, columns.goals)
    rewards = None if columns.reward is None else table[columns.reward]
    terminal = np.zeros(len(observations)) if columns.terminal is None else np.nan_to_num(table[columns.terminal])
    for name in columns.observations:
        check_finite(path, f"column {name!r}", table[name])

    builder = EpisodeBuilder(path)
    outcomes = stored.get("outcomes", [])
    for rows in _episodes(table, columns, len(observations)):
        # Only the last row may be without an action; it then holds the final state.
        has_final = bool(np.isnan(actions[rows[-1]]).all())
        steps = rows[:-1] if has_final else rows
        for name in (*columns.actions, *([columns.reward] if columns.reward else [])):
            _check_rows(path, name, table[name], steps)
        index = len(builder.episodes)
        builder.add(
            observations[steps],
            actions[steps],
            None if rewards is None else rewards[steps],
            terminated=bool(terminal[rows].any()),
            final=observations[rows[-1]] if has_final else None,
            goal=goals[rows[0]] if columns.goals else None,
            outcome=outcomes[index] if index < len(outcomes) else None,
            place=f" (from row {rows[0] + 1})",
        )
    metadata = {**({"env": columns.env} if columns.env else {}), **stored.get("metadata", {})}
    try:
        observation_dimensions, action_dimensions = (
            join_dimensions(
                kind, stored.get(f"{kind}_names", names), [columns.categories.get(name, 0) for name in names]
            )
            for kind, names in (("observation", observation_names), ("action", action_names))
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return builder.dataset(metadata, observation_dimensions, action_dimensions)


def _episodes(table: Arrays, columns: Columns, count: int) -> list[npt.NDArray[np.int64]]:
    """Sorted row numbers of each episode; episodes are in the order of their first rows."""
    rows = np.arange(count)
    if columns.order is not None:
        rows = np.argsort(table[columns.order], kind="stable")
    if columns.episode is None:
        return [rows]
    _, first, label = np.unique(table[columns.episode], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[label]  # [N], episodes numbered by their first row
    rows = rows[np.argsort(rank[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(rank[rows])) + 1)


def _matrix(table: Arrays, names: Sequence[str]) -> tuple[DoubleArray, tuple[str, ...]]:
    """Concatenate columns to [N, D], with their names; a column of lists counts as several columns."""
    parts, each = [np.zeros((len(next(iter(table.values()))), 0))], []
    for name in names:
        values = table[name]
        parts.append(values.reshape(len(values), -1))
        each += [name] if values.ndim == 1 else [f"{name}[{index}]" for index in range(values.shape[1])]
    return np.concatenate(parts, axis=1), tuple(each)


def _check_rows(path: Path, name: str, values: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> None:
    bad = rows[~np.isfinite(values[rows]).reshape(len(rows), -1).all(axis=1)]
    if len(bad):
        raise ValueError(f"{path}, row {bad[0] + 1}: column {name!r} must be a finite number")


def _header(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Column names, and the description that `save_table` stores in Parquet tables."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            try:
                return next(csv.reader(file)), {}
            except (StopIteration, csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: not a CSV table with a header") from error
    schema = _parquet_table(path, []).schema
    return list(schema.names), json.loads((schema.metadata or {}).get(_DESCRIPTION, b"{}"))


def _read_csv(path: Path, numeric: Sequence[str], labels: Sequence[str]) -> Arrays:
    """Read columns of a CSV file in chunks: the text of a whole file would take ten times the memory."""
    pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*numeric, *labels)}
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = next(reader)
        places = {name: header.index(name) for name in pieces}
        num_rows = 0
        while chunk := [row for _, row in zip(range(_CHUNK), reader, strict=False)]:
            short = next((index for index, row in enumerate(chunk) if len(row) != len(header)), None)
            if short is not None:
                raise ValueError(
                    f"{path}, row {num_rows + short + 1}: a row needs {len(header)} cells, got {len(chunk[short])}"
                )
            for name, place in places.items():
                cells = [row[place] for row in chunk]
                pieces[name].append(_numbers(path, name, cells, num_rows) if name in numeric else np.array(cells))
            num_rows += len(chunk)
    if not num_rows:
        raise ValueError(f"{path}: the table has no rows")
    return {
        name: _label(np.concatenate(parts)) if name in labels else np.concatenate(parts)
        for name, parts in pieces.items()
    }


def _numbers(path: Path, name: str, cells: Sequence[str], first_row: int) -> DoubleArray:
    """Parse cells as numbers; empty cells become NaN."""
    try:
        return np.array([_TRUTH.get(cell.lower(), cell) for cell in cells]).astype(np.float64)
    except ValueError:
        for index, cell in enumerate(cells):
            try:
                float(_TRUTH.get(cell.lower(), cell))
            except ValueError as error:
                raise ValueError(
                    f"{path}, row {first_row + index + 1}: column {name!r} must hold numbers, got {cell!r}"
                ) from error
        raise


def _label(cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert cells to numbers if all are numbers, so that 10 sorts after 9; else keep the text."""
    try:
        return cells.astype(np.float64)
    except ValueError:
        return cells


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading and writing Parquet needs: pip install 'trajectory-transformer[parquet]'") from error
    return pyarrow, pyarrow.parquet


def _parquet_table(path: Path, columns: Sequence[str]) -> Any:
    """Read columns of a Parquet file or folder; without columns, only the schema."""
    pyarrow, parquet = _pyarrow()
    try:
        if columns:
            return parquet.read_table(path, columns=list(dict.fromkeys(columns)))
        return parquet.ParquetDataset(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: not a complete Parquet file; it may be truncated ({error})") from error


def _read_parquet(path: Path, numeric: Sequence[str], labels: Sequence[str]) -> Arrays:
    """Read columns of a Parquet file."""
    table = _parquet_table(path, [*numeric, *labels])
    if not len(table):
        raise ValueError(f"{path}: the table has no rows")
    arrays: Arrays = {name: _arrow_numbers(path, name, table[name].combine_chunks()) for name in numeric}
    for name in labels:
        arrays[name] = table[name].to_numpy()
        if arrays[name].dtype == object:
            arrays[name] = arrays[name].astype(str)
    return arrays


def _arrow_numbers(path: Path, name: str, column: Any) -> DoubleArray:
    """Convert a column to numbers [N], a column of lists to [N, K]; nulls become NaN."""
    pyarrow, _ = _pyarrow()
    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_fixed_size_list(kind) or pyarrow.types.is_large_list(kind):
        lists = column.to_pylist()
        width = len(next((each for each in lists if each is not None), []))
        for index, each in enumerate(lists):
            if each is not None and len(each) != width:
                raise ValueError(
                    f"{path}, row {index + 1}: lists of column {name!r} must have {width} entries, as in row 1, "
                    f"got {len(each)}"
                )
        return np.array([[np.nan] * width if each is None else each for each in lists], dtype=np.float64)
    if pyarrow.types.is_boolean(kind):
        column = column.cast(pyarrow.int8())
    elif not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        value = next((each for each in column.to_pylist() if each is not None), None)
        row = column.to_pylist().index(value) + 1
        raise ValueError(f"{path}, row {row}: column {name!r} must hold numbers, got {value!r}")
    return np.asarray(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _suggestion(path: Path, names: Sequence[str]) -> str:
    """Error text for a table without columns, with a guess that the user can save."""
    guess = guess_columns(names, {})
    if guess is None:
        return (
            f"{path}: write {columns_path(path)} to say which columns hold observations and actions; "
            f"the table has the columns {', '.join(names)}"
        )
    numbers = [name for name in guess.actions if name]
    read = _read_csv if path.suffix == ".csv" else _read_parquet
    table = read(path, numbers, [])
    counts = {name: _category_count(values) for name, values in table.items() if _category_count(values)}
    text = Columns(**{**asdict(guess), "categories": counts}).to_yaml()
    return (
        f"{path}: no file says which columns hold what; check this guess and save it as {columns_path(path)}\n\n{text}"
    )


def _category_count(values: npt.NDArray[Any]) -> int:
    """Guess the number of categories of a column; 0: continuous."""
    known = values[np.isfinite(values)]
    if values.ndim != 1 or not len(known) or (known != np.rint(known)).any() or known.min() < 0:
        return 0
    return int(known.max()) + 1 if known.max() < _MAX_CATEGORIES else 0


def save_table(dataset: Dataset, path: str | Path) -> None:
    """Write one row per step and one per final state; columns go to a YAML file (CSV) or into the file (Parquet)."""
    path = Path(path)
    columns = _columns_of(dataset)
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*columns.labels, *columns.numeric)}
    for index, episode in enumerate(dataset):
        steps = len(episode)
        rows = {columns.episode: np.full(steps + 1, index), columns.order: np.arange(steps + 1)}
        rows |= dict(zip(columns.observations, episode.observations.T, strict=True))
        no_action = np.full((1, dataset.action_dim), np.nan, np.float32)
        rows |= dict(zip(columns.actions, np.concatenate([episode.actions, no_action]).T, strict=True))
        if episode.rewards is not None:
            rows[columns.reward] = np.append(episode.rewards, np.float32(np.nan))
        if episode.goal is not None:
            rows |= dict(zip(columns.goals, np.tile(episode.goal, (steps + 1, 1)).T, strict=True))
        rows[columns.terminal] = (np.arange(steps + 1) == steps) & episode.terminated
        for name, values in rows.items():
            assert name is not None
            parts[name].append(values)
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    if path.suffix == ".csv":
        with replacing(path) as temporary:
            _write_csv(arrays, temporary)
            write_atomically(columns_path(path), columns.to_yaml().encode())
        return
    pyarrow, parquet = _pyarrow()
    stored = {**json.loads(description(dataset)), "columns": json.loads(json.dumps(asdict(columns)))}
    nulls = {name: pyarrow.array(values, from_pandas=True) for name, values in arrays.items()}  # NaN becomes null
    table = pyarrow.table(nulls).replace_schema_metadata({_DESCRIPTION: json.dumps(stored).encode()})
    with replacing(path) as temporary:
        parquet.write_table(table, temporary)


def _columns_of(dataset: Dataset) -> Columns:
    """Columns for a dataset, named after its dimensions if the names are unique, else numbered."""
    fixed = ["episode", "step", "reward", "terminal"]
    dimensions = (*dataset.observation_dimensions, *dataset.action_dimensions)
    names = [dimension.name.replace(" ", "_") for dimension in dimensions]
    if len({*names, *fixed}) < len(names) + len(fixed):
        names = [f"observation_{index}" for index in range(dataset.observation_dim)]
        names += [f"action_{index}" for index in range(dataset.action_dim)]
    observations, actions = names[: dataset.observation_dim], names[dataset.observation_dim :]
    goal = dataset.episodes[0].goal
    env = dataset.metadata.get("env")
    return Columns(
        episode="episode",
        order="step",
        observations=tuple(observations),
        actions=tuple(actions),
        reward="reward" if dataset.has_rewards else None,
        terminal="terminal",
        goals=() if goal is None else tuple(f"goal_{index}" for index in range(len(goal))),
        categories={name: each.categories for name, each in zip(names, dimensions, strict=True) if each.categories},
        env=env if isinstance(env, str) else None,
    )


def _write_csv(arrays: Arrays, path: Path) -> None:
    """Write a CSV file; numbers with the fewest digits that read back exactly, NaN as an empty cell."""
    columns = []
    for values in arrays.values():
        if values.dtype.kind == "f":
            columns.append(["" if text == "nan" else text for text in values.astype(str).tolist()])
        else:
            columns.append([str(value).lower() for value in values.tolist()])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(arrays)
        writer.writerows(zip(*columns, strict=True))
