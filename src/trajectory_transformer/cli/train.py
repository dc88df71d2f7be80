"""`tt train`: a dataset in, a run folder out; stopped at any moment, it can be continued."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from trajectory_transformer.checkpoint import write_aside
from trajectory_transformer.cli.console import claim, console, device_of, progress_bar
from trajectory_transformer.cli.data import load_dataset
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.train import Metrics, Trainer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RUN, RESUME, METRICS, TENSORBOARD = "run.json", "resume.safetensors", "metrics.jsonl", "tensorboard"


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
    """Continue the run in this folder, with the dataset and settings it was started with."""
    preset: Literal["default", "paper", "reference"] = "default"
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
        device = device_of(self.device)
        if self.tensorboard:
            _summary_writer()  # a missing package is found out before anything is written
        run = self if self.resume is None else self._stored(self.resume)
        folder = run.out
        dataset = load_dataset(run.dataset)
        model = TrajectoryModel.create(dataset, run.tokens, run.model, seed=run.train.seed)
        model.gpt.to(device)
        trainer = Trainer(model, tokenize(dataset, model.discretizer, model.layout, run.tokens), run.train)
        if self.resume is None:
            claim(folder)
            folder.mkdir(parents=True)
            writers = _writers(folder, 0, tensorboard=self.tensorboard)
            write_aside(folder / RUN, (json.dumps(run._description(), indent=2) + "\n").encode())
        else:
            trainer.load(folder / RESUME)
            console.print(f"continuing {folder} at step {trainer.step} of {trainer.total_steps}")
            writers = _writers(folder, trainer.step, tensorboard=self.tensorboard)
        parameters = sum(parameter.numel() for parameter in model.gpt.parameters())
        console.print(
            f"training {parameters:,} parameters on {trainer.data.num_windows:,} windows of {run.model.window} "
            f"transitions for {trainer.total_steps:,} steps ({device})"
        )
        _train(trainer, folder, writers)
        console.print(f"wrote {folder}")
        return folder

    def _description(self) -> dict[str, object]:
        """What a resumed run needs to know."""
        assert self.dataset is not None
        return {
            "dataset": str(Path(self.dataset).resolve()) if Path(self.dataset).exists() else self.dataset,
            "tokens": asdict(self.tokens),
            "model": asdict(self.model),
            "train": asdict(self.train),
        }

    def _stored(self, folder: Path) -> "Train":
        """The run that was started in a folder."""
        given = {"dataset": self.dataset, "tokens": self.tokens, "model": self.model, "train": self.train}
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
            return Train(dataset=stored["dataset"], out=folder, tokens=tokens, model=model, train=train)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / RUN}: not the description of a run ({error})") from error


class MetricsWriter(Protocol):
    """Somewhere metrics go."""

    def write(self, metrics: Metrics) -> None:
        """Record one report."""


class _JsonLines:
    """One JSON object a line; lines after the step a run continues from are dropped, they will come again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if step:
            lines = path.read_text().splitlines() if path.is_file() else []
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            write_aside(path, "".join(line + "\n" for line in kept).encode())

    def write(self, metrics: Metrics) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")


def _summary_writer() -> "type[SummaryWriter]":
    """TensorBoard's writer, an optional dependency."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs: pip install 'trajectory-transformer[tensorboard]'") from error
    return SummaryWriter


class _TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = _summary_writer()(str(folder), purge_step=step)

    def write(self, metrics: Metrics) -> None:
        scalars = {
            "loss": metrics.loss,
            "learning_rate": metrics.learning_rate,
            "gradient_norm": metrics.gradient_norm,
            "tokens_per_second": metrics.tokens_per_second,
            **{f"loss/{kind}": value for kind, value in metrics.losses.items()},
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()


def _writers(folder: Path, step: int, *, tensorboard: bool) -> list[MetricsWriter]:
    writers: list[MetricsWriter] = [_JsonLines(folder / METRICS, step)]
    return [*writers, _TensorBoard(folder / TENSORBOARD, step)] if tensorboard else writers


def _train(trainer: Trainer, folder: Path, writers: list[MetricsWriter]) -> None:
    """Run to the end or to Ctrl-C; either way the folder holds the last step."""
    started = time.perf_counter()
    with progress_bar("loss", "speed") as bar, _interrupts() as interrupts:
        task = bar.add_task("training", total=trainer.total_steps, completed=trainer.step, loss="", speed="")
        for metrics in trainer.run():
            bar.update(task, completed=trainer.step)
            if metrics is not None:
                for writer in writers:
                    writer.write(metrics)
                speed = f"{metrics.tokens_per_second / 1000:.3g}k tokens/s"
                bar.update(task, loss=f"loss {metrics.loss:.3f}", speed=speed)
            if interrupts or trainer.step % trainer.config.checkpoint_every == 0 or trainer.step == trainer.total_steps:
                _save(trainer, folder)
            if interrupts and trainer.step < trainer.total_steps:
                break
    if interrupts and trainer.step < trainer.total_steps:
        console.print(
            f"stopped at step {trainer.step} of {trainer.total_steps}; go on with: tt train --resume {folder}"
        )
        raise Stopped
    console.print(f"trained {trainer.step} steps in {time.perf_counter() - started:.0f} s")


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
