"""The AntMaze table of the paper from nothing: five datasets, planning with and without Q, and baselines.

    python benchmarks/antmaze.py --policies DIR --work DIR [--tasks TASK ...] [--methods METHOD ...]

Methods: `tt_q` plans by the Q function of `iql_wide`, `tt` by predicted returns, `greedy_q` takes the action with the
largest Q of those that the model samples (a plan of one step), and `bc`, `dt`, `cql`, `iql`, `iql_wide` act by their
policies. `iql` has the published settings, `iql_wide` those of our preset.
All models use the same settings in all five tasks: the preset `default` with the flags given here (`--train.steps`,
`--tokens.`, `--model.`), and one search. With several searches (`--searches`) they are compared first, for `tt_q`
with the first training seed, on episodes of their own (`--tuning_episodes`); the one with the best mean over tasks is
then used for all.

Every job is a command that writes a file to the work folder. The same command continues what was interrupted.
`--time_limit` stops before a limit; exit code 75 then means that there is more to do.

Writes <out>/<task>_<method>.json, <out>/table.json with `<task>_<method>` and `<method>_average` (percent of episodes
that reach the goal; `_stderr` over training seeds if there are several), and <out>/tuning.json. The table has all cells
in <out>, so tasks and methods can be measured one after the other, also with a work folder each; averages are over all
five tasks.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.antmaze_baselines import trained
from benchmarks.antmaze_data import TASKS
from benchmarks.paper.table import MORE_TO_DO, TT, Job, Queue, command, renamed, split_flags, summary
from trajectory_transformer.baselines import PRESETS
from trajectory_transformer.baselines.presets import changed, settings_dict
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import summarize, write_result

SCORE_SEED, TUNING_SEED = 7_000_000, 5_000_000  # of the episodes
GUIDE = "iql_wide"  # the baseline whose Q plans use
BASELINES = {"bc": "bc", "dt": "dt-antmaze", "cql": "cql-antmaze", "iql": "iql-antmaze", GUIDE: "iql-antmaze-wide"}
PLANNERS = ("greedy_q", "tt", "tt_q")
METHODS = (*BASELINES, *PLANNERS)
# Actions around the median. A plan is followed for three steps: a third of the cost.
LIKELY: dict[str, object] = {"beam_width": 32, "action.middle": 0.7, "replan_every": 3}
OFTEN: dict[str, object] = {**LIKELY, "replan_every": 1}
WIDE: dict[str, object] = {**LIKELY, "action.middle": 0.9}
# A nucleus keeps actions that are rare in the data, such as changes of direction.
FREE: dict[str, object] = {**LIKELY, "action.middle": None, "action.nucleus": 0.95}
SEARCHES: dict[str, dict[str, object]] = {
    "likely": LIKELY,
    "often": OFTEN,
    "often-narrow": {**OFTEN, "action.middle": 0.5},
    "often-near": {**OFTEN, "horizon": 3},
    "wide": WIDE,
    "wide-far": {**WIDE, "horizon": 10},
    "wide-often": {**WIDE, "replan_every": 1},
    "wide-now": {**WIDE, "context": 0},  # the past predicts that the ant goes on as before
    "free": FREE,
    "free-now": {**FREE, "context": 0},
    "free-far": {**FREE, "horizon": 10},
    "free-often": {**FREE, "replan_every": 1},
    "free-crowd": {**FREE, "beam_width": 64},
    "free-drawn": {**FREE, "observation.top_k": None},  # states are sampled too: a bin is wider than a step
}


def maze_of(task: str) -> str:
    """The maze of a task."""
    return task.partition("-")[0]


@dataclass(frozen=True)
class Plan:
    """Which jobs there are, and where their files lie."""

    options: argparse.Namespace
    train_flags: tuple[str, ...]
    search_flags: tuple[str, ...]

    def data(self, task: str) -> Path:
        """The dataset of a task."""
        return Path((self.options.datasets or self.options.work / "data") / f"antmaze-{task}.npz")

    def facts(self, task: str) -> Path:
        """What the behaviour in a dataset achieves; written after the dataset."""
        return self.data(task).with_name(f"{task}.json")

    def model(self, task: str, seed: int) -> Path:
        """Written when the training of a model ends."""
        return Path(self.options.work / "runs" / f"{task}_tt_{seed}" / "training.json")

    def baseline(self, task: str, method: str) -> Path:
        """The checkpoint of a baseline with all seeds."""
        return Path(self.options.work / "runs" / f"{task}_{method}")

    def seeds(self, method: str) -> int:
        """The number of training seeds of a method."""
        return 1 if method in self.options.one_seed else int(self.options.seeds)

    @property
    def mazes(self) -> tuple[tuple[str, ...], ...]:
        """The chosen tasks by maze, in the order of the table."""
        chosen = [task for task in TASKS if task in self.options.tasks]
        return tuple(tuple(own) for _, own in groupby(chosen, maze_of))

    def trained(self, task: str, method: str) -> Path:
        """Written when the training of a baseline on the tasks of a maze ends."""
        together = next(tasks for tasks in self.mazes if task in tasks)
        return trained(self.options.work / "runs", method, together)

    def played(self, task: str, method: str, seed: int | None = None, search: str = "score") -> Path:
        """Episodes of a method; those of baselines are of all training seeds."""
        name = f"{task}_{method}" if seed is None else f"{task}_{method}_{seed}"
        return Path(self.options.work / "played" / search / f"{name}.json")

    def collect(self, task: str) -> Job:
        """Collect a dataset and measure it."""
        script = Path(__file__).with_name("antmaze_data.py")
        words = ("--policies", self.options.policies, "--out", self.data(task).parent, "--scale", self.options.scale)
        return Job("collect", self.facts(task), command(sys.executable, script, task, *words))

    def train(self, task: str, seed: int) -> Job:
        """Train one model."""
        out, data, device = self.model(task, seed), self.data(task), ("--device", self.options.device)
        words = ("--out", out.parent, "--seed", seed, "--checkpoint_every", 5000)
        return Job(
            "train",
            out,
            command(*TT, "train", data, "--preset", "default", *words, *device, *self.train_flags),
            (data, self.facts(task)),
            command(*TT, "train", data, "--resume", out.parent, *device),
            out.with_name("run.json"),
        )

    def changed(self, method: str) -> dict[str, object]:
        """What the options change in the preset of a baseline."""
        steps = {"steps": self.options.baseline_steps} if self.options.baseline_steps else {}
        return {**self.options.settings.get(method, {}), **steps}

    def settings(self, method: str, search: str) -> dict[str, object]:
        """What a method is measured with, in all tasks."""
        if method in BASELINES:
            preset = BASELINES[method]
            return {"preset": preset, **settings_dict(changed(PRESETS[preset].settings, self.changed(method)))}
        flags = {"train_flags": list(self.train_flags), "search_flags": list(self.search_flags)}
        guide = {} if method == "tt" else {"q": self.settings(GUIDE, search)}
        return {"search": search, **SEARCHES[search], **flags, **guide}

    def train_baseline(self, tasks: Sequence[str], method: str) -> Job:
        """Train a baseline on the tasks of a maze, with all seeds, at once; the other mazes may still lack data."""
        options, out = self.options, self.trained(tasks[0], method)
        script, data = Path(__file__).with_name("antmaze_baselines.py"), [self.data(task) for task in tasks]
        settings = self.changed(method)
        words: list[object] = ["--method", method, "--datasets", data[0].parent, "--runs", out.parents[1]]
        words += ["--tasks", *tasks, "--seeds", self.seeds(method), "--device", options.device]
        words += ["--settings", json.dumps(settings)] if settings else []
        needs = (*data, *(self.facts(task) for task in tasks))
        return Job("train", out, command(sys.executable, script, BASELINES[method], *words), needs)

    def play_baseline(self, task: str, method: str) -> Job:
        """Play all training seeds of a baseline."""
        run, out = self.baseline(task, method), self.played(task, method)
        return Job(
            "play", out, self._evaluate(run, out, self.options.episodes, SCORE_SEED), (self.trained(task, method),)
        )

    def play(self, task: str, method: str, seed: int, search: str, *, tuning: bool = False) -> Job:
        """Play episodes with one model."""
        run = self.model(task, seed)
        out = self.played(task, method, seed, f"tuning-{search}" if tuning else "score")
        settings = {**SEARCHES[search], **({"horizon": 1, "replan_every": 1} if method == "greedy_q" else {})}
        flags = [word for key, value in settings.items() for word in (f"--search.{key}", json.dumps(value))]
        guide = [] if method == "tt" else ["--q", self.baseline(task, GUIDE), "--training_seed", seed]
        episodes, first = self.options.episodes, SCORE_SEED
        if tuning:
            episodes, first = self.options.tuning_episodes, TUNING_SEED
        words = self._evaluate(run.parent, out, episodes, first, "--plan", "return", *guide, *self.search_flags, *flags)
        return Job("play", out, words, (run,) if method == "tt" else (run, self.trained(task, GUIDE)))

    def _evaluate(self, run: Path, out: Path, episodes: int, seed: int, *more: object) -> tuple[str, ...]:
        words = ("--episodes", episodes, "--num_envs", min(episodes, self.options.num_envs), "--seed", seed)
        limit = self.options.max_episode_steps
        env = () if limit is None else ("--env_options", json.dumps({"max_episode_steps": limit}))
        return command(*TT, "evaluate", run, *words, "--device", self.options.device, *env, *more, "--out", out)

    def trainings(self) -> list[Job]:
        """Datasets and everything that learns from them; what most others wait for first."""
        options, found = self.options, [self.collect(task) for task in self.options.tasks]
        planners = [method for method in options.methods if method in PLANNERS]
        needed = [method for method in BASELINES if method in options.methods]
        if {"greedy_q", "tt_q"} & set(planners) and GUIDE not in needed:
            needed.append(GUIDE)
        found += [self.train_baseline(tasks, GUIDE) for tasks in self.mazes if GUIDE in needed]
        # By seed first: the searches are compared with the models of the first seed.
        for seed in range(max(map(self.seeds, planners), default=0)):
            found += [self.train(task, seed) for task in options.tasks]
        found += [self.train_baseline(tasks, each) for each in needed if each != GUIDE for tasks in self.mazes]
        return found

    def tunings(self) -> list[Job]:
        """Episodes that compare searches, if there are several."""
        names = self.options.searches
        if len(names) == 1 or "tt_q" not in self.options.methods:
            return []
        return [self.play(task, "tt_q", 0, name, tuning=True) for name in names for task in self.options.tasks]

    def scores(self, search: str) -> list[Job]:
        """Episodes of every method."""
        found: list[Job] = []
        for method in self.options.methods:
            for task in self.options.tasks:
                if method in BASELINES:
                    found.append(self.play_baseline(task, method))
                else:
                    found += [self.play(task, method, seed, search) for seed in range(self.seeds(method))]
        return found

    def percent(self, task: str, method: str) -> list[list[float]] | None:
        """100 for every episode that reached the goal and 0 for the others, by training seed; None if not played."""
        seeds = self.seeds(method)
        baseline = method in BASELINES
        paths = [self.played(task, method)] if baseline else [self.played(task, method, s) for s in range(seeds)]
        if not all(path.exists() for path in paths):
            return None
        values = [100.0 * value for path in paths for value in json.loads(path.read_text())["returns"]]
        return np.array(values).reshape(seeds, -1).tolist()


def choose_search(plan: Plan) -> str:
    """The search with the best mean success of `tt_q` on tuning seeds; writes what was compared."""
    names, tasks = plan.options.searches, plan.options.tasks
    if not plan.tunings():
        return str(names[0])
    metrics: dict[str, float] = {}
    for name in names:
        for task in tasks:
            stored = json.loads(plan.played(task, "tt_q", 0, f"tuning-{name}").read_text())
            metrics[f"{task}_{name}"] = 100.0 * float(np.mean(stored["returns"]))
        metrics[f"{name}_average"] = float(np.mean([metrics[f"{task}_{name}"] for task in tasks]))
    best = max(names, key=lambda name: metrics[f"{name}_average"])
    count = plan.options.tuning_episodes
    write(plan, "tuning.json", metrics, {"chosen": best, "searches": SEARCHES}, TUNING_SEED, count)
    return str(best)


def write(
    plan: Plan, name: str, metrics: dict[str, float], details: dict[str, object], seed: int, episodes: int
) -> None:
    """Write one result file."""
    path = plan.options.out / name
    write_result(
        path,
        name=f"antmaze {path.stem}",
        command="python " + shlex.join(sys.argv),
        device=find_device(plan.options.device),
        seeds=[seed + index for index in range(episodes)],
        seconds=0.0,
        metrics=metrics,
        details=details,
    )
    print(f"wrote {path}", flush=True)


def write_cells(plan: Plan, search: str) -> None:
    """Write every cell that is complete."""
    for method in plan.options.methods:
        for task in plan.options.tasks:
            percent = plan.percent(task, method)
            if percent is None:
                continue
            first = plan.played(task, method, None if method in BASELINES else 0)
            details: dict[str, object] = {
                "task": task,
                "method": method,
                "settings": plan.settings(method, search),
                "successes": percent,
                "data": json.loads(plan.facts(task).read_text()),
                "first_command": json.loads(first.read_text())["command"],
            }
            metrics = summary("success_percent", percent)
            write(plan, f"{task}_{method}.json", metrics, details, SCORE_SEED, plan.options.episodes)


def write_table(plan: Plan) -> None:
    """Write the table of all cells in the folder of results, also those of earlier commands.

    A method has an average if it has all tasks, with as many training seeds and the same settings in each. Methods of
    a task that were measured on other data than the first one are named.
    """
    metrics: dict[str, float] = {}
    facts: dict[str, object] = {}  # of the data of each task
    other_data: dict[str, list[str]] = {}
    for method in METHODS:
        paths = {task: plan.options.out / f"{task}_{method}.json" for task in TASKS}
        cells = {task: json.loads(path.read_text()) for task, path in paths.items() if path.exists()}
        for task, cell in cells.items():
            if cell["data"] != facts.setdefault(task, cell["data"]):
                other_data.setdefault(task, []).append(method)
            metrics |= renamed(cell["metrics"], "success_percent", f"{task}_{method}")
        by_task = [[float(np.mean(each)) for each in cell["successes"]] for cell in cells.values()]
        measured_with = [(cell["settings"], len(cell["successes"])) for cell in cells.values()]
        same = all(own == measured_with[0] for own in measured_with)
        if len(cells) == len(TASKS) and same:
            metrics |= summarize(f"{method}_average", np.mean(by_task, axis=0).tolist())
            print(f"{method}: {metrics[f'{method}_average']:.1f} % of episodes reach the goal")
        elif cells:
            print(f"{method}: {len(cells)} of {len(TASKS)} tasks{'' if same else ', with different settings'}")
    for task, methods in other_data.items():
        print(f"{task}: measured on other data than the methods before: {', '.join(methods)}")
    details: dict[str, object] = {"tasks": TASKS, "other_data": other_data}
    write(plan, "table.json", metrics, details, SCORE_SEED, plan.options.episodes)


def parse(arguments: Sequence[str] | None) -> Plan:
    """Options of the script, and flags for the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, required=True, help="folder of antgoal.safetensors")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the jobs")
    parser.add_argument("--datasets", type=Path, default=None, help="folder of the datasets; default: data in --work")
    parser.add_argument("--out", type=Path, default=Path("results/antmaze"), help="folder of the result files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument(
        "--searches",
        nargs="+",
        choices=tuple(SEARCHES),
        default=["often"],
        help="default: often; several are compared first",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds; default: 3")
    others = [method for method in METHODS if method != GUIDE]  # plans of every training seed need a Q of their own
    parser.add_argument("--one_seed", nargs="+", choices=others, default=[], help="methods with one training seed only")
    parser.add_argument("--episodes", type=int, default=100, help="per training seed; default: 100")
    parser.add_argument("--tuning_episodes", type=int, default=25, help="per task and search; default: 25")
    # A power of two, because a captured search plans for the next larger one.
    parser.add_argument("--num_envs", type=int, default=32, help="environments that one evaluation plays at a time")
    parser.add_argument(
        "--baseline_steps", type=int, default=None, help="training steps of baselines; default: as in the presets"
    )
    parser.add_argument(
        "--settings", type=json.loads, default={}, help='of baselines, as {"cql": {"conservative_weight": 5}}'
    )
    parser.add_argument("--max_episode_steps", type=int, default=None, help="of episodes in evaluations, for a trial")
    parser.add_argument("--trainings", type=int, default=2, help="trainings at a time; default: 2; 0: none")
    parser.add_argument(
        "--plays",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 4),
        help="evaluations at a time; 0: none, to train everything first",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, for a trial")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this command ends")
    parser.add_argument("--device", default="auto")
    options, passed = parser.parse_known_args(arguments)
    return Plan(options, *split_flags(parser, passed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when all results are written."""
    started = time.monotonic()
    plan = parse(arguments)
    options = plan.options
    deadline = started + (options.time_limit or float("inf"))
    queue = Queue({"collect": 1, "train": options.trainings, "play": options.plays}, options.work / "logs", deadline)
    search = ""
    if plan.tunings():
        complete = queue.run([*plan.trainings(), *plan.tunings()])
        search = choose_search(plan) if complete else ""
    else:
        complete, search = True, choose_search(plan)
    if complete:
        complete = queue.run([*plan.trainings(), *plan.scores(search)])
        write_cells(plan, search)
        write_table(plan)
    if not complete:
        print("not complete yet; run the command again to continue", flush=True)
        return MORE_TO_DO
    return 0


if __name__ == "__main__":
    sys.exit(main())
