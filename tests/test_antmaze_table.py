"""The script for the AntMaze table: its jobs, which search it chooses, and what it writes."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium_robotics", reason="needs pip install 'trajectory-transformer[mazes]'")

from trajectory_transformer.cli import COMMANDS
from trajectory_transformer.cli.parser import parse
from trajectory_transformer.config import Sampler

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = runpy.run_path(str(BENCHMARKS / "antmaze.py"))


def make_plan(tmp_path: Path, *words: object) -> Any:
    given = ["--policies", tmp_path, "--work", tmp_path / "work", "--out", tmp_path / "out", "--device", "cpu"]
    return SCRIPT["parse"]([str(word) for word in (*given, *words)])


def played(path: Path, returns: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"returns": returns, "command": "tt evaluate"}))


def test_every_command_parses_and_every_input_is_made_by_a_job(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "--searches", "default", "free", "--train.steps", 5, "--search.context", 2)
    jobs = [*plan.trainings(), *plan.tunings(), *plan.scores("free")]
    made = {job.out for job in jobs} | {plan.data(task) for task in SCRIPT["TASKS"]}
    assert all(path in made for job in jobs for path in job.needs)
    assert len({job.out for job in jobs}) == len(jobs)
    # Five datasets; three models and four baselines of each; two searches; four baselines and three planners played.
    assert len(jobs) == 5 + 5 * (3 + 4) + 5 * 2 + 5 * (4 + 3 * 3)
    for job in jobs:
        for words in (job.command, job.resume):
            if "trajectory_transformer" in words:
                name, *flags = words[words.index("trajectory_transformer") + 1 :]
                parse(name, COMMANDS[name], flags)


def test_planners_differ_in_q_and_horizon_and_tuning_has_seeds_of_its_own(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    words = {method: " ".join(plan.play("umaze", method, 2, "long").command) for method in SCRIPT["PLANNERS"]}
    q = f"--q {plan.options.work / 'runs' / 'umaze_iql'} --training_seed 2"
    assert [q in words[method] for method in ("greedy_q", "tt", "tt_q")] == [True, False, True]
    assert "--search.horizon 1 " in words["greedy_q"] and "--search.horizon 10 " in words["tt_q"]
    tuning = " ".join(plan.play("umaze", "tt_q", 0, "long", tuning=True).command)
    assert "--seed 5000000" in tuning and "--seed 7000000" in words["tt_q"]


def test_free_searches_sample_from_the_nucleus(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    for name, expected in (("default", Sampler(middle=0.4)), ("free-short", Sampler(nucleus=0.9))):
        words = plan.play("umaze", "tt_q", 0, name).command
        _, *flags = words[words.index("trajectory_transformer") + 1 :]
        chosen: Any = parse("evaluate", COMMANDS["evaluate"], flags)
        assert chosen.search.action == expected


def test_the_search_with_the_best_mean_over_tasks_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])
    plan = make_plan(tmp_path, "--tasks", "umaze", "large-play", "--searches", "default", "free", "long")
    for name, returns in (("default", ([1, 1], [0, 0])), ("free", ([1, 0], [1, 1])), ("long", ([0, 1], [0, 1]))):
        for task, own in zip(("umaze", "large-play"), returns, strict=True):
            played(plan.played(task, "tt_q", 0, f"tuning-{name}"), [float(value) for value in own])
    assert SCRIPT["choose_search"](plan) == "free"
    stored = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert (stored["metrics"]["free_average"], stored["metrics"]["umaze_free"]) == (75.0, 50.0)
    assert make_plan(tmp_path, "--searches", "long").tunings() == []


def test_the_table_holds_percent_of_episodes_by_task_and_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])
    methods, tasks = ("iql", "tt_q"), ("umaze", "medium-play")
    plan = make_plan(tmp_path, "--tasks", *tasks, "--methods", *methods, "--seeds", 2, "--episodes", 2)
    for task in tasks:
        plan.facts(task).parent.mkdir(parents=True, exist_ok=True)
        plan.facts(task).write_text("{}")
        played(plan.played(task, "iql"), [1.0, 0.0, 0.0, 0.0])  # seed 0, then seed 1
    played(plan.played("umaze", "tt_q", 0), [1.0, 1.0])
    SCRIPT["write_scores"](plan, "default")  # tt_q is not complete
    assert "tt_q_average" not in json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    for task, seed, returns in (
        ("umaze", 1, [1.0, 0.0]),
        ("medium-play", 0, [0.0, 0.0]),
        ("medium-play", 1, [0.0, 1.0]),
    ):
        played(plan.played(task, "tt_q", seed), returns)
    SCRIPT["write_scores"](plan, "default")
    metrics = json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    assert (metrics["umaze_iql"], metrics["umaze_tt_q"], metrics["medium-play_tt_q"]) == (25.0, 75.0, 25.0)
    assert (metrics["iql_average"], metrics["tt_q_average"]) == (25.0, 50.0)
    assert metrics["umaze_iql_stderr"] == pytest.approx(25.0)  # 50 and 0
    cell = json.loads((tmp_path / "out" / "umaze_tt_q.json").read_text())
    assert cell["successes"] == [[100.0, 100.0], [100.0, 0.0]] and cell["metrics"]["success_percent_episodes"] == 4
