"""`tt train`: train a model on a dataset, or resume a run that was stopped."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from trajectory_transformer.cli.console import claim, console, progress_bar
from trajectory_transformer.cli.data import SOURCES, DataFlags
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.config import ModelConfig, PresetName, TokenConfig, TrainConfig
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.gpu.backends import find_device, joined_world
from trajectory_transformer.limits import GIB
from trajectory_transformer.report.dataset import discount_advice
from trajectory_transformer.report.page import write_report
from trajectory_transformer.runs import Run, resume_run, start_run
from trajectory_transformer.runs.memory import training_bytes
from trajectory_transformer.runs.metrics import TensorBoard, summary_writer
from trajectory_transformer.runs.settings import RunSettings
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

TENSORBOARD = "tensorboard"
WARM_UP_SECONDS = 5.0  # of training before its time is estimated
LONG_SECONDS = 300.0  # of training that are worth a line
PAGE_SECONDS = 60.0  # between two versions of the report page


class Stopped(KeyboardInterrupt):
    """Training was stopped by the user and its state is saved."""


@dataclass(frozen=True, kw_only=True)
class Train(DataFlags):
    """Train a model on a dataset, or resume a run that was stopped."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt train log.csv --columns.observations '[speed, angle]' --columns.actions '[torque]' --out runs/log",
        "tt train --resume runs/log",
    )

    dataset: str | None = None
    """Dataset to train on."""
    out: Path = Path("runs/train")
    """Run folder to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    resume: Path | None = None
    """Resume the run in this folder with the settings it was started with; a dataset given with it is the same data in
    another place."""
    shards: Path | None = None
    """Folder of token files to train from, for data larger than memory; made from the dataset if it does not exist."""
    check_shards: bool = True
    """Read all tokens of --shards once and refuse damaged ones; false saves the time for large data."""
    preset: PresetName = "default"
    """Defaults of all settings below; flags override them."""
    seed: int = 0
    """Seed of the initial weights, the batches and dropout."""
    device: str = "auto"
    """auto, cpu or cuda."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard (needs the tensorboard extra)."""
    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def execute(self) -> Path:
        """Train to the end; returns the run folder."""
        if self.tensorboard:
            summary_writer()  # a missing package is reported before anything is written
        if self.resume is None and "RANK" not in os.environ:  # one of several processes makes the folder
            claim(self.out, overwrite=self.overwrite)
        with joined_world(find_device(self.device)) as (world, device):
            console.quiet = not world.leads
            with world.first_alone(device):
                run = self._prepare(device, world)
            assert run.folder is not None
            trainer = run.trainer
            if self.tensorboard and world.leads:
                run.writers.append(TensorBoard(run.folder / TENSORBOARD, trainer.step))
            parameters = sum(parameter.numel() for parameter in trainer.model.gpt.parameters())
            place = str(device) if world.size == 1 else f"{world.size} processes, {device.type}"
            console.print(
                f"training {parameters:,} parameters on {trainer.data.num_windows:,} windows of "
                f"{trainer.model.gpt.config.window} transitions for {trainer.total_steps:,} steps ({place})"
            )
            if device.type == "cpu":
                needed = training_bytes(trainer.model.gpt, trainer.config) / GIB
                console.print(f"this needs about {needed:.2g} GiB of memory")
            try:
                _advance(run)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"the GPU has too little memory ({str(error).splitlines()[0]}); lower --train.batch_size, "
                    "--model.window or --model.width"
                ) from error
            console.print(f"wrote {run.folder}")
        return run.folder

    def _prepare(self, device: torch.device, world: World) -> Run:
        """A run at its current step, with its folder in place."""
        if self.resume is not None:
            given = changed_flags(self, leave_out=("dataset", "resume", "device", "tensorboard", "check_shards"))
            if given:
                raise ValueError(f"--resume uses the settings of the run; leave out {given[0]}")
            run = resume_run(self.resume, self.dataset, device=device, world=world, check_shards=self.check_shards)
            console.print(f"resuming {self.resume} at step {run.trainer.step} of {run.trainer.total_steps}")
            return run
        dataset = None
        if self.shards is None and self.dataset is not None:
            dataset = load_dataset(self.dataset, self.reading)
            advice = discount_advice(dataset, self.tokens)
            if advice is not None:
                console.print(f"note: {advice}")
        elif self.shards is not None and self.dataset is not None and not self.shards.exists():
            console.print(f"writing the tokens of {self.dataset} to {self.shards}")
        settings = RunSettings(
            dataset=self.dataset,
            columns=self.reading,
            shards=None if self.shards is None else str(self.shards),
            tokens=self.tokens,
            model=self.model,
            train=self.train,
            seed=self.seed,
            checkpoint_every=self.checkpoint_every,
            command=command_line(
                "train", self, leave_out=("preset", "device", "tensorboard", "overwrite", "check_shards")
            ),
        )
        return start_run(settings, self.out, device, world=world, dataset=dataset, check_shards=self.check_shards)


def _tell_time(seconds: float, trainer: Trainer) -> None:
    """Say how long the remaining steps will take, if that is long."""
    left = seconds * (trainer.total_steps - trainer.step)
    if left > LONG_SECONDS:
        hours, minutes = int(left // 3600), int(left % 3600 // 60)
        text = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        console.print(
            f"about {text} for {trainer.total_steps - trainer.step:,} more steps at {seconds:.2g} s each; fewer: "
            "--train.steps, shorter: --model.window, --model.width, --train.batch_size"
        )


def _advance(run: Run) -> None:
    """Train to the end or to Ctrl-C, with a progress bar."""
    trainer, started = run.trainer, time.perf_counter()
    page_due = started + PAGE_SECONDS
    with progress_bar("loss", "speed") as bar:
        task = bar.add_task("training", total=trainer.total_steps, completed=trainer.step, loss="", speed="")
        first, estimated = trainer.step, False
        for metrics in run.advance():
            bar.update(task, completed=trainer.step)
            if trainer.step == first + 1:
                warm = time.perf_counter()  # the first step is slower than others
            elif not estimated and (time.perf_counter() - warm > WARM_UP_SECONDS):
                estimated = True
                _tell_time((time.perf_counter() - warm) / (trainer.step - first - 1), trainer)
            if metrics is not None:
                speed = f"{metrics.tokens_per_second / 1000:.3g}k tokens/s"
                bar.update(task, loss=f"loss {metrics.loss:.3f}", speed=speed)
            if run.folder is not None and trainer.world.leads and time.perf_counter() > page_due:
                write_report(run.folder)
                page_due = time.perf_counter() + PAGE_SECONDS
    if run.folder is not None and trainer.world.leads:
        write_report(run.folder)
    if not run.finished:
        if not trainer.world.leads:
            raise SystemExit(130)
        raise Stopped(
            f"stopped at step {trainer.step} of {trainer.total_steps}; resume with: tt train --resume {run.folder}"
        )
    console.print(f"trained to step {trainer.step} in {time.perf_counter() - started:.0f} s")
    if run.has_diverged and run.best is not None and run.last is not None:
        console.print(
            f"warning: the loss has risen from its minimum of {run.best.loss:.3f} at step {run.best.step} to "
            f"{run.last.loss:.3f}; lower --train.learning_rate, or use --train.backend eager"
        )
