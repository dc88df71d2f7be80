"""`tt train`: train a model on a dataset, or resume a run that was stopped."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, progress_bar
from trajectory_transformer.cli.data import SOURCES, DataFlags
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.config import FIRST_SEED, PRESETS, ModelConfig, PresetName, TokenConfig, TrainConfig
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.results import counted, with_error

if TYPE_CHECKING:
    import torch

    from trajectory_transformer.model.trajectory_model import TrajectoryModel
    from trajectory_transformer.runs import Play, Run
    from trajectory_transformer.training.parallel import World
    from trajectory_transformer.training.train import Trainer

WARM_UP_SECONDS = 5.0  # of training before its time is estimated
LONG_SECONDS = 300.0  # of training that are worth a line
PAGE_SECONDS = 60.0  # between two versions of the report page
EVALUATION_SEED = 2 * FIRST_SEED  # the episodes that a run is steered by are not those it is scored by


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
    another place. With more --train.steps or --train.epochs the run is extended."""
    init: Path | None = None
    """Start from the weights and the tokenizer of this run, with a new schedule: fine-tuning."""
    shards: Path | None = None
    """Folder of token files to train from, for data larger than memory; made from the dataset if it does not exist."""
    check_shards: bool = True
    """Read all tokens of --shards once and refuse damaged ones; false saves the time for large data."""
    preset: PresetName | None = None
    """Defaults of all settings below; flags override them. null: default on a GPU, small on a CPU."""
    seed: int = 0
    """Seed of the initial weights, the batches and dropout."""
    device: str = "auto"
    """auto, cpu or cuda."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    evaluate_every: int | None = None
    """Play episodes in the environment of the dataset every so many steps, with the default search settings; null:
    never."""
    evaluate_episodes: int = 10
    """Episodes to play each time; their seeds are not those of tt evaluate."""
    log: Literal["tensorboard", "wandb"] | None = None
    """Also write the metrics for TensorBoard or Weights & Biases (needs the extra of that name); wandb stays on this
    machine with WANDB_MODE=offline."""
    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def usual_preset(self) -> PresetName | None:
        """The preset for this device; None for a run that has its settings."""
        from trajectory_transformer.runs import preset_for

        return None if self.resume is not None else preset_for(self.device)

    def execute(self) -> Path:
        """Train to the end; returns the run folder."""
        import torch

        from trajectory_transformer.gpu.backends import find_device, joined_world
        from trajectory_transformer.limits import GIB
        from trajectory_transformer.runs import SMALL
        from trajectory_transformer.runs.memory import training_bytes
        from trajectory_transformer.runs.metrics import require_log

        if self.log is not None:
            require_log(self.log)  # a missing package is reported before anything is written
        if self.resume is None and "RANK" not in os.environ:  # one of several processes makes the folder
            claim(self.out, overwrite=self.overwrite)
        with joined_world(find_device(self.device)) as (world, device):
            console.quiet = not world.leads
            with world.first_alone(device):
                run = self._prepare(device, world)
            assert run.folder is not None
            trainer = run.trainer
            if self.log is not None:
                run.add_log(self.log)
            if self.resume is None and self.preset is None and device.type == "cpu":
                console.print(f"note: {SMALL}")
            parameters = sum(parameter.numel() for parameter in trainer.model.gpt.parameters())
            place = str(device) if world.size == 1 else f"{world.size} processes, {device.type}"
            console.print(
                f"training {parameters:,} parameters on {trainer.data.num_windows:,} windows of "
                f"{trainer.model.gpt.config.window} transitions for {trainer.total_steps:,} steps ({place})"
            )
            if device.type == "cpu":
                needed = training_bytes(trainer.model.gpt, trainer.config) / GIB
                console.print(f"this needs about {needed:.2g} GiB of memory")
            if run.settings.evaluate_every is not None:
                run.play = _playing(run.settings.evaluate_episodes, trainer.model)
                run.evaluate_every = run.settings.evaluate_every
            try:
                _advance(run)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"the GPU has too little memory ({str(error).splitlines()[0]}); lower --train.batch_size, "
                    "--model.window or --model.width"
                ) from error
            console.print(f"wrote {run.folder}")
        return run.folder

    def _prepare(self, device: "torch.device", world: "World") -> "Run":
        """A run at its current step, with its folder in place."""
        from trajectory_transformer.evaluate import environment_of
        from trajectory_transformer.report.dataset import discount_advice
        from trajectory_transformer.runs import preset_for, resume_run, start_run
        from trajectory_transformer.runs.initial import settings_of_init
        from trajectory_transformer.runs.settings import RunSettings

        if self.resume is not None:
            length = replace(self.train, steps=None, epochs=None)
            given = changed_flags(self, leave_out=("dataset", "resume", "device", "log", "check_shards"), train=length)
            if given:
                raise ValueError(f"--resume uses the settings of the run; leave out {given[0]}")
            longer = None
            if self.train != length:
                longer = replace(RunSettings.read(self.resume).train, steps=self.train.steps, epochs=self.train.epochs)
            run = resume_run(
                self.resume, self.dataset, device=device, world=world, train=longer, check_shards=self.check_shards
            )
            console.print(f"resuming {self.resume} at step {run.trainer.step} of {run.trainer.total_steps}")
            return run
        dataset = None
        if self.shards is None and self.dataset is not None:
            dataset = load_dataset(self.dataset, self.reading)
            if self.evaluate_every is not None:
                environment_of(dataset.metadata, None, None)  # refused before anything is written
            advice = discount_advice(dataset, self.tokens)
            if advice is not None:
                console.print(f"note: {advice}")
        elif self.shards is not None and self.dataset is not None and not self.shards.exists():
            console.print(f"writing the tokens of {self.dataset} to {self.shards}")
        tokens, model = self.tokens, self.model
        if self.init is not None:
            usual = self.preset or preset_for(self.device)
            given = [flag for flag in changed_flags(self, preset=usual) if flag.startswith(("--tokens.", "--model."))]
            if given:
                raise ValueError(f"--init uses the token and model settings of {self.init}; leave out {given[0]}")
            tokens, model = settings_of_init(self.init, None, None)
        settings = RunSettings(
            dataset=self.dataset,
            columns=self.reading,
            shards=None if self.shards is None else str(self.shards),
            init=None if self.init is None else str(self.init),
            tokens=tokens,
            model=model,
            train=self.train,
            seed=self.seed,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
            evaluate_episodes=self.evaluate_episodes,
            # Flags are recorded where they differ from the preset default, whichever they came from.
            command=command_line(
                "train", self, leave_out=("device", "log", "overwrite", "check_shards"), preset="default"
            ),
        )
        return start_run(settings, self.out, device, world=world, dataset=dataset, check_shards=self.check_shards)


def _playing(episodes: int, model: "TrajectoryModel") -> "Play":
    """A function that plays episodes with a model; refuses a model without an environment."""
    from trajectory_transformer.evaluate import environment_of, evaluate
    from trajectory_transformer.planner import Planner

    env, options = environment_of(model.metadata, None, None)

    def play(model: "TrajectoryModel") -> dict[str, float]:
        found = evaluate(Planner(model), env, episodes=episodes, seed=EVALUATION_SEED, env_options=options)
        return dict(found.metrics)

    return play


def _tell_time(seconds: float, trainer: "Trainer") -> None:
    """Say how long the remaining steps will take, if that is long."""
    left = seconds * (trainer.total_steps - trainer.step)
    if left > LONG_SECONDS:
        hours, minutes = int(left // 3600), int(left % 3600 // 60)
        text = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        is_small = trainer.model.gpt.config == PRESETS["small"].model
        console.print(
            f"about {text} for {trainer.total_steps - trainer.step:,} more steps at {seconds:.2g} s each; "
            + ("" if is_small else "minutes instead: --preset small; ")
            + "fewer: --train.steps, shorter: --model.window, --model.width, --train.batch_size"
        )


def _advance(run: "Run") -> None:
    """Train to the end or to Ctrl-C, with a progress bar."""
    from trajectory_transformer.report.page import write_report
    from trajectory_transformer.runs import LAST

    trainer, started = run.trainer, time.perf_counter()
    page_due = started + PAGE_SECONDS
    with progress_bar("loss", "speed") as bar:
        task = bar.add_task("training", total=trainer.total_steps, completed=trainer.step, loss="", speed="")
        first, estimated, held_out = trainer.step, False, ""
        for metrics in run.advance():
            bar.update(task, completed=trainer.step)
            if trainer.step == first + 1:
                warm = time.perf_counter()  # the first step is slower than others
            elif not estimated and (time.perf_counter() - warm > WARM_UP_SECONDS):
                estimated = True
                _tell_time((time.perf_counter() - warm) / (trainer.step - first - 1), trainer)
            if metrics is not None:
                speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
                loss = f"loss {metrics.loss:.3f}{held_out}"
                if metrics.validation_loss is not None:
                    held_out = f", held-out {metrics.validation_loss:.3f}"
                    loss = f"loss {metrics.loss:.3f}{held_out}"
                bar.update(task, loss=loss, speed=speed)
                if metrics.evaluation is not None:
                    console.print(f"step {metrics.step}: {_evaluation(metrics.evaluation)}")
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
    validation = trainer.validation
    if validation is not None:
        if trainer.step < trainer.total_steps:
            console.print(f"stopped early: no smaller held-out loss in {validation.since_best} validations")
        console.print(
            f"smallest held-out loss {validation.best_loss:.3f} at step {validation.best_step}: {run.folder} holds "
            f"that model, {run.folder}/{LAST} the one of the last step"
        )
    if run.has_diverged and run.best is not None and run.last is not None:
        console.print(
            f"warning: the loss has risen from its minimum of {run.best.loss:.3f} at step {run.best.step} to "
            f"{run.last.loss:.3f}; lower --train.learning_rate, or use --train.backend eager"
        )


def _evaluation(metrics: Mapping[str, float]) -> str:
    """The main metrics of played episodes in one line."""
    shown = [name for name in ("success_rate", "normalized_score", "return") if name in metrics]
    parts = [f"{name} {with_error(metrics, name)}" for name in shown]
    return ", ".join(parts) + f" over {counted(metrics.get('return_n', 0), 'episode')}"
