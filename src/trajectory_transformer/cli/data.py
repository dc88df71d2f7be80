"""`tt data`: inspect a dataset before training, convert it to another format, or hold episodes out."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data import sources
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.data.sources import Columns, is_minari_id, save_dataset
from trajectory_transformer.data.sources.columns import ColumnNames, Missing, read_columns
from trajectory_transformer.data.sources.minari import is_local
from trajectory_transformer.data.sources.tables import check_columns_path
from trajectory_transformer.results import counted

if TYPE_CHECKING:
    from trajectory_transformer.report.dataset import DimensionSummary

SOURCES = (
    "A file (.npz, .hdf5, .parquet, .csv), the folder of a LeRobot dataset, a Minari id, or a benchmark task such as "
    "hopper-medium."
)


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Flags of every command that reads a dataset: how rows become episodes."""

    mapping: Path | None = None
    """YAML file that says which column of a table holds what; null: the one beside the table."""
    missing: Missing = "refuse"
    """What to do with missing values in a table: refuse the file, drop_episode leaves out the episode, forward_fill
    repeats the last known value."""
    max_episode_steps: int | None = None
    """Episodes end after this many steps at the latest: a time limit that the file does not mark."""
    columns: ColumnNames = field(default_factory=ColumnNames)

    @property
    def reading(self) -> Columns | None:
        """How to read the dataset: the mapping file, overridden by flags; None if neither is given."""
        given = Columns(**vars(self.columns), missing=self.missing, max_episode_steps=self.max_episode_steps)
        if self.mapping is not None:
            return given.over(read_columns(self.mapping))
        return None if given == Columns() else given


def load_dataset(name: str | None, columns: Columns | None = None) -> Dataset:
    """Load a dataset by the name that the user gave."""
    if name is None:
        raise ValueError("name the dataset to read, for example: data/collected.npz")
    return sources.load_dataset(name, columns)


@dataclass(frozen=True, kw_only=True)
class Show(DataFlags):
    """Describe a dataset: episodes, returns, every dimension, and its tokens."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ("dataset",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt data show hopper_medium-v2.hdf5 --plot hopper.png",
        "tt data show log.csv --columns.episode run --columns.observations '[speed]' --columns.actions '[torque]'",
    )

    dataset: str | None = None
    """Dataset to read."""
    plot: Path | None = None
    """Also write histograms of returns, lengths and dimensions to this picture; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    tokens: TokenConfig = field(default_factory=TokenConfig)

    def execute(self) -> None:
        """Print."""
        from trajectory_transformer.report.dataset import dataset_figure, discount_advice, summarize_dimensions
        from trajectory_transformer.report.plots import save_figure
        from trajectory_transformer.tokens.checks import dataset_warnings
        from trajectory_transformer.tokens.tokenizer import Tokenizer

        claim(self.plot, overwrite=self.overwrite)
        dataset = load_dataset(self.dataset, self.reading)
        lengths = np.array([len(episode) for episode in dataset])
        ended = np.mean([episode.terminated for episode in dataset])
        console.print(f"{self.dataset}: {counted(len(dataset), 'episode')}, {dataset.num_steps} steps")
        console.print(f"  steps per episode: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}")
        console.print(f"  terminated: {100 * ended:.1f} %, truncated: {100 * (1 - ended):.1f} %")
        if dataset.has_rewards:
            console.print(_returns(dataset))
            advice = discount_advice(dataset, self.tokens)
            if advice is not None:
                console.print(f"  {advice}")
        else:
            console.print("  no rewards were recorded: train with --tokens.rewards false")
        if dataset.map_shape:
            maps = [episode.map for episode in dataset if episode.map is not None]
            distinct = len({map.tobytes() for map in maps})
            console.print(f"  map of each episode: {maps[0].dtype} {dataset.map_shape}, {distinct} different")
        console.print("  all values are finite")
        for key, value in dataset.metadata.items():
            console.print(f"  {key}: {value}", markup=False)
        tokens = replace(self.tokens, rewards=self.tokens.rewards and dataset.has_rewards)
        for sentence in dataset_warnings(dataset, Tokenizer.fit(dataset, tokens)):
            console.print(f"  note: {sentence}", markup=False)
        rows = tuple(summarize_dimensions(dataset, tokens))
        console.print(_table(rows, tokens))
        for dimension in (*dataset.observation_dimensions, *dataset.action_dimensions):
            if dimension.labels:
                labels = ", ".join(map(str, dimension.labels))
                console.print(f"  {dimension.name}: {dimension.categories} categories: {labels}", markup=False)
        if any(each.clipped for each in rows):
            console.print(
                "  many actions are at their limits: if noise was clipped there, limits are more likely than intended. "
                "Plan for return with search.action.middle, which is the default; imitate with --search.imitate median"
            )
        if self.plot is not None:
            save_figure(dataset_figure(dataset), self.plot, dpi=120)
            console.print(f"wrote {self.plot}")


def _returns(dataset: Dataset) -> str:
    """Distribution of returns in one line, with the normalised score if the environment has one."""
    returns = np.array([episode.total_reward for episode in dataset])
    quarters = ", ".join(f"{value:.4g}" for value in np.quantile(returns, [0.25, 0.5, 0.75]))
    text = f"  return: {returns.min():.4g} to {returns.max():.4g}, mean {returns.mean():.4g}, quartiles {quarters}"
    references = references_of(str(dataset.metadata.get("env", "")), dataset.metadata)
    if references is not None:
        text += f", normalised mean {normalized_score(float(returns.mean()), references):.1f}"
    return text


def _table(rows: "Iterable[DimensionSummary]", tokens: TokenConfig) -> Table:
    """One row per dimension."""
    title = f"as {tokens.discretizer} tokens of {tokens.num_bins} bins"
    title += "; bins: number of bins used, top: share of the most common bin"
    columns = ("dimension", "min", "mean", "max", "distinct", "bins", "top", "")
    table = Table(*columns, caption=title, box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[:-1]:  # notes may wrap, numbers may not
        column.no_wrap = True
    for each in rows:
        numbers = [f"{value:.3g}" for value in (each.low, each.mean, each.high)]
        table.add_row(each.name, *numbers, str(each.distinct), str(each.bins), f"{each.top_share:.1%}", each.note)
    return table


@dataclass(frozen=True, kw_only=True)
class Convert(DataFlags):
    """Convert a dataset to another format: Minari, .npz, .hdf5, .parquet or .csv."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ("dataset", "out")
    examples: ClassVar[tuple[str, ...]] = (
        "tt data convert log.csv --out log.npz",
        "tt data convert log.csv --mapping columns.yaml --missing drop_episode --out mine/machine-v0",
    )

    dataset: str | None = None
    """Dataset to read."""
    out: str | None = None
    """Dataset to write: a file (.npz, .hdf5, .parquet, .csv) or a Minari id such as hopper/mine-v0; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""

    def execute(self) -> None:
        """Read and write."""
        if self.out is None:
            raise ValueError("name the dataset to write with --out: a file such as data/x.parquet, or a Minari id")
        claim_dataset(self.out, overwrite=self.overwrite)
        dataset = load_dataset(self.dataset, self.reading)
        save_dataset(dataset, self.out, overwrite=self.overwrite)
        console.print(f"wrote {self.out}: {counted(len(dataset), 'episode')}, {dataset.num_steps} steps")


def claim_dataset(out: str, *paths: Path | None, overwrite: bool = False) -> None:
    """Refuse to overwrite a dataset, before any work starts; `paths` are other files to write."""
    if not is_minari_id(out) or Path(out).suffix:
        claim(Path(out), *paths, overwrite=overwrite)
        if not overwrite:
            check_columns_path(Path(out))
        return
    claim(*paths, overwrite=overwrite)
    if is_local(out) and not overwrite:
        raise ValueError(
            f"the Minari dataset {out} exists already; choose another id, or replace it with --overwrite true"
        )


@dataclass(frozen=True, kw_only=True)
class Split(DataFlags):
    """Split a dataset into episodes to train on and held-out ones, by a seed."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ("dataset",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt data split data/hopper.npz --out data/split",
        "tt data split data/hopper.npz --hidden 0.5 --out data/masked",
    )

    dataset: str | None = None
    """Dataset to read."""
    out: Path = Path("data/split")
    """Folder to write train.npz and held_out.npz to; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    held_out: float = 0.1
    """Share of the episodes that is held out."""
    seed: int = 0
    """Seed of the split and of the mask."""
    hidden: float = 0.0
    """Also write train_masked.npz, in which each entry of every state is hidden with this probability."""
    num_bins: int = 100
    """Uniform bins of observed values; train on train_masked.npz with one more, the mask token."""

    def execute(self) -> None:
        """Split and write."""
        from trajectory_transformer.analysis.masking import masked_dataset
        from trajectory_transformer.data.split import split_episodes

        claim(self.out, overwrite=self.overwrite)
        dataset = load_dataset(self.dataset, self.reading)
        train, held_out = split_episodes(dataset, self.held_out, self.seed)
        parts = {"train": train, "held_out": held_out}
        if self.hidden:
            parts["train_masked"] = masked_dataset(train, self.hidden, self.seed, self.num_bins)
        for name, part in parts.items():
            save_npz(part, self.out / f"{name}.npz")
            console.print(f"wrote {self.out / name}.npz: {counted(len(part), 'episode')}, {part.num_steps} steps")
