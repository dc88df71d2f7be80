"""A score of the paper from nothing: collect the data, train the reference recipe, evaluate it, write one result.

    python benchmarks/paper/run.py --task hopper-medium-expert --policies DIR --work DIR --out results/paper/NAME.json

Every stage is a `tt` command and writes a file to the work folder, so the same command continues a job that was
interrupted: finished stages are skipped, and training resumes from its last checkpoint. `--time_limit` stops before a
limit; exit code 75 then means that there is more to do. The data is a function of its recipe and is collected again if
it is missing, so a folder that moves between machines needs only `run/`, the `*.json` and `evaluation/`.

Flags of `tt train` and `tt evaluate` in the groups tokens, model, train and search override the preset's. Episodes are
played with seeds that nothing else uses: tune on others (the default of `tt evaluate` starts at 1,000,000).
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from trajectory_transformer.cli import main as tt
from trajectory_transformer.config import PRESETS
from trajectory_transformer.data.episode import Episode, load_npz
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.evaluate import episode_metrics
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.recipes import find_recipe
from trajectory_transformer.results import write_result

MORE_TO_DO = 75  # the exit code of programs that ask to be started again
EVALUATION_SEED, EXPERT_SEED = 7_000_000, 8_000_000
MEASURED = ("return", "normalized_score", "steps")
LONGER = {"hopper-medium-replay": 80, "walker2d-medium-replay": 80}  # epochs of the authors; all others 50
EPOCH = 1_000_000  # windows of an epoch in the authors' code, whatever the size of the dataset


class OutOfTimeError(Exception):
    """The time limit is reached; finished work is kept."""


class Stopwatch:
    """Seconds of a stage over all jobs, stored every few seconds, so that an interrupted job loses little."""

    def __init__(self, path: Path) -> None:
        """Continue from a file, if there is one."""
        self._path = path
        self.seconds = float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        before, started, over = self.seconds, time.perf_counter(), threading.Event()

        def note() -> None:
            self.seconds = before + time.perf_counter() - started
            write_atomically(self._path, json.dumps({"seconds": self.seconds}).encode())

        def keep_noting() -> None:
            while not over.wait(5.0):
                note()

        thread = threading.Thread(target=keep_noting, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            note()


class Job:
    """One invocation of the script: its options and its deadline."""

    def __init__(self, options: argparse.Namespace, passed: Sequence[str]) -> None:
        """Read the recipe; `passed` are flags for the commands."""
        self.options = options
        self.started = time.monotonic()
        self.run = options.work / "run"
        self.collected, self.trained, self.watched = (
            options.work / f"{stage}.json" for stage in ("collected", "trained", "expert")
        )
        self.stopwatch = Stopwatch(options.work / "seconds.json")
        groups = {"train": ("--tokens.", "--model.", "--train."), "evaluate": ("--search.",)}
        pairs = [list(passed[index : index + 2]) for index in range(0, len(passed), 2)]
        self.flags = {
            command: [word for pair in pairs if pair[0].startswith(starts) for word in pair]
            for command, starts in groups.items()
        }
        unknown = [pair[0] for pair in pairs if not pair[0].startswith(sum(groups.values(), ()))]
        if unknown or len(passed) % 2:
            raise SystemExit(
                f"{(unknown or passed[-1:])[0]}: not a flag of this script, and not a --GROUP.NAME VALUE of tt"
            )
        self.recipe = yaml.safe_load(find_recipe(options.task).read_text(encoding="utf-8"))

    @property
    def expert(self) -> str | None:
        """The policy that scores are compared with: that of the last part, if the task is named after it."""
        return str(self.recipe["parts"][-1]["policy"]) if self.options.task.endswith("-expert") else None

    def left(self) -> float:
        """Seconds before the limit."""
        limit = self.options.time_limit
        return math.inf if limit is None else float(limit - (time.monotonic() - self.started))

    def tt(self, *words: object) -> None:
        """Run a command; if it was stopped, or no time is left, end the job."""
        if self.left() <= 0:
            raise OutOfTimeError
        print("$ tt " + shlex.join(map(str, words)), flush=True)
        with _ctrl_c_after(self.left()):
            code = tt([str(word) for word in words])
        if code == 130 and self.left() <= 0:
            raise OutOfTimeError
        if code:
            raise SystemExit(code)

    def data(self) -> str:
        """The dataset, collected now if it is neither given nor present."""
        options = self.options
        if options.dataset is not None:
            return str(options.dataset)
        data = options.work / "data.npz"
        if not data.exists():
            recipe = options.task
            if options.scale != 1:
                recipe = options.work / "recipe.yaml"
                steps = [max(1, round(part["steps"] * options.scale)) for part in self.recipe["parts"]]
                parts = [{**part, "steps": count} for part, count in zip(self.recipe["parts"], steps, strict=True)]
                write_atomically(recipe, yaml.safe_dump({**self.recipe, "parts": parts}).encode())
            words = ["--recipe", recipe, "--policies", options.policies, "--seed", 0]
            self.tt("collect", *words, "--out", data, "--result", self.collected, "--overwrite", "true")
        return str(data)

    def train(self) -> None:
        """Train to the end, or until the deadline."""
        options = self.options
        if self.trained.exists():
            return
        dataset = self.data()
        with self.stopwatch.running():
            if self.run.exists():
                self.tt("train", dataset, "--resume", self.run, "--device", options.device)
            else:
                given = dict(zip(self.flags["train"][::2], self.flags["train"][1::2], strict=True))
                windows = LONGER.get(options.task, 50) * EPOCH * options.scale
                steps = max(1, round(windows / int(given.get("--train.batch_size", 256))))
                settings = ["--preset", preset_of(options.task), "--tokens.discretizer", options.discretizer]
                settings += ["--train.steps", "null" if "--train.epochs" in given else steps]
                settings += ["--seed", options.seed, "--checkpoint_every", 5000, *self.flags["train"]]
                self.tt("train", dataset, "--out", self.run, "--device", options.device, *settings)
        last = json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])
        write_atomically(self.trained, (json.dumps(last, indent=2) + "\n").encode())

    def watch_expert(self) -> None:
        """Measure the return of the expert itself."""
        if self.expert is None or self.watched.exists():
            return
        out = self.options.work / "expert.npz"
        out.unlink(missing_ok=True)  # of an interrupted job
        words = ["--env", self.recipe["env"], "--policy", self.expert, "--policies", self.options.policies]
        words += ["--episodes", self.options.expert_episodes, "--seed", EXPERT_SEED]
        self.tt("collect", *words, "--out", out, "--result", self.watched, "--overwrite", "true")

    def evaluate(self) -> list[Path]:
        """Play all episodes, `at_once` at a time; returns the result file of each part.

        Parts are stored by the name of the result file, because one model may be evaluated with several searches.
        """
        options, results = self.options, []
        at_once = options.at_once or options.episodes
        for first in range(0, options.episodes, at_once):
            path = options.work / "evaluation" / options.out.stem / f"{first}.json"
            results.append(path)
            if path.exists():
                continue
            path.with_suffix(".npz").unlink(missing_ok=True)
            count = min(at_once, options.episodes - first)
            words = [self.run, "--preset", preset_of(options.task), "--plan", options.plan, "--episodes", count]
            words += ["--num_envs", count, "--seed", EVALUATION_SEED + first, "--device", options.device]
            self.tt("evaluate", *words, "--out", path, *self.flags["evaluate"])
        return results

    def write(self, parts: Sequence[Path]) -> None:
        """Write one result file from those of all stages."""
        options = self.options
        episodes: list[Episode] = [each for part in parts for each in load_npz(part.with_suffix(".npz"))]
        evaluations = [json.loads(part.read_text()) for part in parts]
        found = episode_metrics(episodes, references_of(self.recipe["env"]))
        metrics = {name: value for name, value in found.items() if name.startswith(MEASURED)}
        if self.expert is not None:
            metrics |= percent_of(metrics, json.loads(self.watched.read_text())["metrics"])
        if self.collected.exists():
            metrics["seconds_collect"] = json.loads(self.collected.read_text())["seconds"]
        metrics["seconds_train"] = self.stopwatch.seconds
        metrics["seconds_evaluate"] = sum(each["seconds"] for each in evaluations)
        trained = json.loads(self.trained.read_text())
        metrics["train_steps"] = trained["step"]
        metrics |= {f"loss_{kind}": loss for kind, loss in trained["losses"].items()}
        for name in ("plan_ms_p50", "plan_ms_p99"):
            metrics[name] = max(each["metrics"][name] for each in evaluations)
        stages = [name for name in ("seconds_collect", "seconds_train", "seconds_evaluate") if name in metrics]
        write_result(
            options.out,
            name=f"paper {options.task} {options.discretizer} {options.plan}",
            command="python " + shlex.join(sys.argv),
            device=find_device(options.device),
            seeds=[EVALUATION_SEED + index for index in range(options.episodes)],
            seconds=sum(metrics[name] for name in stages),
            metrics=metrics,
            details={
                "settings": {**evaluations[0]["settings"], "train": json.loads((self.run / "run.json").read_text())},
                "returns": [episode.total_reward for episode in episodes],
                "lengths": [len(episode) for episode in episodes],
            },
        )


def preset_of(task: str) -> str:
    """The preset of a task, of its environment, or the general one."""
    names = [task, task.partition("-")[0], "reference"]
    return next(name for name in names if name in PRESETS)


def percent_of(metrics: dict[str, float], expert: dict[str, float]) -> dict[str, float]:
    """A mean return in percent of the expert's, with the standard errors of both combined if both are known."""
    share = metrics["return"] / expert["return"]
    found = {"percent_of_expert": 100 * share, "percent_of_expert_n": metrics["return_n"]}
    if "return_stderr" in metrics and "return_stderr" in expert:
        error = math.hypot(metrics["return_stderr"], share * expert["return_stderr"]) / abs(expert["return"])
        found["percent_of_expert_stderr"] = 100 * error
    names = ("return", "return_stderr", "return_n")
    return found | {f"expert_{name}": expert[name] for name in names if name in expert}


@contextmanager
def _ctrl_c_after(seconds: float) -> Iterator[None]:
    """Send Ctrl-C after a time: training then writes a checkpoint."""
    if math.isinf(seconds):
        yield
        return
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when the result is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="name (such as hopper-medium) or path of a recipe")
    parser.add_argument("--discretizer", choices=("quantile", "uniform"), default="quantile")
    parser.add_argument("--plan", choices=("return", "imitate"), default="return")
    parser.add_argument("--policies", type=Path, default=None, help="folder of the actor files to collect with")
    parser.add_argument("--dataset", default=None, help="train on this instead of collecting")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the stages")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--until", choices=("collect", "train", "evaluate"), default="evaluate", help="last stage")
    parser.add_argument("--episodes", type=int, default=15)
    parser.add_argument("--expert_episodes", type=int, default=100, help="episodes of the expert")
    parser.add_argument("--at_once", type=int, default=None, help="episodes played at once; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training")
    parser.add_argument("--scale", type=float, default=1.0, help="share of data and training, for a trial")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this job ends")
    parser.add_argument("--device", default="auto")
    options, passed = parser.parse_known_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    job = Job(options, passed)
    try:
        if options.until == "collect":
            job.data()
            return 0
        job.train()
        if options.until == "train":
            return 0
        job.watch_expert()
        job.write(job.evaluate())
    except (OutOfTimeError, KeyboardInterrupt):
        if job.left() > 0:
            raise
        print("out of time; run the same command to continue", flush=True)
        return MORE_TO_DO
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
