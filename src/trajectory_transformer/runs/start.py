"""Start a run in a new folder, or resume the run in a folder."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from trajectory_transformer.config import TrainConfig, require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.data.split import held_out_episodes, split_episodes
from trajectory_transformer.files import naming, replacing
from trajectory_transformer.gpu.backends import make_batch_maker, make_engine
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.runs.initial import check_same_dimensions
from trajectory_transformer.runs.memory import check_memory
from trajectory_transformer.runs.run import RESUME, Run, check_resumable
from trajectory_transformer.runs.settings import RunSettings
from trajectory_transformer.runs.sources import data_to_resume, identity, open_or_build_shards
from trajectory_transformer.tokens.checks import dataset_warnings
from trajectory_transformer.tokens.shards import open_shards
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

logger = logging.getLogger(__name__)


def start_run(
    settings: RunSettings,
    folder: Path | None,
    device: torch.device,
    *,
    world: World | None = None,
    dataset: Dataset | None = None,
    check_shards: bool = True,
) -> Run:
    """Start a run at step 0. Its folder appears with a complete checkpoint, or not at all.

    `dataset` holds the episodes where they are in memory, else they are read from `settings.dataset`.
    """
    require(settings.seed >= 0, "the seed must not be negative", settings.seed)
    every, episodes = settings.evaluate_every, settings.evaluate_episodes
    require(settings.checkpoint_every >= 1, "checkpoint_every must be at least 1", settings.checkpoint_every)
    require(every is None or every >= 1, "evaluate_every must be at least 1", every)
    require(episodes >= 1, "evaluate_episodes must be at least 1", episodes)
    world = world or World()
    if folder is not None and folder.exists() and world.leads:
        raise ValueError(f"{folder} exists already; choose another folder, or remove it")
    initial = None if settings.init is None else TrajectoryModel.load(settings.init)
    trainer = _make_trainer(settings, device, world, dataset, initial=initial, is_new=True, check_shards=check_shards)
    if folder is not None and world.leads:
        settings = _described(settings, trainer, dataset)
        with replacing(folder) as temporary:
            temporary.mkdir(parents=True)
            settings.write(temporary)
            Run(settings, temporary, trainer).save()
    return Run(settings, folder, trainer)


def resume_run(
    folder: Path,
    dataset: Dataset | str | Path | None = None,
    *,
    device: torch.device,
    world: World | None = None,
    train: TrainConfig | None = None,
    check_shards: bool = True,
) -> Run:
    """Resume the run in a folder with the settings it was started with.

    `dataset` names the same data in another place. Data that is not the same is refused. `train` with another number of
    steps or epochs extends the run: the rest follows the schedule of a run of that length.
    """
    check_resumable(folder)
    stored = settings = RunSettings.read(folder)
    if train is not None:
        settings = replace(settings, train=train)
    if settings.shards is None:
        given = data_to_resume(folder, settings, dataset, command="tt train")
        if not isinstance(given, Dataset):
            settings = replace(settings, dataset=given)
    episodes = dataset if isinstance(dataset, Dataset) else None
    # The bins of another run are not those of the data; they are in the checkpoint.
    initial = None if settings.init is None else TrajectoryModel.load(folder)
    with naming(folder, "cannot be resumed"):
        trainer = _make_trainer(
            settings,
            device,
            world or World(),
            episodes,
            initial=initial,
            source=settings.source,
            check_shards=check_shards,
        )
    trainer.load(folder / RESUME)
    if train is not None:
        require(
            trainer.total_steps > trainer.step,
            f"{folder} has taken {trainer.step} steps: to extend it, the number of steps must be larger",
            trainer.total_steps,
        )
        length = f"--train.epochs {train.epochs:g}" if train.epochs is not None else f"--train.steps {train.steps}"
        settings = replace(settings, command=f"{settings.command}, then tt train --resume {folder} {length}")
        if trainer.validation is not None:
            trainer.validation.since_best = 0  # a run that stopped early goes on
        if trainer.world.leads:
            replace(stored, train=train, command=settings.command).write(folder)
            trainer.save(folder / RESUME)
    run = Run(settings, folder, trainer)
    run.save_models()  # a kill may have come between the files of the last save
    return run


def _make_trainer(
    settings: RunSettings,
    device: torch.device,
    world: World,
    dataset: Dataset | None,
    *,
    initial: TrajectoryModel | None,
    source: str | None = None,
    is_new: bool = False,
    check_shards: bool = True,
) -> Trainer:
    """Model, data and engine at step 0; a new run is checked for settings that do not suit the data or the machine.

    A run that starts from another one has its `initial` model.
    """
    share, held_out = settings.train.validation, None
    if settings.shards is None:
        if dataset is None:
            if settings.dataset is None:
                raise ValueError("name the dataset to train on, for example: data/collected.npz")
            dataset = load_dataset(settings.dataset, settings.columns)
        # The bins are fitted on what is trained on.
        fitted = split_episodes(dataset, share, settings.seed)[0] if share else dataset
        if initial is None:
            model = TrajectoryModel.create(fitted, settings.tokens, settings.model, seed=settings.seed)
        else:
            check_same_dimensions(initial, dataset)
            model = replace(initial, metadata=dict(dataset.metadata))
        for sentence in dataset_warnings(dataset, model.tokenizer) if is_new and world.leads else ():
            logger.warning("%s", sentence)
        data = tokenize(dataset, model.tokenizer).to(device)
    else:
        require(initial is None, "a run that starts from another one (init) cannot use shards", settings.shards)
        given = dataset if dataset is not None else settings.dataset
        shards = open_or_build_shards(
            Path(settings.shards), given, settings.tokens, source, settings.columns, check=check_shards
        )
        model = TrajectoryModel.build(shards.tokenizer, settings.model, shards.metadata, seed=settings.seed)
        data = shards.data  # stays memory-mapped on the host; batches are sent to the device
    if share:
        chosen = held_out_episodes(len(data.num_rows), share, settings.seed)
        others = sorted(set(range(len(data.num_rows))) - set(chosen))
        data, held_out = data.subset(others), data.subset(chosen)
    if is_new:
        longest, window = int(data.num_rows.max()), settings.model.window
        require(
            window <= longest,
            f"model.window must be at most {longest}, the states of the longest episode: set --model.window {longest}",
            window,
        )
        check_memory(model.gpt, settings.train, device)
    model.gpt.to(device)
    return Trainer(
        model,
        data,
        settings.train,
        seed=settings.seed,
        engine=make_engine(model, settings.train, world),
        make_batch=make_batch_maker(model, data, settings.train),
        world=world,
        held_out=held_out,
    )


def _described(settings: RunSettings, trainer: Trainer, dataset: Dataset | None) -> RunSettings:
    """Settings for `run.json`: absolute paths, what identifies the data, and the number of steps if none was given."""
    name, source, shards = settings.dataset, None, None
    init = None if settings.init is None else str(Path(settings.init).resolve())
    if name is not None:
        name = str(Path(name).resolve()) if Path(name).exists() else name
    if settings.shards is not None:
        shards = str(Path(settings.shards).resolve())
        source = open_shards(shards, check=False).source
    elif settings.dataset is not None:
        source = identity(settings.dataset, settings.columns)
    elif dataset is not None:
        source = identity(dataset)
    tokens, train = trainer.model.tokenizer.config, settings.train
    if train.steps is None and train.epochs is None:
        train = replace(train, steps=trainer.total_steps)
    return replace(settings, dataset=name, shards=shards, source=source, init=init, tokens=tokens, train=train)
