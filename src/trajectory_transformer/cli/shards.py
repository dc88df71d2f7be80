"""Which data a run was made from, and the folder of its tokens for data larger than memory."""

import hashlib
from dataclasses import asdict
from pathlib import Path

from trajectory_transformer.cli.console import console
from trajectory_transformer.cli.data import load_dataset
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.tokens.shards import Shards, build_shards, open_shards
from trajectory_transformer.tokens.windows import fit_discretizer, layout_of


def identity(dataset: str) -> str:
    """What a dataset is, wherever it lies: a digest of its file or folder; the name of what is neither."""
    path = Path(dataset)
    if path.is_file():
        return _digest(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digests = [f"{file.relative_to(path)} {_digest(file)}\n" for file in files]
        return "sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest()
    return f"name:{dataset}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def open_or_build(folder: Path, dataset: str | None, tokens: TokenConfig, source: str | None = None) -> Shards:
    """The tokens of a dataset in a folder, made now if it is not there, refused if it holds others.

    Without a dataset the folder speaks for itself, and settings left at their defaults are its own. A run that goes on
    says by `source` what it was made from; its dataset may be gone.
    """
    if folder.exists() and any(folder.iterdir()):
        shards = open_shards(folder)
        goes_on = source is not None
        source = source or (shards.source if dataset is None else identity(dataset))
        if shards.source != source:
            raise ValueError(
                f"{folder} holds tokens of other data than {dataset or 'this run'}; "
                "choose another folder with --shards or remove it"
            )
        if goes_on or dataset is not None or tokens != TokenConfig():
            _check(folder, shards.tokens, tokens)
        return shards
    if dataset is None:
        raise ValueError(f"{folder}: no token shards there; name the dataset to make them from")
    episodes = load_dataset(dataset)
    layout_of(episodes, tokens)  # refuses settings that the data cannot fill
    console.print(f"writing tokens of {episodes.num_steps:,} steps to {folder}")
    build_shards(
        folder,
        lambda: episodes,
        tokens,
        metadata=episodes.metadata,
        source=identity(dataset),
        discretizer=fit_discretizer(episodes, tokens),
    )
    return open_shards(folder)


def _check(folder: Path, stored: TokenConfig, asked: TokenConfig) -> None:
    """Refuse tokens that were made with other settings."""
    for name, value in asdict(asked).items():
        if value != asdict(stored)[name]:
            raise ValueError(
                f"{folder} holds tokens made with tokens.{name} {asdict(stored)[name]}, not {value}; "
                "choose another folder with --shards or remove it"
            )
