"""Parquet files and folders of Parquet files, read column by column."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trajectory_transformer.data.episode import DoubleArray, check_description
from trajectory_transformer.data.sources.cells import Arrays, Values, as_labels, category_numbers
from trajectory_transformer.files import parse_json
from trajectory_transformer.limits import check_size

_DESCRIPTION = b"trajectory_transformer"


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading and writing Parquet needs: pip install 'trajectory-transformer[parquet]'") from error
    return pyarrow, pyarrow.parquet


def parquet_header(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Column names, and the description that `write_parquet` stores."""
    pyarrow, parquet = _pyarrow()
    try:
        schema = parquet.ParquetDataset(path).schema
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _incomplete(path, error) from error
    stored = parse_json((schema.metadata or {}).get(_DESCRIPTION, b"{}"), f"{path}: its description")
    return list(schema.names), check_description(stored, path)


def read_parquet(
    path: Path | Sequence[Path],
    numeric: Sequence[str],
    labels: Sequence[str],
    categories: Mapping[str, Values] | None = None,
) -> Arrays:
    """Read columns of a file, a folder or several files; those in `categories` become numbers of categories."""
    pyarrow, parquet = _pyarrow()
    files = [path] if isinstance(path, Path) else list(path)
    tables = []
    for file in files:
        try:
            _check_rows(file, [*numeric, *labels])
            tables.append(parquet.read_table(file, columns=list(dict.fromkeys([*numeric, *labels]))))
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise _incomplete(file, error) from error
    try:
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise ValueError(f"{files[0].parent}: all files must have the same columns ({error})") from error
    place = files[0]
    if not len(table):
        raise ValueError(f"{place}: the table has no rows")
    arrays: Arrays = {}
    for name in numeric:
        column = table[name].combine_chunks()
        if categories is not None and name in categories:
            cells = ["" if value is None else str(value) for value in column.to_pylist()]
            arrays[name] = category_numbers(place, name, cells, categories[name])
        else:
            arrays[name] = _numbers(place, name, column)
    for name in labels:
        arrays[name] = table[name].to_numpy()
        if arrays[name].dtype == object:
            arrays[name] = np.array(["" if value is None else str(value) for value in table[name].to_pylist()])
    return arrays


def _check_rows(path: Path, columns: Sequence[str]) -> None:
    """Refuse a file or folder whose columns would not fit into memory: a run of equal values takes a few bytes."""
    _, parquet = _pyarrow()
    for file in sorted(path.glob("**/*.parquet")) if path.is_dir() else [path]:
        opened = parquet.ParquetFile(file)
        # Of a column of lists: NAME.list.element
        places = [f"{opened.schema.column(index).path}." for index in range(len(opened.schema))]
        chosen = [index for index, place in enumerate(places) if any(place.startswith(f"{name}.") for name in columns)]
        numbers = 0
        for number in range(opened.metadata.num_row_groups):
            # Read a row first: `column` ends the process where the description of a column is damaged.
            next(opened.iter_batches(batch_size=1, row_groups=[number], columns=list(columns)), None)
            group = opened.metadata.row_group(number)
            numbers += sum(group.column(index).num_values for index in chosen)
        check_size(file, 8 * numbers)


def write_parquet(
    arrays: Arrays, path: Path, description: Mapping[str, Any], *, categories: Mapping[str, Values]
) -> None:
    """Write columns and a description; NaN becomes null."""
    pyarrow, parquet = _pyarrow()
    columns = {
        name: pyarrow.array(as_labels(values, categories[name]) if name in categories else values, from_pandas=True)
        for name, values in arrays.items()
    }
    table = pyarrow.table(columns).replace_schema_metadata({_DESCRIPTION: json.dumps(description).encode()})
    parquet.write_table(table, path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All rows of a small file as dictionaries; an index that pandas stored is a column like any other."""
    pyarrow, parquet = _pyarrow()
    try:
        records: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _incomplete(path, error) from error
    return records


def _incomplete(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a complete Parquet file; it may be truncated ({error})")


def _numbers(path: Path, name: str, column: Any) -> DoubleArray:
    """Convert a column to numbers [N], a column of lists to [N, K]; nulls become NaN."""
    pyarrow, _ = _pyarrow()
    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_fixed_size_list(kind) or pyarrow.types.is_large_list(kind):
        return _vectors(path, name, column)
    if pyarrow.types.is_boolean(kind):
        column = column.cast(pyarrow.int8())
    elif not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        value = next((each for each in column.to_pylist() if each is not None), None)
        row = column.to_pylist().index(value) + 1
        hint = f"; if these are categories, list their values: columns.categories '{{{name}: [{value}, ...]}}'"
        if isinstance(value, dict | bytes):
            value, hint = "an image or another structure", ""
        raise ValueError(f"{path}, row {row}: column {name!r} must hold numbers, got {value!r}{hint}")
    return np.asarray(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _vectors(path: Path, name: str, column: Any) -> DoubleArray:
    """A column of lists of equal length: [N, K]."""
    pyarrow, _ = _pyarrow()
    if pyarrow.types.is_nested(column.type.value_type):
        raise ValueError(
            f"{path}: lists of column {name!r} must hold numbers, got {column.type}; images are not supported, because "
            "every number becomes a token"
        )
    flat = column.flatten()
    if len(column) and not column.null_count and not flat.null_count and len(flat) % len(column) == 0:
        lengths = np.asarray(column.value_lengths())
        if (lengths == lengths[0]).all():
            return np.asarray(flat.cast(pyarrow.float64()).to_numpy(), dtype=np.float64).reshape(len(column), -1)
    lists = column.to_pylist()
    width = len(next((each for each in lists if each is not None), []))
    for index, each in enumerate(lists):
        if each is not None and len(each) != width:
            raise ValueError(
                f"{path}, row {index + 1}: lists of column {name!r} must have {width} entries, as in row 1, "
                f"got {len(each)}"
            )
    return np.array([[np.nan] * width if each is None else each for each in lists], dtype=np.float64)
