"""CSV and Parquet logs: one row per step, with the columns that `Columns` names.

A row holds an observation, the action taken after it and the reward of that action. A last row without an action holds
the final state of its episode; see `EpisodeBuilder` for episodes without such a row. Errors count rows from 1, without
the header.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, Dimension, DoubleArray, Metadata, dimensions_from
from trajectory_transformer.data.sources.cells import MAX_CATEGORIES, Arrays, check_counted, listed_categories
from trajectory_transformer.data.sources.columns import (
    Categories,
    Columns,
    columns_path,
    guess_columns,
    parse_columns,
    read_columns,
)
from trajectory_transformer.data.sources.csv_files import csv_header, read_csv, write_csv
from trajectory_transformer.data.sources.parquet import parquet_header, read_parquet, write_parquet
from trajectory_transformer.data.sources.rows import BoolArray, IntArray, Rows, build_dataset, description
from trajectory_transformer.files import replacing, write_atomically

__all__ = ["CSV", "TABLES", "Columns", "load_table", "save_table", "table_suffix"]

_WRITTEN = "# Written by tt, together with the table.\n"
CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
TABLES = (*CSV, ".parquet")


def table_suffix(path: Path) -> str:
    """The suffix of a path, with that of what gzip compressed: `.csv.gz`."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def load_table(path: str | Path, columns: Columns | None = None) -> Dataset:
    """Read a table; the columns are given, in the YAML file next to it, or stored in the table itself."""
    path = Path(path)
    is_csv = table_suffix(path) in CSV
    names, stored = (csv_header(path), {}) if is_csv else parquet_header(path)
    given = columns or Columns()
    base = None
    if columns_path(path).is_file():
        base, stored = read_columns(columns_path(path)), {}
    elif "columns" in stored:
        base = parse_columns(stored["columns"], str(path))
    if given.names_columns:
        stored = {}  # the stored description belongs to the stored columns
    columns = given if base is None or given.is_complete else given.over(base)
    if not columns.is_complete:
        raise ValueError(_suggestion(path, names, columns))
    check_names(path, columns, names)
    read = read_csv if is_csv else read_parquet
    table = read(path, columns.numeric, columns.labels, listed_categories(columns))
    return table_dataset(path, table, columns, stored)


def check_names(path: Path, columns: Columns, names: Sequence[str]) -> None:
    """Refuse columns that a table does not have."""
    missing = [name for name in (*columns.numeric, *columns.labels) if name not in names]
    if missing:
        raise ValueError(f"{path}: the table has no column {missing[0]!r}; its columns are {', '.join(names)}")


def table_dataset(
    path: Path,
    table: Arrays,
    columns: Columns,
    stored: Mapping[str, Any],
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    metadata: Metadata | None = None,
) -> Dataset:
    """Episodes from the columns of a table.

    `stored` is the description that `save_table` made, `names` has the names of the entries of vector columns.
    """
    check_counted(path, columns, table)
    order, group = _sorted_rows(path, table, columns)
    table = {name: values[order] for name, values in table.items()}
    observations, observed = _matrix(table, columns.observations, columns.categories, names or {})
    actions, acted = _matrix(table, columns.actions, columns.categories, names or {})
    goals, aimed = _matrix(table, columns.goals, {}, {})
    terminated, truncated = (
        np.zeros(len(order), np.bool_) if name is None else np.nan_to_num(_flag(table, name)) != 0
        for name in (columns.terminal, columns.truncated)
    )
    group_end = np.append(np.diff(group) != 0, True)
    last, found_by = _ends(path, columns, group_end, terminated, truncated, _without(actions), order + 1)
    if columns.goals:
        _check_constant(path, goals, last, [each.name for each in aimed], order + 1)
    rows = Rows(
        observations=observations,
        actions=actions,
        last=last,
        terminated=terminated,
        rewards=None if columns.reward is None else table[columns.reward].reshape(len(order)),
        goals=goals if columns.goals else None,
        final_rows=True,
        numbers=order + 1,
        names={
            "observations": [f"column {each.name!r}" for each in observed],
            "actions": [f"column {each.name!r}" for each in acted],
            "rewards": [f"column {columns.reward!r}"],
            "goals": [f"column {each.name!r}" for each in aimed],
        },
    )
    facts = {**({"env": columns.env} if columns.env else {}), **(metadata or {}), **stored.get("metadata", {})}
    try:
        dimensions = [
            replaced if (replaced := dimensions_from(kind, stored)) else default
            for kind, default in (("observation", observed), ("action", acted))
        ]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return build_dataset(
        path,
        rows,
        columns,
        found_by=found_by,
        metadata=facts,
        observation_dimensions=dimensions[0],
        action_dimensions=dimensions[1],
        outcomes=stored.get("outcomes", []),
    )


def _sorted_rows(path: Path, table: Arrays, columns: Columns) -> tuple[IntArray, IntArray]:
    """Row numbers [N] in the order of episodes and steps, and the number of the episode of each [N].

    Episodes are in the order of their first rows.
    """
    for name in columns.labels:
        values = table[name]
        empty = np.isnan(values) if values.dtype.kind == "f" else values == ""
        if np.asarray(empty).any():
            raise ValueError(f"{path}, row {int(np.argmax(empty)) + 1}: column {name!r} is empty; every row needs one")
    count = len(next(iter(table.values())))
    rows = np.arange(count)
    if columns.order is not None:
        rows = np.argsort(table[columns.order], kind="stable")
    if columns.episode is None:
        _refuse_restart(path, table, columns.order)
        return rows, np.zeros(count, np.int64)
    _, first, label = np.unique(table[columns.episode], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[label]  # [N], episodes numbered by their first row
    rows = rows[np.argsort(rank[rows], kind="stable")]
    return rows, rank[rows]


def _refuse_restart(path: Path, table: Arrays, order: str | None) -> None:
    """Refuse to sort the rows of several episodes by a column that starts again with each of them."""
    values = None if order is None else table[order]
    if values is None or (back := values[1:] < values[:-1]).sum() == 0:
        return
    row = int(np.argmax(back))
    raise ValueError(
        f"{path}, row {row + 2}: column {order!r} goes back from {values[row]} to {values[row + 1]}, and no column "
        "identifies the episode, so sorting would mix episodes; name that column with --columns.episode, or leave out "
        "order if the rows are in order"
    )


def _ends(
    path: Path,
    columns: Columns,
    group_end: BoolArray,
    terminated: BoolArray,
    truncated: BoolArray,
    without_action: BoolArray,
    numbers: IntArray,
) -> tuple[BoolArray, str]:
    """The last row of each episode [N], and a description of how it was found."""
    by = [] if columns.episode is None else [f"column {columns.episode!r}"]
    flagged = terminated | truncated
    if not columns.split_at_terminal or not flagged.any():
        return group_end, " and ".join(by) or "nothing: all rows are one episode"
    # The row after a flag may hold only the final state; it then belongs to the same episode.
    followed = np.append(~group_end[:-1] & without_action[1:], False)
    final_state = np.append(False, (flagged & followed)[:-1])
    last = group_end | (flagged & ~followed) | final_state
    twice = np.append(False, (flagged & ~group_end)[:-1]) & flagged & ~without_action
    flags = " and ".join(repr(name) for name in (columns.terminal, columns.truncated) if name is not None)
    if columns.episode is not None and twice.any():
        row = int(np.argmax(twice))
        raise ValueError(
            f"{path}, rows {numbers[row - 1]} and {numbers[row]}: consecutive rows of one episode (column "
            f"{columns.episode!r}) are marked in {flags}; if only {columns.episode!r} separates episodes, set "
            "--columns.split_at_terminal false"
        )
    single = int((np.diff(np.flatnonzero(np.append(True, last))) == 1).sum())
    text = " and ".join([*by, f"rows where {flags} is true"])
    return last, text + (f"; {single} of {int(last.sum())} have a single row" if single else "")


def _without(actions: DoubleArray) -> BoolArray:
    """Rows without any action [N]."""
    return np.asarray(np.isnan(actions).all(axis=1))


def _flag(table: Arrays, name: str) -> DoubleArray:
    return table[name].reshape(len(table[name]))


def _check_constant(path: Path, goals: DoubleArray, last: BoolArray, names: Sequence[str], numbers: IntArray) -> None:
    """Refuse goals that change during an episode: goals [N, G]."""
    changes = (goals[1:] != goals[:-1]) & ~np.isnan(goals[1:]) & ~np.isnan(goals[:-1]) & ~last[:-1, None]
    if changes.any():
        row, column = np.argwhere(changes)[0].tolist()
        raise ValueError(
            f"{path}, row {numbers[row + 1]}: column {names[column]!r} must be the same in all rows of an episode, got "
            f"{goals[row, column]:g} and then {goals[row + 1, column]:g}; if a new goal starts a new episode, mark it "
            "in a column for --columns.truncated"
        )


def _matrix(
    table: Arrays, columns: Sequence[str], categories: Categories, names: Mapping[str, Sequence[str]]
) -> tuple[DoubleArray, tuple[Dimension, ...]]:
    """Concatenate columns to [N, D], with their dimensions; a column of lists counts as several columns."""
    parts, dimensions = [np.zeros((len(next(iter(table.values()))), 0))], []
    for column in columns:
        values = table[column].reshape(len(table[column]), -1)
        parts.append(values)
        entries = names.get(column) or [f"{column}[{index}]" for index in range(values.shape[1])]
        entries = [column] if table[column].ndim == 1 else entries
        known = categories.get(column, 0)
        labels = () if isinstance(known, int) else tuple(known)
        if labels == tuple(range(len(labels))):
            labels = ()
        count = known if isinstance(known, int) else len(known)
        dimensions += [Dimension(entry, count, labels) for entry in entries]
    return np.concatenate(parts, axis=1), tuple(dimensions)


def _suggestion(path: Path, names: Sequence[str], given: Columns) -> str:
    """Error text for a table without columns, with a guess that the user can save."""
    guess = guess_columns(names, given)
    if guess is None:
        return (
            f"{path}: say which columns hold observations and actions, with --columns.observations '[NAME, ...]' "
            "--columns.actions '[NAME, ...]' (and --columns.episode NAME for more than one episode), in Python with "
            f"Columns(...), or in the file {columns_path(path)}; the table has the columns {', '.join(names)}"
        )
    guess = replace(given.over(guess), missing="refuse", max_episode_steps=None)
    if guess.episode is None and given.order is None:
        guess = replace(guess, order=None)  # it may start again with every episode
    read = read_csv if table_suffix(path) in CSV else read_parquet
    categories: Categories = {}
    left_out = []
    for name in (*guess.observations, *guess.actions):
        found = _categories(read, path, name, is_action=name in guess.actions)
        if found is None:
            left_out.append(name)
        elif found:
            categories[name] = found
    observations, actions = (
        tuple(name for name in names if name not in left_out) for names in (guess.observations, guess.actions)
    )
    if not observations or not actions:
        return f"{path}: the columns {', '.join(left_out)} hold text; name columns of numbers or categories"
    guess = replace(guess, observations=observations, actions=actions, categories={**categories, **given.categories})
    text = guess.to_yaml()
    note = f"; it leaves out {', '.join(left_out)}, which hold text" if left_out else ""
    return (
        f"{path}: the roles of its columns are not known; check this guess{note} and save it as "
        f"{columns_path(path)}\n\n{text}"
    )


def _categories(read: Callable[..., Arrays], path: Path, name: str, *, is_action: bool) -> int | list[str | int] | None:
    """Guess the categories of a column: their number or their values; 0: numbers; None: text that is no category."""
    try:
        values: npt.NDArray[Any] = read(path, [name], [])[name]
    except ValueError:
        texts = np.unique(read(path, [], [name])[name])
        known: list[str | int] = [str(text) for text in texts if text != ""]
        return known if len(known) <= MAX_CATEGORIES else None
    known_numbers = values[np.isfinite(values)]
    if not is_action or values.ndim != 1 or not len(known_numbers) or (known_numbers != np.rint(known_numbers)).any():
        return 0
    low, high = int(known_numbers.min()), int(known_numbers.max())
    if low < 0 or high >= MAX_CATEGORIES:
        return 0
    # Values that count from 1 are listed; with any other start, numbers that do not occur may still be categories.
    return list(range(1, high + 1)) if low == 1 else high + 1


def check_columns_path(path: Path) -> None:
    """Refuse to replace the file of columns that a user has written for a table that does not exist yet."""
    beside = columns_path(path)
    if table_suffix(path) in CSV and beside.exists() and not beside.read_bytes().startswith(_WRITTEN.encode()):
        raise ValueError(
            f"{beside} exists already, and writing {path} would replace it; choose another path, or replace both with "
            "--overwrite true"
        )


def save_table(dataset: Dataset, path: str | Path, *, overwrite: bool = True) -> None:
    """Write one row per step and one per final state; columns go to a YAML file (CSV) or into the file (Parquet)."""
    path = Path(path)
    if not overwrite:
        check_columns_path(path)
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
    categories = listed_categories(columns)
    suffix = table_suffix(path)
    with replacing(path, overwrite=overwrite) as temporary:
        if suffix in CSV:
            write_csv(
                arrays,
                temporary,
                separator="\t" if suffix.startswith(".tsv") else ",",
                compressed=path.suffix == ".gz",
                categories=categories,
            )
            # Before the table appears: a table without its columns could not be read.
            write_atomically(columns_path(path), (_WRITTEN + columns.to_yaml()).encode())
        else:
            stored = {**json.loads(description(dataset)), "columns": asdict(columns)}
            write_parquet(arrays, temporary, stored, categories=categories)


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
    categories: Categories = {
        name: list(each.labels) or each.categories
        for name, each in zip(names, dimensions, strict=True)
        if each.categories
    }
    return Columns(
        episode="episode",
        order="step",
        observations=tuple(observations),
        actions=tuple(actions),
        reward="reward" if dataset.has_rewards else None,
        terminal="terminal",
        goals=() if goal is None else tuple(f"goal_{index}" for index in range(len(goal))),
        categories=categories,
        env=env if isinstance(env, str) else None,
    )
