"""The data of a run: what identifies a dataset, and its tokens as memory-mapped shards."""

import hashlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from trajectory_transformer.config import PRESETS, TokenConfig
from trajectory_transformer.data.episode import Dataset, dimension_fields
from trajectory_transformer.data.sources import Columns, load_dataset
from trajectory_transformer.data.sources.columns import columns_path
from trajectory_transformer.data.sources.lerobot import is_lerobot
from trajectory_transformer.files import file_sha256
from trajectory_transformer.tokens.checks import dataset_warnings
from trajectory_transformer.tokens.shards import Shards, build_shards, open_shards
from trajectory_transformer.tokens.tokenizer import Tokenizer, layout_of

log = logging.getLogger(__name__)


def identity(dataset: Dataset | str, columns: Columns | None = None) -> str:
    """What identifies a dataset: a digest of its file, folder or episodes; the name of anything else.

    How the rows of a table become episodes is a part of it: `columns`, and the YAML file beside the table.
    """
    if isinstance(dataset, Dataset):
        digest = hashlib.sha256()
        for episode in dataset:
            digest.update(f"{len(episode)} {episode.terminated}".encode())
            for part in (episode.observations, episode.actions, episode.rewards, episode.map):
                digest.update(b"none" if part is None else part.tobytes())
        return f"episodes:{digest.hexdigest()}"
    path = Path(dataset)
    known = columns_path(path)
    reading = [known.read_text()] if known.is_file() else []
    reading += [] if columns is None else [columns.to_yaml()]
    found = _content(path) or f"name:{dataset}"
    return "sha256:" + hashlib.sha256("\n".join([found, *reading]).encode()).hexdigest() if reading else found


class NamesData(Protocol):
    """Settings of a run that say where its data is and what identifies it."""

    @property
    def dataset(self) -> str | None:
        """A name that `load_dataset` reads; None for episodes in memory."""

    @property
    def columns(self) -> Columns | None:
        """How it is read."""

    @property
    def source(self) -> str | None:
        """Its identity."""


def data_to_resume(
    folder: Path, settings: NamesData, given: Dataset | str | Path | None, *, command: str
) -> Dataset | str:
    """The data to resume a run with, `given` or where it was; refuses data that is missing, or not the same.

    `command` is the command that started the run: errors say how to resume with it.
    """
    given = settings.dataset if given is None else given
    if given is None:
        raise ValueError(f"{folder} was trained on episodes in memory: pass them again to resume")
    if isinstance(given, Path):
        given = str(given)
    again = f"{command} DATASET --resume {folder}"
    exists = isinstance(given, Dataset) or Path(given).exists()
    if not isinstance(given, Dataset) and Path(given).is_absolute() and not exists:
        raise ValueError(
            f"{folder} was started on {given}, which no longer exists; if the data was moved, name its new place: "
            f"{again}"
        )
    source, found = settings.source, identity(given, settings.columns)
    if source is not None and exists and found != source:
        changed = "" if isinstance(given, Dataset) else f", has {given} changed?"
        raise ValueError(
            f"{folder} was started on a different dataset (expected {source}, got {found}); resuming needs the same "
            f"data{changed} Name another place with: {again}"
        )
    return given


def _content(path: Path) -> str | None:
    """A digest of a file or folder; None if there is none."""
    if path.is_file():
        return _digest(path)
    if path.is_dir():
        parts = [path / "meta", path / "data"] if is_lerobot(path) else [path]  # without its videos
        files = sorted(file for part in parts for file in part.rglob("*") if file.is_file())
        digests = [f"{file.relative_to(path)} {_digest(file)}\n" for file in files]
        return "sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest()
    return None


def _digest(path: Path) -> str:
    return f"sha256:{file_sha256(path)}"


def open_or_build_shards(
    folder: Path,
    dataset: Dataset | str | None,
    tokens: TokenConfig,
    source: str | None = None,
    columns: Columns | None = None,
    *,
    check: bool = True,
) -> Shards:
    """The tokens of a dataset in a folder: written now if the folder does not exist, refused if they differ.

    Without a dataset the folder is taken as it is, and settings at their defaults mean those of the folder. A run that
    resumes passes the `source` it was started with; its dataset may no longer exist.
    """
    if folder.exists() and any(folder.iterdir()):
        shards = open_shards(folder, check=check)
        resumes = source is not None
        source = source or (shards.source if dataset is None else identity(dataset, columns))
        if shards.source != source:
            raise ValueError(
                f"{folder} holds tokens of a different dataset (expected {source}, got {shards.source}); "
                "choose another folder with --shards or remove it"
            )
        if resumes or dataset is not None or tokens not in (TokenConfig(), PRESETS["default"].tokens):
            _check_settings(folder, shards.tokenizer.config, tokens)
        return shards
    if dataset is None:
        raise ValueError(f"{folder}: no token shards there; name the dataset to make them from")
    episodes = dataset if isinstance(dataset, Dataset) else load_dataset(dataset, columns)
    layout_of(episodes, tokens)  # refuses settings that do not suit the data
    tokenizer = Tokenizer.fit(episodes, tokens)
    for sentence in dataset_warnings(episodes, tokenizer):
        log.warning("%s", sentence)
    build_shards(
        folder,
        lambda: episodes,
        tokenizer.config,
        metadata=episodes.metadata,
        source=identity(dataset, columns),
        discretizer=tokenizer.discretizer,
        dimensions=dimension_fields(episodes.observation_dimensions, episodes.action_dimensions),
    )
    return open_shards(folder, check=False)


def _check_settings(folder: Path, stored: TokenConfig, requested: TokenConfig) -> None:
    """Refuse tokens that were made with other settings."""
    for name, value in asdict(requested).items():
        if value not in ("auto", asdict(stored)[name]):  # the same data gives the same number for auto
            raise ValueError(
                f"{folder} holds tokens made with tokens.{name} {asdict(stored)[name]}, not {value}; "
                "choose another folder with --shards or remove it"
            )
