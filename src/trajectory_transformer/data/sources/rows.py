"""Build episodes from recorded rows: where they end, missing values, and final states that were not recorded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import (
    Dataset,
    Dimension,
    DoubleArray,
    Episode,
    Metadata,
    dimension_fields,
)
from trajectory_transformer.data.sources.columns import Columns

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The recorded rows of all episodes, one episode after the other.

    A row is a state, the action taken in it and the reward of that action. NaN marks a missing value.
    """

    observations: DoubleArray  # [N, O]
    actions: DoubleArray  # [N, A]
    last: BoolArray  # [N], the last row of each episode
    terminated: BoolArray  # [N], true in any row of an episode that the task ended
    rewards: DoubleArray | None = None  # [N]
    goals: DoubleArray | None = None  # [N, G]
    next_observations: DoubleArray | None = None  # [N, O], only the one of each last row is used
    final_rows: bool = False  # whether a last row without any action holds the final state of its episode
    numbers: IntArray | None = None  # [N], row numbers in the file, from 1; None: in order
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what errors call the columns of each array

    def number(self, row: int) -> int:
        """The number of a row in the file, from 1."""
        return row + 1 if self.numbers is None else int(self.numbers[row])

    def name(self, kind: str, column: int = 0) -> str:
        """What errors call a column."""
        return self.names[kind][column] if kind in self.names else kind


def build_dataset(
    path: Path,
    rows: Rows,
    columns: Columns,
    *,
    found_by: str,
    metadata: Metadata,
    observation_dimensions: tuple[Dimension, ...] = (),
    action_dimensions: tuple[Dimension, ...] = (),
    outcomes: Sequence[Mapping[str, float]] = (),
) -> Dataset:
    """Build the dataset of a file.

    `found_by` says how episodes were told apart. It becomes part of the metadata, with counts of all repairs.
    """
    if columns.max_episode_steps is not None:
        rows = replace(rows, last=_limit(rows.last, columns.max_episode_steps))
        found_by += f", at most {columns.max_episode_steps} steps each"
    builder = EpisodeBuilder(path)
    repairs = {"values_filled": 0, "episodes_with_missing_values_dropped": 0}
    start = 0
    for end in np.flatnonzero(rows.last).tolist():
        span = slice(start, end + 1)
        start = end + 1
        parts = _parts(rows, span)
        has_final = rows.final_rows and bool(np.isnan(parts["actions"][-1]).all())
        steps = len(parts["actions"]) - has_final
        missing = _missing(path, rows, span, parts, steps, columns.missing)
        if missing and columns.missing == "drop_episode":
            repairs["episodes_with_missing_values_dropped"] += 1
            continue
        if missing:
            _fill(path, rows, span, parts, steps)
            repairs["values_filled"] += missing
        final = parts["observations"][-1] if has_final else None
        if rows.next_observations is not None:
            final = rows.next_observations[end]
        index = len(builder.episodes)
        builder.add(
            parts["observations"][:steps],
            parts["actions"][:steps],
            parts["rewards"][:steps] if "rewards" in parts else None,
            terminated=bool(rows.terminated[span].any()),
            final=final,
            goal=parts["goals"][0] if "goals" in parts else None,
            outcome=outcomes[index] if index < len(outcomes) else None,
            place=f" (rows {rows.number(span.start)} to {rows.number(end)})",
        )
    counted = {name: count for name, count in repairs.items() if count}
    facts = {**metadata, "episodes_found_by": found_by, **counted}
    return builder.dataset(facts, observation_dimensions, action_dimensions)


def _limit(last: BoolArray, max_steps: int) -> BoolArray:
    """End episodes after `max_steps` rows at the latest: last [N] -> [N]."""
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    length = np.arange(len(last)) - np.repeat(starts, ends - starts + 1) + 1
    return np.asarray(last | (length % max_steps == 0))


def _parts(rows: Rows, span: slice) -> dict[str, DoubleArray]:
    """The arrays of one episode that may have missing values; copies, because missing values are filled in."""
    arrays = {"observations": rows.observations, "actions": rows.actions, "rewards": rows.rewards, "goals": rows.goals}
    return {kind: array[span].copy() for kind, array in arrays.items() if array is not None}


def _needed(kind: str, steps: int, count: int) -> int:
    """How many rows of an episode need a value: the final state has no action and no reward."""
    return steps if kind in ("actions", "rewards") else count


def _missing(path: Path, rows: Rows, span: slice, parts: Mapping[str, DoubleArray], steps: int, policy: str) -> int:
    """The number of missing values of an episode; raises if they are not allowed, and for infinite values always."""
    count = 0
    for kind, array in parts.items():
        values = array[: _needed(kind, steps, len(array))]
        bad = ~np.isfinite(values) if policy == "refuse" else np.isinf(values)
        if bad.any():
            row, *column = np.argwhere(bad)[0].tolist()
            hint = "; leave such episodes out with --missing drop_episode, or repeat the last value with forward_fill"
            raise ValueError(
                f"{path}, row {rows.number(span.start + row)}: {rows.name(kind, *column)} must be a finite number; "
                f"{_bad_rows(rows, kind, *column)} of {len(rows.last)} rows are NaN or infinite"
                f"{hint if np.isnan(values[row, *column]) else ''}"
            )
        count += int(np.isnan(values).sum())
    return count


def _bad_rows(rows: Rows, kind: str, column: int = 0) -> int:
    """The number of rows without a finite value in a column; final states do not need an action or a reward."""
    values = getattr(rows, kind).reshape(len(rows.last), -1)[:, column]
    is_final = rows.last & np.isnan(rows.actions).all(axis=1) & rows.final_rows
    return int((~np.isfinite(values) & ~(is_final & (kind in ("actions", "rewards")))).sum())


def _fill(path: Path, rows: Rows, span: slice, parts: Mapping[str, DoubleArray], steps: int) -> None:
    """Repeat the last known value of each column, in place."""
    for kind, array in parts.items():
        values = array[: _needed(kind, steps, len(array))].reshape(-1, array.shape[1] if array.ndim == 2 else 1)
        known = np.where(np.isnan(values), 0, np.arange(len(values))[:, None])
        values[:] = np.take_along_axis(values, np.maximum.accumulate(known, axis=0), axis=0)
        if np.isnan(values).any():
            row, column = np.argwhere(np.isnan(values))[0].tolist()
            raise ValueError(
                f"{path}, row {rows.number(span.start + row)}: {rows.name(kind, column)} is missing and has no earlier "
                "value in its episode to repeat; use --missing drop_episode"
            )


@dataclass
class EpisodeBuilder:
    """Collects the episodes of a file and counts the repairs.

    An episode needs the state after its last action. If that was not recorded, a truncated episode loses its last
    action, and its last observation becomes the final state. A terminated episode keeps its last action, whose reward
    and termination matter, and repeats the last observation. Episodes without actions are dropped.
    """

    path: Path
    episodes: list[Episode] = field(default_factory=list)
    final_states_repeated: int = 0
    last_actions_dropped: int = 0
    episodes_without_actions_dropped: int = 0

    def add(
        self,
        observations: DoubleArray,
        actions: DoubleArray,
        rewards: DoubleArray | None,
        *,
        terminated: bool,
        final: DoubleArray | None,
        goal: DoubleArray | None = None,
        outcome: Mapping[str, float] | None = None,
        place: str = "",
    ) -> None:
        """Add an episode: observations [T, O], actions [T, A], rewards [T], and the final state [O] if known."""
        if final is None and terminated:
            final = observations[-1]
            self.final_states_repeated += 1
        elif final is None:
            final, observations, actions = observations[-1], observations[:-1], actions[:-1]
            rewards = None if rewards is None else rewards[:-1]
            self.last_actions_dropped += 1
        if not len(actions):
            self.episodes_without_actions_dropped += 1
            return
        try:
            self.episodes.append(
                Episode(
                    observations=_float32(np.concatenate([observations, final[None]])),
                    actions=_float32(actions),
                    rewards=None if rewards is None else _float32(rewards),
                    terminated=terminated,
                    goal=None if goal is None else _float32(goal),
                    outcome=outcome or {},
                )
            )
        except ValueError as error:
            raise ValueError(f"{self.path}, episode {len(self.episodes)}{place}: {error}") from error

    def dataset(
        self,
        metadata: Metadata,
        observation_dimensions: tuple[Dimension, ...] = (),
        action_dimensions: tuple[Dimension, ...] = (),
    ) -> Dataset:
        """Build the dataset; the metadata records the repairs."""
        names = ("final_states_repeated", "last_actions_dropped", "episodes_without_actions_dropped")
        repairs = {name: count for name in names if (count := getattr(self, name))}
        episodes, facts = tuple(self.episodes), {**metadata, **repairs}
        try:
            return Dataset(episodes, facts, observation_dimensions, action_dimensions)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


def _float32(values: DoubleArray) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # values outside the range of float32 become infinite, and Episode refuses them
        return values.astype(np.float32)


def check_numbers(path: Path, name: str, values: npt.NDArray[Any], *, ndim: int) -> DoubleArray:
    """An array of a file as numbers; raises if it has another type or another number of axes.

    An array with more than two axes holds images, which cannot become tokens: one image would be thousands of them.
    """
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {name} must hold numbers, got {values.dtype}")
    if ndim == 1 and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim > 2:
        raise ValueError(
            f"{path}: {name} must have {ndim} axes, got shape {values.shape}; images are not supported, because every "
            "number becomes a token: encode them as vectors of a few dozen numbers first, or store one picture per "
            "episode as its map"
        )
    if values.ndim != ndim:
        raise ValueError(f"{path}: {name} must have {ndim} axes, got shape {values.shape}")
    return values.astype(np.float64)


def description(dataset: Dataset) -> str:
    """JSON with everything that the arrays of a file cannot store: metadata, dimensions, outcomes."""
    return json.dumps(
        {
            "metadata": dict(dataset.metadata),
            **dimension_fields(dataset.observation_dimensions, dataset.action_dimensions),
            "rewards": dataset.has_rewards,
            "outcomes": [dict(episode.outcome) for episode in dataset],
        }
    )
