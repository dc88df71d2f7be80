"""Scores of the baselines on the benchmark datasets, with several training seeds, and the table of all of them.

    python benchmarks/baselines_table.py --datasets DIR [--policies DIR] [--algorithms iql ...] [--tasks TASK ...]

Datasets are read from DIR/<task>.npz. A missing one is collected there by its recipe, if --policies names the folder of
actor files. Datasets of one environment have equal sizes, so an algorithm trains on all of them, with all seeds, in the
same steps. Meanwhile other processes play the checkpoints: 5 episodes for a point of the curve, 15 for the score, with
seeds that nothing else uses. Where a paper chooses settings for acting for every task (the target return of dt, noise
and temperature of mbop), they are chosen here for every training seed, on tuning seeds. The penalty of brac, which its
paper chooses for every task too, is chosen for every environment, by a training seed that is not scored.

A cell is one algorithm on one dataset: results/baselines/<task>_<algorithm>.json. Cells that exist are skipped. The
same command continues what was interrupted, from the last checkpoint in --work. `--time_limit` stops before a limit;
exit code 75 then means that there is more to do. With `--trainings 3`, three algorithms train at a time in processes of
their own: one compiles while others train, and data is collected beside them.

The last step writes results/baselines/table.json from all cells that exist: `<task>_<algorithm>` is the mean score over
training seeds, `_stderr` its standard error over training seeds, and `<algorithm>_average` the mean over tasks.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.baselines_players import SCORE_SEED, OutOfTimeError, Players
from benchmarks.baselines_together import make_together, progress_line, save_apart
from benchmarks.paper.locomotion_data import TASKS, make_dataset, parts_of
from benchmarks.paper.table import MORE_TO_DO, Job, Queue, command, renamed, summary
from trajectory_transformer.baselines import PRESETS, Baseline, BaselineTrainer
from trajectory_transformer.baselines.algorithm import Settings
from trajectory_transformer.baselines.presets import changed, settings_dict
from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import summarize, with_error, write_result

ALGORITHMS = ("bc", "td3bc", "iql", "cql", "brac", "dt", "mbop")
CHOICES = {"brac": [{"penalty": value} for value in (0.1, 1.0, 10.0)]}  # settings of training to choose from
CHOICE_SEED = 1000  # of the training that chooses
SHARED = (
    "datasets", "policies", "steps", "seeds", "episodes", "curve", "curve_episodes", "tuning_episodes", "workers",
    "work", "out", "backend", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One algorithm on datasets of one environment: trains and evaluates what is missing."""

    name: str
    tasks: list[str]
    options: argparse.Namespace
    players: Players
    seeds: list[int]  # of training
    curve: int  # points
    folder: Path
    settings: Settings

    def train(self, late: Callable[[], bool]) -> "Cell":
        """Train to the end, and have all checkpoints played; returns the cell with the settings that were chosen."""
        given = self.options.settings.get(self.name, {})
        choices = [values for values in CHOICES.get(self.name, []) if not values.keys() & given.keys()]
        cell = replace(self, settings=changed(self.settings, self._choose(choices, late))) if choices else self
        cell.make_curve(late)
        for task in cell.tasks:
            cell.players.submit(cell.name, cell._checkpoint(cell.settings.steps, task), "score", cell.seeds)
        return cell

    def make_curve(self, late: Callable[[], bool]) -> None:
        """Train to the end, and have the points of the curve played."""
        if not (self.folder / "trained.json").exists():
            self._train(late)
        for task in self.tasks:
            for step in self._steps():
                self.players.submit(self.name, self._checkpoint(step, task), "curve", self.seeds)

    def _choose(self, choices: Sequence[dict[str, float]], late: Callable[[], bool]) -> dict[str, float]:
        """The best settings after half of the training, mean over tasks, with a training seed of their own."""
        path = self.folder / "chosen.json"
        if not path.exists():
            trials = [
                replace(
                    self,
                    settings=changed(self.settings, {**values, "steps": max(self.settings.steps // 2, 1)}),
                    folder=self.folder / f"choice_{index}",
                    seeds=[CHOICE_SEED],
                    curve=1,
                )
                for index, values in enumerate(choices)
            ]
            for trial in trials:
                trial.make_curve(late)
            self.players.finish(late)
            means = [
                float(np.mean([trial._scores(trial.settings.steps, task, "curve") for task in self.tasks]))
                for trial in trials
            ]
            record = {"chosen": choices[int(np.argmax(means))], "tried": list(zip(choices, means, strict=True))}
            write_atomically(path, json.dumps(record).encode())
        return dict(json.loads(path.read_text())["chosen"])

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
        return sorted({self._every * point for point in range(1, self.curve)} | {self.settings.steps})

    @property
    def _every(self) -> int:
        return max(self.settings.steps // self.curve, 1)

    def _checkpoint(self, step: int, task: str) -> Path:
        return Path(self.folder / "checkpoints" / f"{step}" / task)

    def _train(self, late: Callable[[], bool]) -> None:
        datasets = [load_npz(make_dataset(task, self.options.datasets, self.options.policies)) for task in self.tasks]
        device = find_device(self.options.device)
        trainer, baseline = make_together(self.name, self.settings, datasets, self.seeds, device, self.options.backend)
        resume, clock = self.folder / "resume.safetensors", self.folder / "seconds.json"
        before = 0.0
        if resume.exists():
            trainer.load(resume)
            before = float(json.loads(clock.read_text())["seconds"])
        print(f"{self.name} on {', '.join(self.tasks)}: step {trainer.step} of {trainer.total_steps}", flush=True)
        points, started = set(self._steps()), time.monotonic()
        stopping, seconds = False, before
        for metrics in trainer.run(pause_every=self._every):
            if metrics is not None:
                print(progress_line(self.name, metrics), flush=True)
            stopping = stopping or late()
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
        folders = [self._checkpoint(trainer.step, task) for task in self.tasks]
        save_apart(baseline, datasets, self.seeds, folders)
        for folder in folders:
            self.players.submit(self.name, folder, "curve", self.seeds)

    def _scores(self, step: int, task: str, kind: str) -> list[list[float]]:
        """Normalised scores of the episodes of each training seed."""
        folder = self._checkpoint(step, task)
        references = references_of(str(Baseline.load(folder).metadata["env"]))
        assert references is not None, "benchmark tasks have reference scores"
        stored = json.loads((folder / f"{kind}.json").read_text())
        return [[normalized_score(value, references) for value in stored[str(seed)]] for seed in self.seeds]

    def _chosen(self) -> dict[str, object]:
        """What was chosen for training, for algorithms with such settings."""
        path = self.folder / "chosen.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

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
                "chosen": self._chosen(),
                "acting": self._acting(task),
                "curve": curve,
                "curve_episodes": self.options.curve_episodes,
            },
        )
        print(f"{task} {self.name}: {with_error(summary('score', scores), 'score')}", flush=True)


def make_cell(name: str, tasks: Sequence[str], options: argparse.Namespace, players: Players) -> Cell:
    """A cell with the settings of the preset, those of the user, and all training seeds."""
    values = {"steps": options.steps} if options.steps else {}
    return Cell(
        name=name,
        tasks=list(tasks),
        options=options,
        players=players,
        seeds=list(range(options.seeds)),
        curve=options.curve,
        folder=options.work / f"{name}_{'+'.join(tasks)}",
        settings=changed(PRESETS[name].settings, {**options.settings.get(name, {}), **values}),
    )


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
                metrics |= renamed(found[task], "normalized_score", f"{task}_{name}")
        if found:
            metrics[f"{name}_average"] = float(np.mean([each["normalized_score"] for each in found.values()]))
            errors = [each["normalized_score_stderr"] for each in found.values() if "normalized_score_stderr" in each]
            if len(errors) == len(found):
                metrics[f"{name}_average_stderr"] = float(np.linalg.norm(errors) / len(errors))
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the script."""
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
    parser.add_argument(
        "--trainings", type=int, default=0, help="algorithms at a time, as processes; 0: one by one in this process"
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that play episodes; 0: this one")
    parser.add_argument("--work", type=Path, default=Path("runs/baselines"), help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("results/baselines"))
    parser.add_argument("--backend", choices=("auto", "eager", "captured", "compiled"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this job ends")
    return parser.parse_args(arguments)


def missing_cells(options: argparse.Namespace, algorithms: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Algorithms and those tasks of one environment that they have no result of."""
    found = []
    for env in dict.fromkeys(task.partition("-")[0] for task in options.tasks):
        own = [task for task in options.tasks if task.partition("-")[0] == env]
        for name in algorithms:
            missing = [task for task in own if not (options.out / f"{task}_{name}.json").exists()]
            if missing:
                found.append((name, missing))
    return found


def jobs(options: argparse.Namespace) -> list[Job]:
    """One job for every dataset that is missing and for its parts, and one for every algorithm on an environment."""
    cells = missing_cells(options, sorted(options.algorithms, key=longest_first))
    script = Path(__file__)
    found = []
    needed = dict.fromkeys(task for _, tasks in cells for task in tasks)
    missing = [task for task in needed if not (options.datasets / f"{task}.npz").exists()]
    if missing and options.policies is None:
        raise SystemExit(f"{options.datasets / missing[0]}.npz does not exist; give --policies to collect it")
    for task in dict.fromkeys(name for whole in missing for name in (*parts_of(whole), whole)):
        data = (script.parent / "paper" / "locomotion_data.py", task, "--policies", options.policies)
        words = (*data, "--out", options.datasets, "--episodes", 0)
        parts = tuple(options.datasets / f"{part}.npz" for part in parts_of(task) if part != task)
        found.append(Job("collect", options.datasets / f"{task}.npz", command(sys.executable, *words), parts))
    given = [(f"--{name}", getattr(options, name)) for name in SHARED if getattr(options, name) is not None]
    shared = [word for pair in given for word in pair] + ["--settings", json.dumps(options.settings)]
    for name, tasks in cells:
        own = command(sys.executable, script, *shared, "--algorithms", name, "--tasks", *tasks)
        needs = tuple(options.datasets / f"{task}.npz" for task in tasks)
        found.append(Job("train", options.out / f"{tasks[-1]}_{name}.json", own, needs))  # the last one it writes
    return found


def longest_first(name: str) -> int:
    """Sorts algorithms by the time that they take."""
    order = ("cql", "iql", "dt", "td3bc", "mbop", "brac", "bc")
    return order.index(name) if name in order else -1


def train_here(options: argparse.Namespace, deadline: float) -> bool:
    """Train and play one algorithm after the other; False if the time limit or Ctrl-C came first."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    def late() -> bool:
        return interrupted or time.monotonic() > deadline

    players = Players(options.workers, options)
    trained: list[Cell] = []  # and not yet played
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for name, tasks in missing_cells(options, options.algorithms):
            trained.append(make_cell(name, tasks, options, players).train(late))
            players.collect()
            trained = [cell for cell in trained if not cell.write()]
        players.finish(late)
        assert all([cell.write() for cell in trained]), "everything has been played"
    except OutOfTimeError:
        players.stop()
        return False
    finally:
        players.close()
        signal.signal(signal.SIGINT, before)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when the table is written."""
    options = parse(arguments)
    deadline = time.monotonic() + options.time_limit if options.time_limit else float("inf")
    if options.trainings:
        slots = {"collect": 2, "train": options.trainings}
        complete = Queue(slots, options.work / "logs", deadline).run(jobs(options))
    else:
        complete = train_here(options, deadline)
    if not complete:
        print("out of time; run the same command to continue", flush=True)
        return MORE_TO_DO
    write_table(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
