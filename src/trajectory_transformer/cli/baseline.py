"""`tt baseline`: train an offline reinforcement learning baseline on a dataset, or resume a run that was stopped."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, progress_bar
from trajectory_transformer.cli.data import SOURCES, DataFlags
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.results import counted

if TYPE_CHECKING:
    import torch

    from trajectory_transformer.baselines.runs import BaselineRun


@dataclass(frozen=True, kw_only=True)
class TrainBaseline(DataFlags):
    """Train a baseline (BC, TD3+BC, IQL, CQL, BRAC, DT, MBOP) on a dataset, or resume a run that was stopped."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt baseline data/hopper.npz --algorithm iql --seeds '[0, 1, 2]' --out runs/iql",
        "tt baseline --resume runs/iql",
    )

    dataset: str | None = None
    """Dataset to train on."""
    algorithm: str = "iql"
    """bc, td3bc, iql, cql, brac, mbop or dt, each with the settings of its paper. dt with the target return of a task:
    dt-hopper, dt-halfcheetah, dt-halfcheetah-medium-expert, dt-walker2d. For mazes, with a reward of 1 at the goal and
    0 elsewhere: iql-antmaze, cql-antmaze, dt-antmaze. iql-antmaze-wide: our settings for plans by Q in mazes; the first
    two observations must be the position."""
    out: Path = Path("runs/baseline")
    """Run folder to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    resume: Path | None = None
    """Resume the run in this folder with the settings it was started with; a dataset given with it is the same data in
    another place."""
    steps: int | None = None
    """Training steps; null: as many as in the paper."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds; all of them are trained at once, in the same run folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of the algorithm, for example '{expectile: 0.8}'."""
    device: str = "auto"
    """auto, cpu or cuda."""
    backend: Literal["auto", "eager", "captured", "compiled"] = "auto"
    """eager: operation by operation. captured: a CUDA graph. compiled: torch.compile and a CUDA graph. auto: the
    fastest one that the device allows."""
    checkpoint_every: int = 10_000
    """Steps between checkpoints."""

    def execute(self) -> Path:
        """Train to the end; returns the run folder."""
        from trajectory_transformer.gpu.backends import find_device

        if self.resume is None:
            claim(self.out, overwrite=self.overwrite)
        run = self._prepare(find_device(self.device))
        assert run.folder is not None
        trainer, seeds = run.trainer, run.settings.seeds
        parameters = sum(group.flat.numel() for group in trainer.algorithm.groups.values()) // len(seeds)
        console.print(
            f"training {run.settings.algorithm}, {parameters:,} parameters, on {int(trainer.rows.counts[0]):,} "
            f"transitions for {trainer.total_steps:,} steps with {counted(len(seeds), 'seed')} "
            f"({trainer.device}, {trainer.backend})"
        )
        _advance(run)
        console.print(f"wrote {run.folder}")
        return run.folder

    def _prepare(self, device: "torch.device") -> "BaselineRun":
        """A run at its current step, with its folder in place."""
        from trajectory_transformer.baselines.runs import BaselineRunSettings, resume_baseline, start_baseline

        if self.resume is not None:
            given = changed_flags(self, leave_out=("dataset", "resume", "device"))
            if given:
                raise ValueError(f"--resume uses the settings of the run; leave out {given[0]}")
            run = resume_baseline(self.resume, self.dataset, device=device)
            console.print(f"resuming {self.resume} at step {run.trainer.step} of {run.trainer.total_steps}")
            return run
        if self.steps is not None and "steps" in self.settings:
            raise ValueError("--steps and steps in --settings are the same setting: leave out one of them")
        settings = BaselineRunSettings(
            algorithm=self.algorithm,
            settings=self.settings if self.steps is None else {**self.settings, "steps": self.steps},
            dataset=self.dataset,
            columns=self.reading,
            seeds=self.seeds,
            checkpoint_every=self.checkpoint_every,
            backend=self.backend,
            command=command_line("baseline", self, leave_out=("device", "overwrite")),
        )
        return start_baseline(settings, self.out, device)


def _advance(run: "BaselineRun") -> None:
    """Train to the end or to Ctrl-C, with a progress bar."""
    trainer, started = run.trainer, time.perf_counter()
    with progress_bar("losses", "speed") as bar:
        task = bar.add_task("training", total=trainer.total_steps, completed=trainer.step, losses="", speed="")
        for metrics in run.advance():
            bar.update(task, completed=trainer.step)
            if metrics is not None:
                means = {name: sum(values) / len(values) for name, values in metrics.losses.items()}
                shown = " ".join(f"{name} {value:.3g}" for name, value in means.items())
                bar.update(task, losses=shown, speed=f"{metrics.steps_per_second:,.0f} steps/s")
    if not run.finished:
        console.print(
            f"stopped at step {trainer.step} of {trainer.total_steps}; resume with: tt baseline --resume {run.folder}"
        )
        raise KeyboardInterrupt
    console.print(f"trained to step {trainer.step} in {time.perf_counter() - started:.0f} s")
