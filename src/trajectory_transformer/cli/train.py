"""`tt train`: a dataset in, a run folder out; stopped at any moment, it can be continued."""

import json
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch

from trajectory_transformer.cli.console import claim, console, device_of, progress_bar
from trajectory_transformer.cli.data import load_dataset
from trajectory_transformer.cli.metrics import JsonLines, MetricsWriter, TensorBoard, summary_writer
from trajectory_transformer.cli.shards import identity, open_or_build
from trajectory_transformer.config import ModelConfig, PresetName, TokenConfig, TrainConfig
from trajectory_transformer.files import replacing, write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.report.dataset import discount_advice
from trajectory_transformer.results import write_result
from trajectory_transformer.tokens.shards import open_shards
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.parallel import World, joined
from trajectory_transformer.training.train import Metrics, Trainer

RUN, RESUME, METRICS, TENSORBOARD = "run.json", "resume.safetensors", "metrics.jsonl", "tensorboard"
TRAINING = "training.json"


class Stopped(KeyboardInterrupt):
    """Training was stopped by hand, its state is saved."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model on a dataset, or continue a run that was stopped."""

    positional: ClassVar[dict[str, str]] = {"dataset": "The .npz dataset to train on."}

    dataset: str | None = None
    """The .npz dataset to train on."""
    out: Path = Path("runs/train")
    """The run folder to write; must not exist."""
    resume: Path | None = None
    """Continue the run in this folder, with the settings it was started with; a dataset named beside it is the same
    data in another place."""
    shards: Path | None = None
    """Folder of tokens to train from, for data larger than memory; made from the dataset if it is not there."""
    preset: PresetName = "default"
    """Set of defaults for all settings below; flags override it."""
    device: str = "auto"
    """auto, cpu or cuda."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard (needs the tensorboard extra)."""
    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def execute(self) -> Path:
        """Train to the end; returns the run folder."""
        if self.tensorboard:
            summary_writer()  # a missing package is found out before anything is written
        with joined(device_of(self.device)) as (world, device):
            console.quiet = not world.leads
            with world.first_alone(device):
                run, trainer = self._prepare(device, world)
            parameters = sum(parameter.numel() for parameter in trainer.model.gpt.parameters())
            console.print(
                f"training {parameters:,} parameters on {trainer.data.num_windows:,} windows of {run.model.window} "
                f"transitions for {trainer.total_steps:,} steps ({_place(device, world)})"
            )
            writers = _writers(run.out, trainer.step, tensorboard=self.tensorboard) if world.leads else []
            first, started = trainer.step, time.perf_counter()
            last = _train(trainer, run.out, writers)
            if world.leads and last is not None:
                run._write_result(device, time.perf_counter() - started, trainer.step - first, last)
            console.print(f"wrote {run.out}")
        return run.out

    def _prepare(self, device: torch.device, world: World) -> tuple["Train", Trainer]:
        """A run at the step it stands at, its folder in place."""
        if self.resume is not None:
            run, source = self._stored(self.resume)
            trainer = run._trainer(device, world, source)
            trainer.load(run.out / RESUME)
            console.print(f"continuing {run.out} at step {trainer.step} of {trainer.total_steps}")
            if world.leads:
                trainer.model.save(run.out)  # a kill may have come between the two files of the last save
            return run, trainer
        if world.leads:
            claim(self.out)
        trainer = self._trainer(device, world)
        if world.leads:
            self._start(trainer)
        return self, trainer

    def _trainer(self, device: torch.device, world: World, source: str | None = None) -> Trainer:
        """Model and data at step 0."""
        if self.shards is None:
            dataset = load_dataset(self.dataset)
            advice = discount_advice(dataset, self.tokens)
            if advice is not None:
                console.print(f"note: {advice}")
            model = TrajectoryModel.create(dataset, self.tokens, self.model, seed=self.train.seed)
            data = tokenize(dataset, model.discretizer, model.layout, self.tokens).to(device)
        else:
            shards = open_or_build(self.shards, self.dataset, self.tokens, source)
            model = TrajectoryModel.build(
                shards.layout, shards.discretizer, shards.tokens, self.model, shards.metadata, seed=self.train.seed
            )
            data = shards.data  # stays mapped, whatever the device: only batches travel
        model.gpt.to(device)
        return Trainer(model, data, self.train, world)

    def _start(self, trainer: Trainer) -> None:
        """Make the run folder with a checkpoint of step 0, in one go: a killed run can go on, or was never there."""
        source = None if self.shards is None else open_shards(self.shards).source
        description = {
            "dataset": None if self.dataset is None else _absolute(self.dataset),
            "shards": None if self.shards is None else str(self.shards.resolve()),
            "source": identity(self.dataset) if self.dataset is not None else source,
            "tokens": asdict(trainer.model.tokens),
            "model": asdict(self.model),
            "train": asdict(self.train),
        }
        with replacing(self.out) as temporary:
            temporary.mkdir()
            write_atomically(temporary / RUN, (json.dumps(description, indent=2) + "\n").encode())
            _save(trainer, temporary)

    def _write_result(self, device: torch.device, seconds: float, steps: int, last: Metrics) -> None:
        """What it took, as a result file in the run folder; a run that was continued tells of its last part."""
        words = [
            f"tt train {self.dataset}" if self.dataset else f"tt train --shards {self.shards}",
            f"--out {self.out}",
        ]
        groups = (("tokens", self.tokens, TokenConfig()), ("model", self.model, ModelConfig()))
        for group, values, usual in (*groups, ("train", self.train, TrainConfig())):
            for key, value in asdict(values).items():
                if value != getattr(usual, key):
                    text = "null" if value is None else json.dumps(value) if not isinstance(value, str) else value
                    words.append(f"--{group}.{key} {shlex.quote(text)}")
        write_result(
            self.out / TRAINING,
            name="train",
            command=" ".join(words),
            device=device,
            seeds=[self.train.seed],
            seconds=seconds,
            metrics={
                "steps": steps,
                "loss": last.loss,
                **{f"loss_{kind}": value for kind, value in last.losses.items()},
                "tokens_per_second": last.tokens_per_second,
            },
        )

    def _stored(self, folder: Path) -> tuple["Train", str | None]:
        """The run that was started in a folder, and what data it was made from."""
        names = ("shards", "tokens", "model", "train")
        given = {name: getattr(self, name) for name in names}
        fresh = Train()
        changed = [name for name, value in given.items() if value != getattr(fresh, name)]
        if changed:
            raise ValueError(f"--resume continues with the settings of the run; leave out {changed[0]}")
        for name in (RUN, RESUME):
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name}: the file is missing; --resume needs a folder that `tt train` wrote")
        try:
            stored = json.loads((folder / RUN).read_text())
            tokens = TokenConfig(**{**stored["tokens"], "goal_dims": tuple(stored["tokens"]["goal_dims"])})
            train = TrainConfig(**{**stored["train"], "betas": tuple(stored["train"]["betas"])})
            model = ModelConfig(**stored["model"])
            dataset, source = stored["dataset"], stored.get("source")
            shards = None if stored.get("shards") is None else Path(stored["shards"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / RUN}: not the description of a run ({error})") from error
        if self.dataset is not None and shards is None:
            dataset = self.dataset  # it may lie elsewhere now
        if source is not None and shards is None and Path(dataset).exists() and identity(dataset) != source:
            fault = "has changed since" if self.dataset is None else "is other data than that with which"
            raise ValueError(f"{dataset} {fault} {folder} was started; --resume needs the data of the run")
        return Train(dataset=dataset, out=folder, shards=shards, tokens=tokens, model=model, train=train), source


def _absolute(dataset: str) -> str:
    """A dataset by a name that holds in any folder."""
    return str(Path(dataset).resolve()) if Path(dataset).exists() else dataset


def _place(device: torch.device, world: World) -> str:
    """Where a run happens, in words."""
    return str(device) if world.size == 1 else f"{world.size} processes, {device.type}"


def _writers(folder: Path, step: int, *, tensorboard: bool) -> list[MetricsWriter]:
    writers: list[MetricsWriter] = [JsonLines(folder / METRICS, step)]
    return [*writers, TensorBoard(folder / TENSORBOARD, step)] if tensorboard else writers


def _train(trainer: Trainer, folder: Path, writers: list[MetricsWriter]) -> Metrics | None:
    """Run to the end or to Ctrl-C; either way the folder holds the last step. Returns the last report."""
    started, world = time.perf_counter(), trainer.world
    last: Metrics | None = None
    best: Metrics | None = None
    with progress_bar("loss", "speed") as bar, _interrupts() as interrupts:
        task = bar.add_task("training", total=trainer.total_steps, completed=trainer.step, loss="", speed="")
        stopping = False
        for metrics in trainer.run():
            bar.update(task, completed=trainer.step)
            if metrics is not None:
                last = metrics
                best = metrics if best is None or metrics.loss < best.loss else best
                for writer in writers:
                    writer.write(metrics)
                speed = f"{metrics.tokens_per_second / 1000:.3g}k tokens/s"
                bar.update(task, loss=f"loss {metrics.loss:.3f}", speed=speed)
            # Several processes stop at the same step, or one would wait for the others for ever: they agree on it
            # where they report, since asking at every step would make each wait for its device.
            if world.size == 1 or metrics is not None:
                stopping = world.any(bool(interrupts), trainer.model.device)
            done = trainer.step == trainer.total_steps
            if world.leads and (stopping or done or trainer.step % trainer.config.checkpoint_every == 0):
                _save(trainer, folder)
            if stopping and not done:
                break
    if stopping and trainer.step < trainer.total_steps:
        console.print(
            f"stopped at step {trainer.step} of {trainer.total_steps}; go on with: tt train --resume {folder}"
        )
        raise Stopped if world.leads else SystemExit(130)
    console.print(f"trained {trainer.step} steps in {time.perf_counter() - started:.0f} s")
    if last is not None and best is not None and has_diverged(best.loss, last.loss):
        console.print(
            f"warning: the loss fell to {best.loss:.3f} at step {best.step} and rose to {last.loss:.3f} after it; "
            "lower train.learning_rate, or set train.precision float32"
        )
    return last


def has_diverged(best: float, last: float) -> bool:
    """Whether a loss has risen by more than batches differ."""
    return last > 1.2 * best + 0.1


def _save(trainer: Trainer, folder: Path) -> None:
    """The state to go on from, then the checkpoint to use."""
    trainer.save(folder / RESUME)
    trainer.model.save(folder)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Note Ctrl-C instead of raising it, so that a step is never cut in half; a second one stops at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
