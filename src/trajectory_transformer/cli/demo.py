"""`tt demo`: collect, train, evaluate and report in one command."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from trajectory_transformer.cli.collect import Collect
from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.evaluate import Evaluate
from trajectory_transformer.cli.train import Train
from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig, TrainConfig, require
from trajectory_transformer.envs import FOUR_ROOMS_ID, MULTI_ROOM_ID

TaskName = Literal["four-rooms", "minigrid"]
ROUTES = 12  # panels of a figure


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a demo shows, and its settings."""

    env: str
    policy: str | list[str]
    demonstrations: int
    goals: int
    num_envs: int = 50
    tokens: TokenConfig
    model: ModelConfig
    train: TrainConfig
    search: SearchConfig


TASKS: dict[TaskName, Task] = {
    "four-rooms": Task(
        env=FOUR_ROOMS_ID,
        policy="demonstrator",
        demonstrations=4000,
        goals=100,
        tokens=TokenConfig(num_bins=50, discretizer="uniform", goal_dims=(0, 1), rewards=False),
        model=ModelConfig(window=3, num_layers=2, width=64, dropout=0.0),
        train=TrainConfig(steps=3000, batch_size=128, learning_rate=2e-3),
        search=SearchConfig(beam_width=8, horizon=3, context=2),
    ),
    # Every episode has its own map, so there is more to learn: minutes on a GPU, more than a day without one.
    "minigrid": Task(
        env=MULTI_ROOM_ID,
        policy=["expert", "expert eps=0.2", "random share=0.1"],
        demonstrations=60_000,
        goals=500,
        num_envs=500,
        tokens=TokenConfig(num_bins=25, goal_dims=(0, 1), rewards=False),
        model=ModelConfig(window=6, num_heads=8, width=256, dropout=0.0),
        train=TrainConfig(steps=16_000, batch_size=1024, learning_rate=1e-3, warmup_steps=500, augment="grid"),
        search=SearchConfig(beam_width=4, horizon=3, context=3),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Collect demonstrations, train a model, and plan to goals; four rooms take a few minutes."""

    positional: ClassVar[dict[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt demo                                 # four rooms, a few minutes on a CPU",
        "tt demo --task minigrid --out runs/maps  # needs a GPU",
    )

    task: TaskName = "four-rooms"
    """four-rooms, or minigrid: rooms with a new map in every episode (needs the minigrid extra and a GPU)."""
    out: Path = Path("runs/demo")
    """Run folder to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    demonstrations: int | None = None
    """Episodes to train on; null: 4000 in four rooms, 60000 in MiniGrid."""
    steps: int | None = None
    """Training steps; null: 3000 in four rooms, 16000 in MiniGrid."""
    goals: int | None = None
    """Held-out pairs of start and goal to plan for; null: 100 in four rooms, 500 in MiniGrid."""
    seed: int = 0
    """Seed of demonstrations, weights and batches."""

    def execute(self) -> None:
        """Run the commands one after the other."""
        from trajectory_transformer.report.page import PAGE

        started = time.perf_counter()
        task = TASKS[self.task]
        for name in ("demonstrations", "steps", "goals"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name} must be at least 1", value)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        goals = task.goals if self.goals is None else self.goals
        dataset = self.out.with_name(self.out.name + "-demonstrations.npz")
        claim(self.out, dataset, overwrite=self.overwrite)
        try:
            self._run(task, dataset, goals)
        except BaseException as error:
            # An unfinished demo would be in the way of the next one.
            shutil.rmtree(self.out, ignore_errors=True)
            dataset.unlink(missing_ok=True)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error  # there is nothing left to resume
            raise
        console.print(f"done in {time.perf_counter() - started:.0f} s. Look at:")
        for path in (self.out / PAGE, self.out / "routes.png", self.out / "evaluation.json"):
            console.print(f"  {path}")
        console.print("Try next:")
        console.print(
            f"  tt evaluate {self.out} --search.beam_width 1 --search.horizon 1 --out greedy.json   # no search"
        )
        console.print(f"  tt data show {dataset}")
        console.print("  tt train --help")

    def _run(self, task: Task, dataset: Path, goals: int) -> None:
        """Collect, train, evaluate and write the report."""
        from trajectory_transformer.report.plots import loss_figure, routes_figure, save_figure
        from trajectory_transformer.report.rooms import between_rooms, success_by_doors
        from trajectory_transformer.runs import METRICS

        console.rule("1. collect noisy demonstrations of an agent that reaches random goals")
        demonstrations = Collect(
            out=str(dataset),
            env=task.env,
            policy=task.policy,
            episodes=task.demonstrations if self.demonstrations is None else self.demonstrations,
            seed=self.seed,
            overwrite=self.overwrite,
        ).execute()
        console.rule("2. train on the goal, states and actions, token by token")
        steps = task.train.steps if self.steps is None else self.steps
        Train(
            dataset=str(dataset),
            out=self.out,
            preset="default",
            tokens=task.tokens,
            model=task.model,
            train=replace(task.train, steps=steps),
            seed=self.seed,
        ).execute()
        rooms = task.env == FOUR_ROOMS_ID
        shown = between_rooms(demonstrations.episodes, ROUTES) if rooms else demonstrations.episodes[:ROUTES]
        save_figure(routes_figure(shown), self.out / "demonstrations.png")
        save_figure(loss_figure(self.out / METRICS), self.out / "loss.png")
        console.rule(f"3. plan for {goals} held-out starts and goals")
        routes = Evaluate(run=str(self.out), episodes=goals, num_envs=task.num_envs, search=task.search).execute()
        if rooms:
            console.print(success_by_doors(routes))
        shown = between_rooms(routes, ROUTES) if rooms else routes[:ROUTES]
        save_figure(routes_figure(shown), self.out / "routes.png")
