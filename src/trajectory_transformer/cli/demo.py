"""`tt demo`: from nothing to goals reached in four rooms; only the other commands, in a row."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.collect import Collect
from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.evaluate import Evaluate
from trajectory_transformer.cli.train import METRICS, Train
from trajectory_transformer.config import ModelConfig, PlanConfig, TokenConfig, TrainConfig
from trajectory_transformer.report.page import write_report
from trajectory_transformer.report.plots import loss_figure, routes_figure


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Collect demonstrations, train, and reach goals in four rooms: the whole way in minutes."""

    positional: ClassVar[dict[str, str]] = {}

    out: Path = Path("runs/demo")
    """The run folder to write; must not exist."""
    overwrite: bool = False
    """Remove that folder first if it exists."""
    demonstrations: int = 4000
    """Episodes to learn from."""
    steps: int = 3000
    """Training steps."""
    goals: int = 100
    """Start-goal pairs to plan for, none of them in the data."""
    seed: int = 0
    """Of demonstrations, weights and batches."""

    def execute(self) -> None:
        """Run the commands one after the other."""
        started = time.perf_counter()
        claim(self.out, overwrite=self.overwrite)
        dataset = self.out.with_name(self.out.name + "-demonstrations.npz")
        claim(dataset, overwrite=self.overwrite)

        console.rule("1. demonstrations of an agent that reaches random goals, with noise")
        demonstrations = Collect(out=str(dataset), episodes=self.demonstrations, seed=self.seed).execute()
        console.rule("2. training: the goal, then states and actions, token by token")
        Train(
            dataset=str(dataset),
            out=self.out,
            tokens=TokenConfig(num_bins=50, discretizer="uniform", goal_dims=(0, 1), rewards=False),
            model=ModelConfig(window=3, num_layers=2, width=64, dropout=0.0),
            train=TrainConfig(steps=self.steps, batch_size=128, learning_rate=2e-3, seed=self.seed),
        ).execute()
        console.rule(f"3. planning for {self.goals} random starts and goals that are not in the data")
        search = PlanConfig(beam_width=8, horizon=3, context=0)
        routes = Evaluate(run=str(self.out), episodes=self.goals, search=search).execute()

        console.rule("4. report")
        pictures = {
            "routes.png": routes_figure(routes[:12]),
            "demonstrations.png": routes_figure(demonstrations.episodes[:12]),
            "loss.png": loss_figure(self.out / METRICS),
        }
        for name, figure in pictures.items():
            figure.savefig(self.out / name, dpi=150)
        page = write_report(self.out, pictures=list(pictures))
        console.print(f"done in {time.perf_counter() - started:.0f} s. Look at:")
        for path in (page, self.out / "routes.png", self.out / "evaluation.json"):
            console.print(f"  {path}")
        console.print("Try next:")
        console.print(
            f"  tt evaluate {self.out} --search.beam_width 1 --search.horizon 1 --out greedy.json   # no search"
        )
        console.print(f"  tt data show {dataset}")
        console.print("  tt train --help")
