"""`tt data`: look at a dataset before training on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.table import Table

from trajectory_transformer.cli.console import console
from trajectory_transformer.data.episode import Dataset, load_npz


def load_dataset(path: str | None) -> Dataset:
    """A dataset by path."""
    if path is None:
        raise ValueError("name the dataset file to read, for example: data/collected.npz")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such dataset file; `tt collect` makes one")
    return load_npz(Path(path))


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print what a dataset holds: episodes, steps, ranges, returns."""

    positional: ClassVar[dict[str, str]] = {"dataset": "The .npz dataset to show."}

    dataset: str | None = None
    """The .npz dataset to show."""

    def execute(self) -> None:
        """Print."""
        dataset = load_dataset(self.dataset)
        lengths = np.array([len(episode) for episode in dataset])
        ended = np.mean([episode.terminated for episode in dataset])
        console.print(f"{self.dataset}: {len(dataset)} episodes, {dataset.num_steps} steps")
        console.print(f"  steps an episode: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}")
        console.print(f"  ended by the task: {100 * ended:.1f} %, by the recording: {100 * (1 - ended):.1f} %")
        if dataset.has_rewards:
            returns = np.array([episode.total_reward for episode in dataset])
            console.print(f"  return: {returns.min():.4g} to {returns.max():.4g}, mean {returns.mean():.4g}")
        else:
            console.print("  no rewards were recorded: train with --tokens.rewards false")
        for key, value in dataset.metadata.items():
            console.print(f"  {key}: {value}")
        console.print(_ranges(dataset))


def _ranges(dataset: Dataset) -> Table:
    """One row a dimension: extremes, mean, and what would surprise a discretiser."""
    table = Table("dimension", "min", "mean", "max", "distinct", "")
    columns = {
        "observation": np.concatenate([episode.observations for episode in dataset]),
        "action": np.concatenate([episode.actions for episode in dataset]),
    }
    for kind, data in columns.items():
        for index, column in enumerate(data.T):
            distinct = len(np.unique(column))
            note = "constant" if distinct == 1 else ""
            table.add_row(
                f"{kind} {index}",
                f"{column.min():.4g}",
                f"{column.mean():.4g}",
                f"{column.max():.4g}",
                str(distinct),
                note,
            )
    return table
