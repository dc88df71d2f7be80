"""The locomotion table of the paper from nothing: nine datasets, two discretizers, three training seeds, one recipe.

    python benchmarks/paper/table.py --policies DIR --work DIR [--tasks TASK ...] [--parts scores ablations imitation]

Every job is a command that writes a file to the work folder: data is collected while models train, and models play
while others train. The same command continues what was interrupted: finished jobs are skipped, and training resumes
from its last checkpoint. `--time_limit` stops before a limit; exit code 75 then means that there is more to do. Data is
a function of its recipe and is collected again where it is missing and needed.

All models use the preset `default`; flags of `tt train` and `tt evaluate` override it for all of them (`--train.steps`,
`--search.horizon`). Scores come from episodes with seeds that nothing else uses; tune on others (1,000,000 and up).

Writes <out>/<task>_<discretizer>.json for every cell, <out>/table.json, <out>/ablations.json and <out>/imitation.json.
`x_stderr` is the standard error over training seeds, `x_stderr_episodes` that over all episodes. `--time_to_score FILE`
writes the wall time of the command.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.paper.locomotion_data import ENVIRONMENTS, TASKS
from trajectory_transformer.config import PRESETS
from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import summarize, write_result

MORE_TO_DO = 75  # the exit code of programs that ask to be started again
SCORE_SEED = 7_000_000
DISCRETIZERS = ("quantile", "uniform")
TT = (sys.executable, "-m", "trajectory_transformer")
ABLATIONS: dict[str, dict[str, object] | None] = {
    "no_search": {"beam_width": 1, "expansion": 1, "horizon": 1, "first_action": "null"},
    "authors_search": None,  # the search of the preset of the task
    "sampled_rewards": {"reward.top_k": "null"},
    "nucleus": {"action.nucleus": 0.4, "action.middle": "null"},
    "filtered_opening": {"first_action": "null"},
}
IMITATION = {"mode": "mode", "median": "median"}


@dataclass(frozen=True)
class Job:
    """A command that makes a file."""

    kind: str  # collect, train or play: how many run at a time
    out: Path
    command: tuple[str, ...]
    needs: tuple[Path, ...] = ()
    resume: tuple[str, ...] = ()  # the command where an earlier one was interrupted
    started: Path | None = None  # exists if an earlier one was interrupted
    lane: str = ""  # jobs of a lane run one after the other: they share files

    @property
    def ready(self) -> bool:
        """Whether all inputs exist."""
        return all(path.exists() for path in self.needs)


@dataclass
class Queue:
    """Runs jobs as processes, a number of each kind at a time."""

    slots: dict[str, int]
    logs: Path
    deadline: float
    _running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = field(default_factory=dict)
    _ended: list[Job] = field(default_factory=list)  # since the last report

    def run(self, jobs: Sequence[Job]) -> bool:
        """Run all jobs whose files are missing, but those of kinds without a slot; whether nothing is missing then."""
        waiting = [job for job in jobs if not job.out.exists() and self.slots[job.kind]]
        total, started = len(waiting), time.monotonic()
        while waiting or self._running:
            late = time.monotonic() > self.deadline
            for job in list(waiting):
                running = [other for other, _ in self._running.values()]
                busy = sum(other.kind == job.kind for other in running)
                in_lane = job.lane != "" and any(other.lane == job.lane for other in running)
                if not late and job.ready and busy < self.slots[job.kind] and not in_lane:
                    waiting.remove(job)
                    self._start(job)
            if late:
                for job, process in self._running.values():
                    process.send_signal(signal.SIGINT if job.kind == "train" else signal.SIGTERM)
                waiting.clear()
            if not self._running and waiting:
                raise SystemExit(f"{waiting[0].out} needs {', '.join(map(str, waiting[0].needs))}, which no job makes")
            self._wait(late)
            if not late and self._ended:
                done = total - len(waiting) - len(self._running)
                names = ", ".join(f"{job.kind} {job.out.parent.name}/{job.out.stem}" for job in self._ended)
                print(f"{time.monotonic() - started:5.0f} s: {done} of {total} jobs, {names}", flush=True)
                self._ended.clear()
        return all(job.out.exists() for job in jobs)

    def _start(self, job: Job) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        interrupted = job.started is not None and job.started.exists()
        command = job.resume if interrupted else job.command
        with (self.logs / f"{job.kind}_{job.out.parent.name}_{job.out.stem}.log").open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            # Where NVIDIA's Multi-Process Service shares the GPU, evaluations give way to trainings: on an H200, twelve
            # of them slowed a training of the same priority 19 times, and one of higher priority 1.7 times.
            lower = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if job.kind == "play" else {}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | lower)
        self._running[process.pid] = job, process

    def _wait(self, late: bool) -> None:
        """Wait until a process ends, or for a moment; `late` waits for all of them."""
        time.sleep(0.2)
        for pid, (job, process) in list(self._running.items()):
            code = process.wait() if late else process.poll()
            if code is None:
                continue
            del self._running[pid]
            self._ended.append(job)
            if code and not late:
                for _, other in self._running.values():
                    other.send_signal(signal.SIGINT)
                log = self.logs / f"{job.kind}_{job.out.parent.name}_{job.out.stem}.log"
                raise SystemExit(f"{shlex.join(job.command)} failed, see {log}:\n{tail(log)}")


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True)
class Plan:
    """Which jobs there are, and where their files lie."""

    options: argparse.Namespace
    train_flags: tuple[str, ...]
    search_flags: tuple[str, ...]

    @property
    def _data(self) -> Path:
        return Path(self.options.datasets or self.options.work / "data")

    def data(self, task: str) -> Path:
        """The dataset of a task."""
        return self._data / f"{task}.npz"

    def _name(self, task: str, discretizer: str, seed: int) -> str:
        return f"{task}_{discretizer}_{seed}"

    def facts(self, task: str) -> Path:
        """What the data and its policies score."""
        return self._data / f"{task}.json"

    def played(self, task: str, discretizer: str, seed: int, variant: str = "score") -> Path:
        """Episodes of a model."""
        return Path(self.options.work / "played" / variant / f"{self._name(task, discretizer, seed)}.json")

    def trained(self, task: str, discretizer: str, seed: int) -> Path:
        """Written when training ends."""
        return Path(self.options.work / "runs" / self._name(task, discretizer, seed) / "training.json")

    def collect(self, tasks: Sequence[str], to_train: Collection[str]) -> Iterator[Job]:
        """One job for each dataset and its facts; data of tasks without a model to train may be missing."""
        for task in tasks:
            data, facts = self.data(task), self.facts(task)
            words = ["--policies", str(self.options.policies), "--out", str(self._data), "--scale", self.options.scale]
            words += ["--episodes", self.options.policy_episodes, "--workers", os.cpu_count() or 1]
            script = Path(__file__).with_name("locomotion_data.py")
            out = data if facts.exists() and task in to_train else facts
            yield Job("collect", out, command(sys.executable, script, task, *words), lane=task.partition("-")[0])

    def train(self, task: str, discretizer: str, seed: int) -> Job:
        """Train one model."""
        out, data = self.trained(task, discretizer, seed), self.data(task)
        device = ("--device", self.options.device)
        recipe = ("--preset", "default", "--tokens.discretizer", discretizer)
        settings = (*recipe, "--seed", seed, "--checkpoint_every", 5000)
        return Job(
            "train",
            out,
            command(*TT, "train", data, "--out", out.parent, *device, *settings, *self.train_flags),
            (data,),
            command(*TT, "train", data, "--resume", out.parent, *device),
            out.with_name("run.json"),
        )

    def play(self, task: str, discretizer: str, seed: int, variant: str = "score", *more: object) -> Job:
        """Play episodes with one model."""
        run, episodes = self.trained(task, discretizer, seed), self.options.episodes
        out = self.played(task, discretizer, seed, variant)
        words = ("--episodes", episodes, "--num_envs", episodes, "--seed", SCORE_SEED, "--device", self.options.device)
        flags = () if "--preset" in more else self.search_flags
        return Job("play", out, command(*TT, "evaluate", run.parent, *words, *flags, *more, "--out", out), (run,))

    def cells(self) -> list[tuple[str, str]]:
        """Task and discretizer of every cell."""
        return [(task, discretizer) for task in self.options.tasks for discretizer in self.options.discretizers]

    def ablated(self) -> list[str]:
        """Tasks with ablations."""
        return [task for task in self.options.tasks if task.endswith("medium-expert")]

    def jobs(self) -> list[Job]:
        """All jobs, those that others wait for first."""
        options = self.options
        found: list[Job] = []
        experts = [f"{env}-expert" for env in ENVIRONMENTS if any(task.startswith(env) for task in options.tasks)]
        tasks = list(options.tasks) if {"scores", "ablations"} & set(options.parts) else []
        tasks += experts if "imitation" in options.parts else []
        models = [(task, discretizer) for task, discretizer in self.cells() if "scores" in options.parts]
        models += [(task, options.best) for task in self.ablated() if "ablations" in options.parts]
        models += [(task, options.best) for task in experts if "imitation" in options.parts]
        trainings = [
            (task, self.train(task, discretizer, seed))
            for task, discretizer in dict.fromkeys(models)
            for seed in range(options.seeds)
        ]
        found += self.collect(tasks, {task for task, job in trainings if not job.out.exists()})
        found += [job for _, job in trainings]
        for seed in range(options.seeds):
            if "scores" in options.parts:
                found += [self.play(task, discretizer, seed) for task, discretizer in self.cells()]
            if "ablations" in options.parts:
                found += [
                    self.play(task, options.best, seed, name, *ablation_flags(name, task))
                    for task in self.ablated()
                    for name in ABLATIONS
                ]
            if "imitation" in options.parts:
                for name, kind in IMITATION.items():
                    flags = ("--plan", "imitate", "--search.imitate", kind)
                    found += [self.play(task, options.best, seed, name, *flags) for task in experts]
        return found

    def scores(self, task: str, discretizer: str) -> list[list[float]] | None:
        """Normalised scores of the episodes of each training seed; None if some are missing."""
        found = self.played_scores(task, discretizer)
        return found if len(found) == self.options.seeds else None

    def played_scores(self, task: str, discretizer: str, variant: str = "score") -> list[list[float]]:
        """Normalised scores of the training seeds that were played."""
        paths = [self.played(task, discretizer, seed, variant) for seed in range(self.options.seeds)]
        paths = [path for path in paths if path.exists()]
        references = references_of(json.loads(self.facts(task).read_text())["env"])
        assert references is not None, "benchmark tasks have reference scores"
        returns = [json.loads(path.read_text())["returns"] for path in paths]
        return [[normalized_score(value, references) for value in each] for each in returns]


def command(*words: object) -> tuple[str, ...]:
    """The words of a command."""
    return tuple(map(str, words))


def ablation_flags(name: str, task: str) -> list[object]:
    """Flags of `tt evaluate` for an ablation."""
    changed = ABLATIONS[name]
    if changed is None:
        return ["--preset", authors_preset(task)]
    return [word for key, value in changed.items() for word in (f"--search.{key}", value)]


def authors_preset(task: str) -> str:
    """The preset with the authors' search settings of a task."""
    return next(name for name in (task, task.partition("-")[0], "reference") if name in PRESETS)


def summary(name: str, scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean over training seeds and episodes, with the standard errors over both if there are several."""
    by_seed = summarize(name, [float(np.mean(each)) for each in scores])
    episodes = summarize(name, [value for each in scores for value in each])
    found = {
        name: by_seed[name],
        f"{name}_stderr": by_seed.get(f"{name}_stderr"),
        f"{name}_stderr_episodes": episodes.get(f"{name}_stderr"),
        f"{name}_seeds": by_seed[f"{name}_n"],
        f"{name}_episodes": episodes[f"{name}_n"],
    }
    return {key: value for key, value in found.items() if value is not None}


def renamed(metrics: dict[str, float], name: str, new: str) -> dict[str, float]:
    """A mean by another name, with its standard error over training seeds if it has one."""
    return {f"{new}{kind}": metrics[f"{name}{kind}"] for kind in ("", "_stderr") if f"{name}{kind}" in metrics}


def write(plan: Plan, path: Path, name: str, metrics: dict[str, float], details: dict[str, object]) -> None:
    """Write one result file."""
    options = plan.options
    write_result(
        path,
        name=name,
        command="python " + shlex.join(sys.argv),
        device=find_device(options.device),
        seeds=[SCORE_SEED + index for index in range(options.episodes)],
        seconds=0.0,
        metrics=metrics,
        details=details,
    )
    print(f"wrote {path}", flush=True)


def write_scores(plan: Plan) -> None:
    """Write every cell that is complete, and the table."""
    metrics: dict[str, float] = {}
    for discretizer in plan.options.discretizers:
        found = {}
        for task in plan.options.tasks:
            scores = plan.scores(task, discretizer)
            if scores is None:
                continue
            facts = json.loads(plan.facts(task).read_text())
            runs = [json.loads(plan.trained(task, discretizer, seed).read_text()) for seed in range(len(scores))]
            own = summary("normalized_score", scores)
            own["data_score"] = facts["data"]["score"]
            for kind in ("noisy", "noiseless"):
                own[f"best_policy_{kind}_score"] = facts[f"best_policy_{kind}"]["score"]
            own["seconds_train"] = float(np.mean([run["seconds"] for run in runs]))
            details = {"scores": scores, "data": facts, "training": [run["metrics"] for run in runs]}
            path = plan.options.out / f"{task}_{discretizer}.json"
            write(plan, path, f"locomotion {task} {discretizer}", own, details)
            metrics |= renamed(own, "normalized_score", f"{task}_{discretizer}")
            found[task] = scores
        if found:
            averages = [np.mean([np.mean(each[seed]) for each in found.values()]) for seed in range(plan.options.seeds)]
            metrics |= summarize(f"average_{discretizer}", [float(value) for value in averages])
            metrics[f"cells_{discretizer}"] = len(found)
    metrics["cells"] = sum(value for name, value in metrics.items() if name.startswith("cells_"))
    write(plan, plan.options.out / "table.json", "locomotion table", metrics, {"tasks": plan.options.tasks})


def write_ablations(plan: Plan) -> None:
    """Write the ablations of the training seeds that were played, beside the scores of the same models."""
    metrics: dict[str, float] = {}
    for task in plan.ablated():
        for name in ("score", *ABLATIONS):
            scores = plan.played_scores(task, plan.options.best, name)
            if scores:
                metrics |= summary(f"{task}_{'default' if name == 'score' else name}", scores)
    write(plan, plan.options.out / "ablations.json", "locomotion ablations", metrics, {"searches": ABLATIONS})


def write_imitation(plan: Plan) -> None:
    """Write returns in percent of the expert's, with its noise and without."""
    metrics: dict[str, float] = {}
    for env in ENVIRONMENTS:
        for name in IMITATION:
            paths = [plan.played(f"{env}-expert", plan.options.best, seed, name) for seed in range(plan.options.seeds)]
            if not all(path.exists() for path in paths):
                continue
            facts = json.loads(plan.facts(f"{env}-expert").read_text())
            returns = [json.loads(path.read_text())["returns"] for path in paths]
            for kind, suffix in (("noisy", ""), ("noiseless", "_of_noiseless")):
                percent = [[100 * value / facts[f"best_policy_{kind}_return"] for value in each] for each in returns]
                metrics |= summary(f"{env}_{name}{suffix}", percent)
    path = plan.options.out / "imitation.json"
    write(plan, path, "locomotion imitation, percent of the expert's return", metrics, {})


def parse(arguments: Sequence[str] | None) -> Plan:
    """Options of the script, and flags for the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files to collect with")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the jobs")
    parser.add_argument("--datasets", type=Path, default=None, help="folder of the datasets; default: data in --work")
    parser.add_argument("--out", type=Path, default=Path("results/locomotion"))
    parser.add_argument("--parts", nargs="+", choices=("scores", "ablations", "imitation"), default=["scores"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--discretizers", nargs="+", choices=DISCRETIZERS, default=list(DISCRETIZERS))
    parser.add_argument("--best", choices=DISCRETIZERS, default="quantile", help="of ablations and imitation")
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds")
    parser.add_argument("--episodes", type=int, default=15, help="per training seed")
    parser.add_argument("--policy_episodes", type=int, default=100, help="that measure the best policy without noise")
    parser.add_argument("--trainings", type=int, default=2, help="at a time: one compiles while the other trains")
    parser.add_argument("--plays", type=int, default=1, help="evaluations at a time; 0: only train")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, for a trial")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this command ends")
    parser.add_argument("--time_to_score", type=Path, default=None, help="write the wall time to this result file")
    parser.add_argument("--device", default="auto")
    options, passed = parser.parse_known_args(arguments)
    return Plan(options, *split_flags(parser, passed))


def split_flags(parser: argparse.ArgumentParser, passed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags that a script passes on: those of `tt train`, and those of the search of `tt evaluate`."""
    groups = {"train": ("--tokens.", "--model.", "--train."), "search": ("--search.",)}
    flags: dict[str, list[str]] = {group: [] for group in groups}
    for name, value in zip(passed[::2], passed[1::2], strict=False):
        group = next((group for group, starts in groups.items() if name.startswith(starts)), None)
        if group is None:
            parser.error(f"{name}: not a flag of this script, and not a --GROUP.NAME VALUE of tt")
        flags[group] += [name, value]
    if len(passed) % 2:
        parser.error(f"{passed[-1]}: a flag of tt needs a value")
    return tuple(flags["train"]), tuple(flags["search"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when all results are written."""
    started = time.monotonic()
    plan = parse(arguments)
    options = plan.options
    deadline = started + (options.time_limit or float("inf"))
    slots = {"collect": len(ENVIRONMENTS), "train": options.trainings, "play": options.plays}
    complete = Queue(slots, options.work / "logs", deadline).run(plan.jobs())
    for part, write_part in (("scores", write_scores), ("ablations", write_ablations), ("imitation", write_imitation)):
        if part in options.parts:
            write_part(plan)
    if not complete:
        print("out of time; run the same command to continue", flush=True)
        return MORE_TO_DO
    if options.time_to_score is not None:
        seconds = time.monotonic() - started
        metrics = {"seconds_total": seconds}
        for task, discretizer in plan.cells():
            scores = plan.scores(task, discretizer)
            assert scores is not None, "all jobs are complete"
            metrics |= summary(f"{task}_{discretizer}", scores)
        write(plan, options.time_to_score, "time to score", metrics, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
