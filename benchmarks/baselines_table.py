"""Scores of the baselines on the benchmark datasets, with several training seeds, and the table of all of them.

    python benchmarks/baselines_table.py --datasets DIR [--policies DIR] [--algorithms iql ...] [--tasks TASK ...]

Datasets are read from DIR/<task>.npz. A missing one is collected there by its recipe, if --policies names the folder of
actor files. Datasets of one environment have equal sizes, so an algorithm trains on all of them, with all seeds, in the
same steps. Meanwhile other processes play the checkpoints: 5 episodes for a point of the curve, 15 for the score, with
seeds that nothing else uses. Where a paper chooses settings for acting for every task (the target return of dt, noise
and temperature of mbop), they are chosen here for every training seed, on tuning seeds.

A cell is one algorithm on one dataset: results/baselines/<task>_<algorithm>.json. Cells that exist are skipped. The
same command continues what was interrupted, from the last checkpoint in --work. `--time_limit` stops before a limit;
exit code 75 then means that there is more to do. The last step writes results/baselines/table.json from all cells that
exist: `<task>_<algorithm>` is the mean score over training seeds, `_stderr` its standard error over training seeds, and
`<algorithm>_average` the mean over tasks.
"""

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.paper.locomotion_data import TASKS, make_dataset
from benchmarks.paper.table import summary
from trajectory_transformer.baselines import PRESETS, Baseline, BaselineTrainer
from trajectory_transformer.baselines.data import Learner
from trajectory_transformer.baselines.dt import TARGETS
from trajectory_transformer.baselines.mbop import GRID
from trajectory_transformer.baselines.presets import changed, settings_dict
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.evaluate import evaluate
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import summarize, write_result

MORE_TO_DO = 75  # the exit code of programs that ask to be started again
SCORE_SEED, CURVE_SEED, TUNING_SEED = 7_000_000, 6_000_000, 5_000_000  # of the episodes
ALGORITHMS = ("bc", "td3bc", "iql", "cql", "brac", "dt", "mbop")
PLANNERS = ("dt", "mbop")  # need a GPU to act fast


class OutOfTimeError(Exception):
    """The time limit is reached; finished work is kept."""


def acting_settings(name: str, task: str) -> list[dict[str, object]]:
    """Settings for acting to choose from on tuning seeds: those that the papers choose for every task."""
    if name == "dt":
        return [{"target_return": target} for target in TARGETS[task.partition("-")[0]]]
    if name == "mbop":
        pairs = itertools.product(GRID["noise_std"], GRID["temperature"])
        return [{"noise_std": noise, "temperature": temperature} for noise, temperature in pairs]
    return [{}]


class Game(NamedTuple):
    """What is played with a checkpoint."""

    episodes: int
    first: int  # seed of the first episode
    tuning: int  # episodes to tune with
    acting: list[dict[str, object]]  # settings to choose from; without tuning the first one
    device: str


def play(folder: str, seed: int, game: Game) -> list[float]:
    """Returns of the episodes of one training seed; what was chosen on tuning seeds is kept next to the checkpoint."""
    baseline = Baseline.load(folder, game.device)

    def returns(acting: dict[str, object], episodes: int, first: int) -> list[float]:
        policy = baseline.with_settings(acting).policy(seed)
        found = evaluate(policy, episodes=episodes, num_envs=episodes, seed=first)
        return [episode.total_reward for episode in found.episodes]

    chosen = game.acting[0]
    if game.tuning and len(game.acting) > 1:
        tried = [float(np.mean(returns(acting, game.tuning, TUNING_SEED))) for acting in game.acting]
        chosen = game.acting[int(np.argmax(tried))]
        record = {
            "chosen": chosen,
            "tried": [[acting, value] for acting, value in zip(game.acting, tried, strict=True)],
        }
        write_atomically(Path(folder) / f"acting_{seed}.json", json.dumps(record).encode())
    return returns(chosen, game.episodes, game.first)


class Players:
    """Plays checkpoints in other processes and stores what comes back next to them."""

    def __init__(self, workers: int, options: argparse.Namespace) -> None:
        """Start when the first checkpoint comes."""
        self._pool = (
            ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) if workers else None
        )
        self._options = options
        self._waiting: list[tuple[Path, dict[int, Future[list[float]]]]] = []

    def submit(self, name: str, checkpoint: Path, kind: str, seeds: Sequence[int]) -> None:
        """Play a checkpoint of an algorithm, unless that was done before."""
        out = checkpoint / f"{kind}.json"
        if out.exists() or any(path == out for path, _ in self._waiting):
            return
        options, device = self._options, "cpu"
        if name in PLANNERS:
            device = str(find_device(options.device))
        acting = acting_settings(name, checkpoint.name)
        game = Game(options.curve_episodes, CURVE_SEED, 0, acting, device)
        if kind == "score":
            game = Game(options.episodes, SCORE_SEED, options.tuning_episodes, acting, device)
        jobs = {seed: self._submit(str(checkpoint), seed, game) for seed in seeds}
        self._waiting.append((out, jobs))

    def _submit(self, folder: str, seed: int, game: Game) -> Future[list[float]]:
        if self._pool is not None:
            return self._pool.submit(play, folder, seed, game)
        done: Future[list[float]] = Future()
        done.set_result(play(folder, seed, game))
        return done

    def collect(self, *, wait: bool = False) -> None:
        """Store what has been played; with `wait`, all of it."""
        left = []
        for out, jobs in self._waiting:
            if wait or all(job.done() for job in jobs.values()):
                write_atomically(out, json.dumps({str(seed): job.result() for seed, job in jobs.items()}).encode())
            else:
                left.append((out, jobs))
        self._waiting = left

    def close(self) -> None:
        """Drop what has not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class Cell:
    """One algorithm on datasets of one environment: trains and evaluates what is missing."""

    def __init__(self, name: str, tasks: Sequence[str], options: argparse.Namespace, players: Players) -> None:
        """Name the files."""
        self.name = name
        self.tasks = list(tasks)
        self.options = options
        self.players = players
        self.seeds = list(range(options.seeds))
        self.folder = options.work / f"{name}_{'+'.join(tasks)}"
        values = {"steps": options.steps} if options.steps else {}
        self.settings = changed(PRESETS[name].settings, {**options.settings.get(name, {}), **values})

    def train(self, deadline: float) -> None:
        """Train to the end, and have all checkpoints played."""
        if not (self.folder / "trained.json").exists():
            self._train(deadline)
        for task in self.tasks:
            for step in self._steps():
                self.players.submit(self.name, self._checkpoint(step, task), "curve", self.seeds)
            self.players.submit(self.name, self._checkpoint(self.settings.steps, task), "score", self.seeds)

    def write(self) -> bool:
        """Write one result per task; False if some are still being played."""
        played = [(self._checkpoint(step, task) / "curve.json") for step in self._steps() for task in self.tasks]
        played += [self._checkpoint(self.settings.steps, task) / "score.json" for task in self.tasks]
        if not all(path.exists() for path in played):
            return False
        for task in self.tasks:
            self._write(task)
        return True

    def _steps(self) -> list[int]:
        """Steps of the points of the curve; the last is the end of training."""
        return sorted({self.settings.steps * point // self.options.curve for point in range(1, self.options.curve + 1)})

    def _checkpoint(self, step: int, task: str) -> Path:
        return Path(self.folder / "checkpoints" / f"{step}" / task)

    def _train(self, deadline: float) -> None:
        datasets = [load_npz(make_dataset(task, self.options.datasets, self.options.policies)) for task in self.tasks]
        learners = [Learner(seed, index) for index in range(len(self.tasks)) for seed in self.seeds]
        device = find_device(self.options.device)
        trainer, baseline = make_trainer(
            self.name, self.settings, datasets, learners, device=device, backend=self.options.backend
        )
        resume, clock = self.folder / "resume.safetensors", self.folder / "seconds.json"
        before = 0.0
        if resume.exists():
            trainer.load(resume)
            before = float(json.loads(clock.read_text())["seconds"])
        print(f"{self.name} on {', '.join(self.tasks)}: step {trainer.step} of {trainer.total_steps}", flush=True)
        points, started = set(self._steps()), time.monotonic()
        every = max(self.settings.steps // self.options.curve, 1)
        stopping, seconds = False, before
        for metrics in trainer.run(pause_every=every):
            if metrics is not None:
                losses = ", ".join(f"{name} {np.mean(values):.3g}" for name, values in metrics.losses.items())
                print(
                    f"{self.name} step {metrics.step}: {losses}; {metrics.steps_per_second:,.0f} steps/s, "
                    f"{metrics.seconds_left:.0f} s left",
                    flush=True,
                )
            if time.monotonic() > deadline:
                stopping = True
            if trainer.step in points or stopping:
                if trainer.step in points:
                    self._keep(trainer, baseline, datasets)
                self.folder.mkdir(parents=True, exist_ok=True)
                trainer.save(resume)
                seconds = before + time.monotonic() - started
                write_atomically(clock, json.dumps({"seconds": seconds}).encode())
            if stopping and trainer.step < trainer.total_steps:
                raise OutOfTimeError
            self.players.collect()
        write_atomically(self.folder / "trained.json", json.dumps({"seconds": seconds}).encode())

    def _keep(self, trainer: BaselineTrainer[Any], baseline: Baseline, datasets: Sequence[Dataset]) -> None:
        """Save a checkpoint of every task, and have it played."""
        for index, task in enumerate(self.tasks):
            own = baseline.take(range(index * len(self.seeds), (index + 1) * len(self.seeds)))
            folder = self._checkpoint(trainer.step, task)
            replace(own, metadata=dict(datasets[index].metadata)).save(folder)
            self.players.submit(self.name, folder, "curve", self.seeds)

    def _scores(self, step: int, task: str, kind: str) -> list[list[float]]:
        """Normalised scores of the episodes of each training seed."""
        folder = self._checkpoint(step, task)
        references = references_of(str(Baseline.load(folder).metadata["env"]))
        assert references is not None, "benchmark tasks have reference scores"
        stored = json.loads((folder / f"{kind}.json").read_text())
        return [[normalized_score(value, references) for value in stored[str(seed)]] for seed in self.seeds]

    def _acting(self, task: str) -> dict[str, object]:
        """What was chosen on tuning seeds, for algorithms with settings for acting."""
        folder = self._checkpoint(self.settings.steps, task)
        paths = {str(seed): folder / f"acting_{seed}.json" for seed in self.seeds}
        return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}

    def _write(self, task: str) -> None:
        """Write the result of one task."""
        steps = self.settings.steps
        stored = json.loads((self._checkpoint(steps, task) / "score.json").read_text())
        scores = self._scores(steps, task, "score")
        returns = [float(np.mean(stored[str(seed)])) for seed in self.seeds]
        seconds = float(json.loads((self.folder / "trained.json").read_text())["seconds"])
        curve = [
            {"step": step, "scores": [float(np.mean(each)) for each in self._scores(step, task, "curve")]}
            for step in self._steps()
        ]
        write_result(
            self.options.out / f"{task}_{self.name}.json",
            name=f"baseline {task} {self.name}",
            command="python " + shlex.join(sys.argv),
            device=find_device(self.options.device),
            seeds=[SCORE_SEED + index for index in range(self.options.episodes)],
            seconds=seconds,
            metrics={
                **summary("normalized_score", scores),
                **summarize("return", returns),
                "train_steps": steps,
                "seconds_train": seconds,
                "tasks_trained_together": len(self.tasks),
            },
            details={
                "settings": {"task": task, "algorithm": self.name, **settings_dict(self.settings)},
                "training_seeds": self.seeds,
                "scores": scores,
                "returns": {str(seed): stored[str(seed)] for seed in self.seeds},
                "acting": self._acting(task),
                "curve": curve,
                "curve_episodes": self.options.curve_episodes,
            },
        )
        shown = summary("score", scores)
        print(f"{task} {self.name}: {shown['score']:.1f} ± {shown['score_stderr']:.1f}", flush=True)


def write_table(options: argparse.Namespace) -> None:
    """Write the table of all cells that exist."""
    metrics: dict[str, float] = {}
    cells: dict[str, dict[str, float]] = {}
    for name in ALGORITHMS + tuple(sorted(set(options.algorithms) - set(ALGORITHMS))):
        found = {}
        for task in TASKS:
            path = options.out / f"{task}_{name}.json"
            if path.exists():
                found[task] = json.loads(path.read_text())["metrics"]
                metrics[f"{task}_{name}"] = found[task]["normalized_score"]
                metrics[f"{task}_{name}_stderr"] = found[task]["normalized_score_stderr"]
        if found:
            metrics[f"{name}_average"] = float(np.mean([each["normalized_score"] for each in found.values()]))
            errors = np.array([each["normalized_score_stderr"] for each in found.values()])
            metrics[f"{name}_average_stderr"] = float(np.sqrt(np.square(errors).sum()) / len(errors))
            metrics[f"{name}_average_n"] = len(found)
            cells[name] = {task: each["normalized_score"] for task, each in found.items()}
    write_result(
        options.out / "table.json",
        name="baselines table",
        command="python " + shlex.join(sys.argv),
        device=find_device(options.device),
        seeds=list(range(options.seeds)),
        seconds=0.0,
        metrics=metrics,
        details={"cells": cells},
    )
    for name, row in cells.items():
        shown = ", ".join(f"{task} {score:.1f}" for task, score in row.items())
        print(f"{name}: average {metrics[f'{name}_average']:.1f} over {len(row)} tasks ({shown})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when the table is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=Path, required=True, help="folder of <task>.npz")
    parser.add_argument("--policies", type=Path, default=None, help="folder of the actor files to collect with")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--steps", type=int, default=None, help="training steps; default: those of the presets")
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds")
    parser.add_argument("--episodes", type=int, default=15, help="episodes per training seed for the score")
    parser.add_argument("--curve", type=int, default=10, help="points of the evaluation curve")
    parser.add_argument("--curve_episodes", type=int, default=5, help="episodes per training seed for a point")
    parser.add_argument("--tuning_episodes", type=int, default=5, help="episodes that choose settings for acting")
    parser.add_argument("--settings", type=json.loads, default={}, help='to change, as {"brac": {"penalty": 1.0}}')
    parser.add_argument("--workers", type=int, default=3, help="processes that play episodes; 0: this one")
    parser.add_argument("--work", type=Path, default=Path("runs/baselines"), help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("results/baselines"))
    parser.add_argument("--backend", choices=("auto", "eager", "captured", "compiled"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this job ends")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.time_limit if options.time_limit else float("inf")
    players = Players(options.workers, options)
    trained: list[Cell] = []  # and not yet played
    try:
        for env in dict.fromkeys(task.partition("-")[0] for task in options.tasks):
            for name in options.algorithms:
                own = [task for task in options.tasks if task.partition("-")[0] == env]
                missing = [task for task in own if not (options.out / f"{task}_{name}.json").exists()]
                if missing:
                    trained.append(Cell(name, missing, options, players))
                    trained[-1].train(deadline)
                players.collect()
                trained = [cell for cell in trained if not cell.write()]
        players.collect(wait=True)
        assert all([cell.write() for cell in trained]), "everything has been played"
    except OutOfTimeError:
        players.collect(wait=True)
        print("out of time; run the same command to continue", flush=True)
        return MORE_TO_DO
    finally:
        players.close()
    write_table(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
