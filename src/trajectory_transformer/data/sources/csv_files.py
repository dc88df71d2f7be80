"""CSV files: separated by commas, semicolons or tabs, with a decimal point or comma, plain or compressed by gzip."""

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import DoubleArray
from trajectory_transformer.data.sources.cells import Arrays, Values, as_labels, category_numbers
from trajectory_transformer.limits import check_size

_CHUNK = 65536
_MAX_LINE = 2**20
_SEPARATORS = (",", ";", "\t")
_TRUTH = {"true": "1", "false": "0", "": "nan"}


def csv_header(path: Path) -> list[str]:
    """The names of the columns."""
    with _opened(path) as file:
        header = next(_rows(path, file, _separator(path)), None)
    if not header:
        raise ValueError(f"{path}: not a CSV table with a header")
    repeated = next((name for name in header if name and header.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(
            f"{path}: {header.count(repeated)} columns are named {repeated!r}; rename them, because a column is known "
            "by its name"
        )
    return header


def read_csv(
    path: Path, numeric: Sequence[str], labels: Sequence[str], categories: Mapping[str, Values] | None = None
) -> Arrays:
    """Read columns in chunks: the text of a whole file would take ten times the memory.

    Columns in `categories` become the numbers of their categories.
    """
    known = categories or {}
    pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*numeric, *labels)}
    header, separator = csv_header(path), _separator(path)
    decimals = _Decimals(path, allow_comma=separator != ",")
    places = {name: header.index(name) for name in pieces}
    num_rows = 0
    with _opened(path) as file:
        reader = _rows(path, file, separator)
        next(reader)  # the header
        while chunk := [row for _, row in zip(range(_CHUNK), reader, strict=False)]:
            short = next((index for index, row in enumerate(chunk) if len(row) != len(header)), None)
            if short is not None:
                raise ValueError(
                    f"{path}, row {num_rows + short + 1}: a row needs {len(header)} cells, got {len(chunk[short])}"
                )
            for name, place in places.items():
                cells = [row[place].strip() for row in chunk]
                if name in known:
                    pieces[name].append(category_numbers(path, name, cells, known[name], num_rows))
                elif name in numeric:
                    pieces[name].append(_numbers(path, name, cells, num_rows, decimals))
                else:
                    pieces[name].append(np.array(cells))
            num_rows += len(chunk)
            check_size(path, 8 * num_rows * len(pieces))
    if not num_rows:
        raise ValueError(f"{path}: the table has no rows")
    joined = {name: np.concatenate(parts) for name, parts in pieces.items()}
    return {name: _label(cells, separator) if name in labels else cells for name, cells in joined.items()}


def write_csv(
    arrays: Arrays, path: Path, *, separator: str, compressed: bool, categories: Mapping[str, Values]
) -> None:
    """Write a CSV file; numbers with the fewest digits that read back exactly, NaN as an empty cell."""
    columns = []
    for name, values in arrays.items():
        if name in categories:
            columns.append(["" if label is None else str(label) for label in as_labels(values, categories[name])])
        elif values.dtype.kind == "f":
            columns.append(["" if text == "nan" else text for text in values.astype(str).tolist()])
        else:
            columns.append([str(value).lower() for value in values.tolist()])
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator)
    writer.writerow(arrays)
    writer.writerows(zip(*columns, strict=True))
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The text of a file."""
    try:
        with (
            gzip.open(path, "rt", newline="", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(newline="", encoding="utf-8-sig") as file
        ):
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); save the table as UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error})") from error


def _rows(path: Path, file: TextIO, separator: str) -> Iterator[list[str]]:
    """The rows of a table, header included; empty lines are left out."""
    try:
        yield from (row for row in csv.reader(_lines(path, file), delimiter=separator) if row)
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV table with a header ({error})") from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file; a compressed one can hold a line of any length."""
    while line := file.readline(_MAX_LINE):
        if len(line) == _MAX_LINE:
            raise ValueError(f"{path}: a line of a table may have at most {_MAX_LINE:,} characters")
        yield line


def _separator(path: Path) -> str:
    """The separator that splits the header and the first row into the same number of columns, the more the better."""
    with _opened(path) as file:
        lines = list(itertools.islice(_lines(path, file), 2))

    def columns(separator: str) -> tuple[bool, int]:
        counts = [len(next(csv.reader([line], delimiter=separator), [])) for line in lines if line.strip()]
        return len(set(counts)) == 1, counts[0] if counts else 0

    return max(_SEPARATORS, key=columns)


class _Decimals:
    """Remembers which decimal mark a file uses, and refuses a second one: 1,234 would be 1.234 or 1234.

    A comma is a decimal mark only in files that it does not separate.
    """

    def __init__(self, path: Path, *, allow_comma: bool) -> None:
        self._path = path
        self._allow_comma = allow_comma
        self._seen: dict[str, str] = {}  # the first cell with each mark, and its place

    def point(self, name: str, cells: Sequence[str], first_row: int) -> Sequence[str]:
        """The cells with a decimal point."""
        if not self._allow_comma:
            return cells
        for mark in ".,":
            row = next((row for row, cell in enumerate(cells) if mark in cell), None)
            if row is not None:
                self._seen.setdefault(mark, f"{cells[row]!r} in row {first_row + row + 1}, column {name!r}")
        if len(self._seen) == 2:
            raise ValueError(
                f"{self._path}: numbers have both a decimal point and a decimal comma ({self._seen['.']}, "
                f"{self._seen[',']}); write all numbers in one way, without a thousands separator"
            )
        return [cell.replace(",", ".") for cell in cells] if "," in self._seen else cells


def _numbers(path: Path, name: str, cells: Sequence[str], first_row: int, decimals: _Decimals) -> DoubleArray:
    """Parse cells as numbers; empty cells become NaN."""
    texts = [_TRUTH.get(cell.lower(), cell) for cell in decimals.point(name, cells, first_row)]
    try:
        return np.array(texts).astype(np.float64)
    except ValueError:
        for index, text in enumerate(texts):
            try:
                float(text)
            except ValueError as error:
                raise ValueError(
                    f"{path}, row {first_row + index + 1}: column {name!r} must hold numbers, got {cells[index]!r}; if "
                    f"these are categories, list their values: columns.categories '{{{name}: [{text}, ...]}}'"
                ) from error
        raise


def _label(cells: npt.NDArray[Any], separator: str) -> npt.NDArray[Any]:
    """Convert cells to numbers if all are numbers, so that 10 sorts after 9; else keep the text."""
    try:
        return (cells if separator == "," else np.char.replace(cells, ",", ".")).astype(np.float64)
    except ValueError:
        return cells
