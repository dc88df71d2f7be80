"""`tt study`: compare predictors on held-out episodes over long horizons."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, metrics_table
from trajectory_transformer.cli.data import DataFlags, load_dataset
from trajectory_transformer.cli.parser import command_line
from trajectory_transformer.config import require
from trajectory_transformer.results import write_result

if TYPE_CHECKING:
    from trajectory_transformer.analysis.predictors import Predictor
    from trajectory_transformer.analysis.study import Actions

TITLES = {"policy": "predicted actions", "recorded": "recorded actions"}


@dataclass(frozen=True, kw_only=True)
class CompareStudy(DataFlags):
    """Compare how well predictors foresee held-out episodes: log-likelihood and error at every step."""

    positional: ClassVar[dict[str, str]] = {"dataset": "Held-out episodes, as `tt data split` writes them."}
    required: ClassVar[tuple[str, ...]] = ("dataset",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt study data/split/held_out.npz --predictors '{tt: runs/tt, pets: runs/pets}' --out study.json",
        "tt study data/split/held_out.npz --predictors '{tt: runs/tt}' --horizon 50 --samples 200",
    )

    dataset: str | None = None
    """Held-out episodes, as `tt data split` writes them."""
    predictors: dict[str, str] = field(default_factory=dict)
    """Folders that `tt train` and `tt pets` wrote, by name: '{tt: runs/tt, markov: runs/markov, pets: runs/pets}'."""
    out: Path = Path("study.json")
    """Result file to write, with a figure beside it; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    horizon: int = 100
    """Steps to predict."""
    samples: int = 1000
    """Futures that each predictor samples from a start."""
    starts: int = 8
    """Starts to average over, at most."""
    context: int = 9
    """Transitions before a start that predictors may read."""
    actions: tuple[Literal["policy", "recorded"], ...] = ("policy",)
    """policy: predictors also predict the actions. recorded: they take the recorded ones."""
    hidden: float = 0.0
    """Probability with which each entry of every state is hidden, as in the training of the predictors."""
    floor: float = 1e-4
    """Smallest probability of a bin; zero mass counts as this much."""
    temperature: float = 1.0
    """Sampling temperature of Trajectory Transformers."""
    seed: int = 0
    """Seed of starts, masks and samples."""
    backend: Literal["auto", "fused", "fused-float32", "cached", "cached-bfloat16", "naive"] = "cached"
    """Decoder of Trajectory Transformers, as in --search.backend."""
    max_rows: int = 2048
    """Sequences that a Trajectory Transformer extends at a time; bounds the memory."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def execute(self) -> None:
        """Run the study, print the numbers, write the result and the figure."""
        from trajectory_transformer.analysis.predictors import load_predictor
        from trajectory_transformer.analysis.protocol import study_dataset
        from trajectory_transformer.analysis.study import StudyConfig
        from trajectory_transformer.gpu.backends import find_device
        from trajectory_transformer.report.plots import save_figure
        from trajectory_transformer.report.prediction import Panel, likelihood_figure

        require(bool(self.predictors), "name predictors with --predictors, for example '{tt: runs/tt}'", "none")
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        picture = self.out.with_suffix(".png")
        claim(self.out, picture, overwrite=self.overwrite)
        dataset, device = load_dataset(self.dataset, self.reading), find_device(self.device)
        predictors: dict[str, Predictor] = {
            name: load_predictor(
                folder,
                device,
                temperature=self.temperature,
                backend=self.backend,
                max_rows=self.max_rows,
                hidden=self.hidden,
            )
            for name, folder in self.predictors.items()
        }
        began = time.perf_counter()
        kinds: tuple[Actions, ...] = self.actions
        study = study_dataset(
            predictors,
            dataset,
            StudyConfig(horizon=self.horizon, samples=self.samples, floor=self.floor, seed=self.seed),
            num_starts=self.starts,
            context=self.context,
            hidden=self.hidden,
            actions=kinds,
            on_done=lambda name, seconds: console.print(f"{name}: sampled in {seconds:.1f} s"),
        )
        write_result(
            self.out,
            name="prediction study",
            command=command_line("study", self, leave_out=("overwrite",)),
            device=device,
            seeds=[self.seed],
            seconds=time.perf_counter() - began,
            metrics=study.metrics,
            details=study.details,
        )
        panels = [Panel(TITLES[kind], study.curves[kind], study.oracle) for kind in kinds]
        save_figure(likelihood_figure(*panels), picture)
        console.print(metrics_table(f"{len(study.details['starts'])} starts", study.metrics))
        console.print(f"wrote {self.out} and {picture}")
