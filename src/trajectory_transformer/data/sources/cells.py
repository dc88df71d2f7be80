"""Columns of a table as numbers: categories become their number, empty cells become NaN."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import DoubleArray
from trajectory_transformer.data.sources.columns import Columns

Arrays = dict[str, npt.NDArray[Any]]
Values = Sequence[str | int]

MAX_CATEGORIES = 64  # a column with more different values is not suggested as a category


def listed_categories(columns: Columns) -> dict[str, Values]:
    """The columns whose categories are listed value by value."""
    return {name: values for name, values in columns.categories.items() if not isinstance(values, int)}


def category_numbers(path: Path, name: str, cells: Sequence[str], values: Values, first_row: int = 0) -> DoubleArray:
    """The category of each cell, NaN for an empty one."""
    numbers: Mapping[str, int] = {str(value): index for index, value in enumerate(values)}
    try:
        return np.array([np.nan if cell == "" else numbers[_plain(cell, numbers)] for cell in cells])
    except KeyError:
        row, cell = next((i, c) for i, c in enumerate(cells) if c and _plain(c, numbers) not in numbers)
        raise ValueError(
            f"{path}, row {first_row + row + 1}: column {name!r} must hold one of {', '.join(numbers)}, got {cell!r}; "
            f"add it to columns.categories.{name}"
        ) from None


def _plain(cell: str, numbers: Mapping[str, int]) -> str:
    """A cell as the list of categories has it: 2.0 as 2, TRUE as true."""
    text = cell.strip()
    if text in numbers:
        return text
    if text.lower() in numbers:
        return text.lower()
    return text.removesuffix(".0")


def check_counted(path: Path, columns: Columns, table: Arrays) -> None:
    """Refuse values of counted categories that are outside 0, 1, ...; the error says how to list them instead."""
    for name, count in columns.categories.items():
        if not isinstance(count, int):
            continue
        values = table[name]
        wrong = np.isfinite(values) & ((values != np.rint(values)) | (values < 0) | (values >= count))
        if wrong.any():
            row = int(np.argmax(wrong.reshape(len(values), -1).any(axis=1)))
            found = [f"{value:g}" for value in np.unique(values[np.isfinite(values)])[:MAX_CATEGORIES]]
            raise ValueError(
                f"{path}, row {row + 1}: column {name!r} has {count} categories, which must be 0 to {count - 1}, got "
                f"{values[wrong].ravel()[0]:g}; list its values to number them: "
                f"columns.categories '{{{name}: [{', '.join(found)}]}}'"
            )


def as_labels(numbers: npt.NDArray[Any], values: Values) -> list[str | int | None]:
    """The recorded values of category numbers, None for NaN."""
    return [None if np.isnan(number) else values[int(number)] for number in numbers]
