"""Run folders of baselines: start a run, stop it at any moment, resume it to the same weights."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trajectory_transformer.baselines.algorithm import Settings
from trajectory_transformer.baselines.data import Learner, fit_scaling
from trajectory_transformer.baselines.model import Baseline, least_numbers, sizes_of
from trajectory_transformer.baselines.presets import changed, find_preset, settings_dict
from trajectory_transformer.baselines.train import Backend, BaselineMetrics, BaselineTrainer
from trajectory_transformer.config import differences, require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.sources import Columns, load_dataset
from trajectory_transformer.data.sources.columns import parse_columns
from trajectory_transformer.files import lock_folder, naming, read_json, replacing, settings_from, write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.limits import check_memory
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import Dims
from trajectory_transformer.runs.metrics import JsonLines
from trajectory_transformer.runs.run import METRICS, RESUME, TRAINING, check_resumable, noted_interrupts
from trajectory_transformer.runs.settings import RUN
from trajectory_transformer.runs.sources import data_to_resume, identity

DEFAULT = "iql"


@dataclass(frozen=True, kw_only=True)
class BaselineRunSettings:
    """Everything that a run is a function of."""

    algorithm: str  # name of a preset
    settings: dict[str, object] = field(default_factory=dict)  # all settings of the algorithm
    dataset: str | None = None  # a name that `load_dataset` reads; None for episodes in memory
    columns: Columns | None = None  # how it is read
    source: str | None = None  # identifies the data
    seeds: tuple[int, ...] = (0,)
    checkpoint_every: int = 10_000
    backend: Backend = "auto"
    command: str = ""  # what started the run

    def __post_init__(self) -> None:
        """Refuse seeds that cannot be told apart."""
        require(len(self.seeds) > 0 and min(self.seeds) >= 0, "seeds must be numbers of at least 0", list(self.seeds))
        require(len(set(self.seeds)) == len(self.seeds), "seeds must differ", list(self.seeds))
        require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1", self.checkpoint_every)

    def write(self, folder: Path) -> None:
        """Store the settings in a run folder."""
        write_atomically(folder / RUN, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "BaselineRunSettings":
        """The settings of a run folder."""
        kinds = (KeyError, TypeError, AttributeError)
        with naming(folder / RUN, "not the description of a baseline's run", *kinds):
            stored = read_json(folder / RUN)
            if stored.get("columns") is not None:
                stored["columns"] = parse_columns(stored["columns"], str(folder / RUN), complete=False)
            settings = settings_from(cls, stored)
            changed(find_preset(settings.algorithm).settings, settings.settings)  # refuses what the algorithm would
            return settings


def train_baseline(
    dataset: Dataset | str | Path | None = None,
    *,
    algorithm: str = DEFAULT,
    settings: Mapping[str, object] | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    backend: Backend = "auto",
    checkpoint_every: int = 10_000,
    on_metrics: Callable[[BaselineMetrics], None] | None = None,
) -> Baseline:
    """Train a baseline on a dataset, with one or several seeds at once, and return it.

    Args:
        dataset: episodes, or the name of a dataset that `load_dataset` reads.
        algorithm: name of a preset: bc, td3bc, iql, cql, brac, mbop, dt, or one for some tasks, such as dt-hopper or
            iql-antmaze.
        settings: what to change in the preset, for example {"steps": 100_000}.
        seeds: training seeds; all of them are trained in the same steps.
        out: run folder to write: checkpoint, metrics and what is needed to resume. None keeps nothing.
        resume: continue the run in `out` if it exists, with the settings it was started with.
        device: auto, cpu or cuda.
        backend: eager, captured (a CUDA graph), compiled (torch.compile and a CUDA graph), or auto.
        checkpoint_every: steps between checkpoints.
        on_metrics: called with the metrics of the run as they come.

    Ctrl-C ends with a checkpoint in `out` and raises KeyboardInterrupt.
    """
    require(not resume or out is not None, "resume needs the run folder to resume, out", out)
    folder = None if out is None else Path(out)
    if resume and folder is not None and (folder / RUN).is_file():
        run = resume_baseline(folder, dataset, device=find_device(device))
        # Defaults cannot be told from values that were left out.
        given = {"algorithm": algorithm} if algorithm != DEFAULT else {}
        _check_same(folder, run.settings, given | ({"seeds": tuple(seeds)} if tuple(seeds) != (0,) else {}), settings)
    else:
        started = BaselineRunSettings(
            algorithm=algorithm,
            settings=dict(settings or {}),
            dataset=None if isinstance(dataset, Dataset | None) else str(dataset),
            seeds=tuple(seeds),
            checkpoint_every=checkpoint_every,
            backend=backend,
            command="python " + shlex.join(sys.argv),
        )
        episodes = dataset if isinstance(dataset, Dataset) else None
        run = start_baseline(started, folder, find_device(device), dataset=episodes)
    for metrics in run.advance():
        if metrics is not None and on_metrics is not None:
            on_metrics(metrics)
    if not run.finished:
        raise KeyboardInterrupt
    return run.baseline


def _check_same(
    folder: Path, run: BaselineRunSettings, given: Mapping[str, object], settings: Mapping[str, object] | None
) -> None:
    """Refuse to resume a run with other settings than its own."""
    stored = changed(find_preset(run.algorithm).settings, run.settings)
    own = {**{name: getattr(run, name) for name in given}, **settings_dict(stored)}
    requested = settings_dict(changed(stored, settings or {}))
    wanted = {**given, **{name: requested[name] for name in settings or {}}}
    for name, value in wanted.items():
        if value != own[name]:
            raise ValueError(
                f"{folder} was started with other settings ({differences(name, own[name], value)}); "
                f"leave out {name} to resume with its own"
            )


class BaselineRun:
    """A training run and the folder it writes; without a folder it keeps nothing."""

    def __init__(
        self, settings: BaselineRunSettings, folder: Path | None, trainer: BaselineTrainer[Any], baseline: Baseline
    ) -> None:
        """Bind a trainer to a folder that exists."""
        self.settings = settings
        self.folder = folder
        self.trainer = trainer
        self.baseline = baseline
        # Taken when the folder exists, released when training ends, or with the process.
        self._lock = lock_folder(folder) if folder is not None and folder.is_dir() else None
        self._writer = None if folder is None else JsonLines(folder / METRICS, trainer.step)

    @property
    def finished(self) -> bool:
        """Whether the last step was taken."""
        return self.trainer.step == self.trainer.total_steps

    def advance(self) -> Iterator[BaselineMetrics | None]:
        """Train to the end or to Ctrl-C. Either way the folder then holds the last step."""
        if self._lock is None and self.folder is not None:
            self._lock = lock_folder(self.folder)
        trainer, every = self.trainer, self.settings.checkpoint_every
        first, started = trainer.step, time.perf_counter()
        last: BaselineMetrics | None = None
        with noted_interrupts() as interrupts:
            for metrics in trainer.run(pause_every=every):
                if metrics is not None:
                    last = metrics
                    if self._writer is not None:
                        self._writer.write(metrics)
                stopping = bool(interrupts)
                if stopping or self.finished or trainer.step % every == 0:
                    self.save()
                yield metrics
                if stopping and not self.finished:
                    self._release()
                    return
        if self.finished and (last is not None or (self.folder is not None and not (self.folder / TRAINING).is_file())):
            self._write_result(time.perf_counter() - started, trainer.step - first, last)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def save(self) -> None:
        """Write the state to resume from, then the checkpoint to use."""
        if self.folder is not None:
            self.trainer.save(self.folder / RESUME)
            self.baseline.save(self.folder)

    def _write_result(self, seconds: float, steps: int, last: BaselineMetrics | None) -> None:
        """Write time and losses as a result file; those of a resumed run are of its last part.

        Without metrics, because the kill came after the last step, it has no losses.
        """
        if self.folder is None:
            return
        write_result(
            self.folder / TRAINING,
            name=f"baseline {self.settings.algorithm}",
            command=self.settings.command or f"tt baseline --resume {self.folder}",
            device=self.trainer.device,
            seeds=self.settings.seeds,
            seconds=seconds,
            metrics={
                "steps": steps,
                **{f"loss_{name}": sum(values) / len(values) for name, values in (last.losses if last else {}).items()},
                "steps_per_second": steps / seconds,
            },
        )


def start_baseline(
    settings: BaselineRunSettings, folder: Path | None, device: torch.device, *, dataset: Dataset | None = None
) -> BaselineRun:
    """Start a run at step 0. Its folder appears with a complete checkpoint, or not at all.

    `settings.settings` may hold only what differs from the preset. `dataset` holds the episodes where they are in
    memory, else they are read from `settings.dataset`.
    """
    if folder is not None and folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder with --out or remove it")
    whole = changed(find_preset(settings.algorithm).settings, settings.settings)
    settings = replace(settings, settings=settings_dict(whole))
    run = _make_run(settings, None, device, dataset)
    if folder is None:
        return run
    settings = _described(settings, dataset)
    with replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        settings.write(temporary)
        BaselineRun(settings, temporary, run.trainer, run.baseline).save()
    return BaselineRun(settings, folder, run.trainer, run.baseline)


def resume_baseline(folder: Path, dataset: Dataset | str | Path | None = None, *, device: torch.device) -> BaselineRun:
    """Resume the run in a folder with the settings it was started with.

    `dataset` names the same data in another place. Data that is not the same is refused.
    """
    check_resumable(folder)
    settings = BaselineRunSettings.read(folder)
    _check_settings(folder, settings)
    given = data_to_resume(folder, settings, dataset, command="tt baseline")
    if not isinstance(given, Dataset):
        settings = replace(settings, dataset=given)
    with naming(folder, "cannot be resumed"):
        run = _make_run(settings, folder, device, given if isinstance(given, Dataset) else None, resume=True)
    run.baseline.save(folder)  # a kill may have come between the two files of the last save
    return run


def _check_settings(folder: Path, settings: BaselineRunSettings) -> None:
    """Refuse settings other than those of the checkpoint, for example a number of steps that is missing."""
    with naming(folder / "checkpoint.json", "not the description of a baseline", KeyError, TypeError, AttributeError):
        stored = read_json(folder / "checkpoint.json")["algorithm"]["settings"]
        preset = find_preset(settings.algorithm).settings
        trained, wanted = (settings_dict(changed(preset, each)) for each in (stored, settings.settings))
    for name, value in wanted.items():
        if trained[name] != value:
            raise ValueError(
                f"{folder / RUN}: {name} is {value!r}, and {trained[name]!r} in checkpoint.json: one of the two was "
                "changed or is damaged"
            )


def _make_run(
    settings: BaselineRunSettings,
    folder: Path | None,
    device: torch.device,
    dataset: Dataset | None,
    *,
    resume: bool = False,
) -> BaselineRun:
    """Data, networks and trainer, at step 0 or where the folder's last checkpoint was written."""
    if dataset is None:
        if settings.dataset is None:
            raise ValueError("name the dataset to train on, for example: data/collected.npz")
        dataset = load_dataset(settings.dataset, settings.columns)
    chosen = changed(find_preset(settings.algorithm).settings, settings.settings)
    learners = [Learner(seed) for seed in settings.seeds]
    trainer, baselines = make_trainer(
        settings.algorithm, chosen, [dataset], learners, device=device, backend=settings.backend
    )
    if resume and folder is not None:
        trainer.load(folder / RESUME)
    return BaselineRun(settings, folder, trainer, baselines)


def make_trainer(
    name: str,
    settings: Settings,
    datasets: Sequence[Dataset],
    learners: Sequence[Learner],
    *,
    device: torch.device,
    backend: Backend = "auto",
) -> tuple[BaselineTrainer[Any], Baseline]:
    """A trainer at step 0 and what it trains: one learner per seed, or per seed and dataset of the same sizes."""
    kind = find_preset(name).algorithm
    for dataset in datasets:
        check_data(name, dataset, needs_rewards=kind.needs_rewards)
    dims = dims_of(datasets[0])
    if any(dims_of(dataset) != dims for dataset in datasets):
        raise ValueError(f"datasets trained on together must have the same sizes, got {list(map(dims_of, datasets))}")
    seeds = tuple(learner.seed for learner in learners)
    numbers = least_numbers(settings, dims, len(seeds))
    check_memory(4 * numbers, f"{name} with hidden layers of {', '.join(map(str, settings.hidden))}")
    algorithm = kind(settings, sizes_of(dims), seeds, device)
    scaling = fit_scaling(datasets, learners, settings.states, settings.rewards, settings.action_margin)
    rows = algorithm.rows(datasets, learners, scaling, device)
    trainer: BaselineTrainer[Any] = BaselineTrainer(algorithm, rows, learners, device=device, backend=backend)
    return trainer, Baseline(name, algorithm, scaling.to(device), dims, seeds, dict(datasets[0].metadata))


def check_data(name: str, dataset: Dataset, *, needs_rewards: bool) -> None:
    """Refuse data that an algorithm cannot learn from."""
    if needs_rewards and not dataset.has_rewards:
        raise ValueError(f"{name} learns from rewards, and this dataset has none; bc does not need them")
    discrete = [dimension.name for dimension in dataset.action_dimensions if dimension.categories]
    if discrete:
        raise ValueError(f"{name} is for continuous actions, and {discrete[0]} has categories; use tt train instead")
    if dataset.map_shape:
        raise ValueError(f"{name} cannot read the maps of these episodes; use tt train instead")


def dims_of(dataset: Dataset) -> Dims:
    """Sizes of observation, goal and action."""
    goal = dataset.episodes[0].goal
    return Dims(dataset.observation_dim, 0 if goal is None else goal.size, dataset.action_dim)


def _described(settings: BaselineRunSettings, dataset: Dataset | None) -> BaselineRunSettings:
    """Settings for `run.json`: an absolute path, and what identifies the data."""
    name = settings.dataset
    known = name if name is not None else dataset
    source = None if known is None else identity(known, settings.columns)
    if name is not None and Path(name).exists():
        name = str(Path(name).resolve())
    return replace(settings, dataset=name, source=source)
