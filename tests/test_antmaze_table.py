"""The script for the AntMaze table: its jobs, which search it chooses, and what it writes."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

pytest.importorskip("gymnasium_robotics", reason="needs pip install 'trajectory-transformer[mazes]'")

from trajectory_transformer.baselines import Baseline, train_baseline
from trajectory_transformer.cli import COMMANDS
from trajectory_transformer.cli.parser import parse
from trajectory_transformer.config import Sampler
from trajectory_transformer.data.episode import Dataset, Episode, load_npz, save_npz
from trajectory_transformer.envs.ant_maze import AntMaze

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = runpy.run_path(str(BENCHMARKS / "antmaze.py"))


def make_plan(tmp_path: Path, *words: object) -> Any:
    given = ["--policies", tmp_path, "--work", tmp_path / "work", "--out", tmp_path / "out", "--device", "cpu"]
    return SCRIPT["parse"]([str(word) for word in (*given, *words)])


def played(path: Path, returns: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"returns": returns, "command": "tt evaluate"}))


def test_every_command_parses_and_every_input_is_made_by_a_job(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "--searches", "free-drawn", "wide", "--train.steps", 5, "--search.expansion", 3)
    jobs = [*plan.trainings(), *plan.tunings(), *plan.scores("wide")]
    made = {job.out for job in jobs} | {plan.data(task) for task in SCRIPT["TASKS"]}
    assert all(path in made for job in jobs for path in job.needs)
    assert len({job.out for job in jobs}) == len(jobs)
    # Five datasets with three models each; five baselines in three mazes; two searches; five baselines and three
    # planners played.
    assert len(jobs) == 5 + 5 * 3 + 5 * 3 + 5 * 2 + 5 * (5 + 3 * 3)
    commands = {}  # one of those that differ in a task or a seed only
    for job in jobs:
        for words in (job.command, job.resume):
            if "trajectory_transformer" in words:
                name, *flags = words[words.index("trajectory_transformer") + 1 :]
                commands[name, tuple(flag for flag in flags if flag.startswith("--"))] = flags
    # Training, its continuation, and plays: of baselines, without Q, with either search, one step ahead.
    assert len(commands) == 2 + 5
    for (name, _), flags in commands.items():
        parse(name, COMMANDS[name], flags)


def test_what_searches_are_compared_with_is_trained_first(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    trained = [job.out for job in plan.trainings() if job.kind == "train"]
    first = [plan.model(task, 0) for task in SCRIPT["TASKS"]]
    mazes = ("umaze", "medium-play", "large-play")
    assert trained[:8] == [*(plan.trained(task, "iql_wide") for task in mazes), *first]


def test_chosen_methods_have_one_training_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(tmp_path, "--tasks", "umaze", "--methods", "bc", "iql", "tt", "tt_q", "--one_seed", "bc", "tt")
    jobs = {job.out: job for job in [*plan.trainings(), *plan.scores("likely")]}
    models = [plan.model("umaze", seed) in jobs for seed in range(4)]
    assert models == [True, True, True, False]  # plans by Q have three
    trained = {method: " ".join(jobs[plan.trained("umaze", method)].command) for method in ("bc", "iql", "iql_wide")}
    assert ["--seeds 1 " in trained[method] for method in trained] == [True, False, False]
    plays = {method: [plan.played("umaze", method, seed) in jobs for seed in range(3)] for method in ("tt", "tt_q")}
    assert plays == {"tt": [True, False, False], "tt_q": [True, True, True]}
    played(plan.played("umaze", "bc"), [1.0, 0.0])
    played(plan.played("umaze", "iql"), [1.0, 0.0, 0.0] * 2)
    played(plan.played("umaze", "tt", 0), [0.0, 1.0, 1.0])
    percent = {method: plan.percent("umaze", method) for method in ("bc", "iql", "tt", "tt_q")}
    assert percent == {
        "bc": [[100.0, 0.0]],
        "iql": [[100.0, 0.0], [0.0, 100.0], [0.0, 0.0]],
        "tt": [[0.0, 100.0, 100.0]],
        "tt_q": None,
    }
    with pytest.raises(SystemExit):
        make_plan(tmp_path, "--one_seed", "iql_wide")
    assert "invalid choice: 'iql_wide'" in capsys.readouterr().err


def test_planners_differ_in_q_and_horizon_and_tuning_has_seeds_of_its_own(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    words = {method: " ".join(plan.play("umaze", method, 2, "wide-far").command) for method in SCRIPT["PLANNERS"]}
    q = f"--q {plan.options.work / 'runs' / 'umaze_iql_wide'} --training_seed 2"
    assert [q in words[method] for method in ("greedy_q", "tt", "tt_q")] == [True, False, True]
    assert "--search.horizon 1 " in words["greedy_q"] and "--search.horizon 10 " in words["tt_q"]
    guide = plan.trained("umaze", "iql_wide")
    waits = [guide in plan.play("umaze", method, 2, "wide-far").needs for method in SCRIPT["PLANNERS"]]
    assert waits == [True, False, True]
    tuning = " ".join(plan.play("umaze", "tt_q", 0, "wide-far", tuning=True).command)
    assert "--seed 5000000" in tuning and "--seed 7000000" in words["tt_q"]


def test_a_baseline_trains_on_the_tasks_of_a_maze_with_the_settings_given(tmp_path: Path) -> None:
    given = json.dumps({"cql": {"conservative_weight": 6.0}})
    chosen = ("large-diverse", "umaze", "large-play")
    plan = make_plan(tmp_path, "--tasks", *chosen, "--baseline_steps", 7, "--settings", given)
    assert plan.mazes == (("umaze",), ("large-play", "large-diverse"))
    for method, preset, own in (
        ("iql", "iql-antmaze", {}),
        ("iql_wide", "iql-antmaze-wide", {}),
        ("cql", "cql-antmaze", {"conservative_weight": 6.0}),
        ("dt", "dt-antmaze", {}),
    ):
        for tasks in plan.mazes:
            job = plan.train_baseline(tasks, method)
            words = job.command
            assert preset in words and f" --tasks {' '.join(tasks)} --seeds 3 " in " ".join(words)
            assert json.loads(words[words.index("--settings") + 1]) == {**own, "steps": 7}
            assert {path for path in job.needs if path.suffix == ".npz"} == {plan.data(task) for task in tasks}
            assert all(job.out in plan.play_baseline(task, method).needs for task in tasks)


def test_searches_differ_in_how_actions_and_states_are_sampled_and_in_their_size(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    for name, expected, horizon in (
        ("likely", Sampler(middle=0.7), 5),
        ("often", Sampler(middle=0.7), 5),
        ("often-narrow", Sampler(middle=0.5), 5),
        ("often-near", Sampler(middle=0.7), 3),
        ("wide", Sampler(middle=0.9), 5),
        ("wide-far", Sampler(middle=0.9), 10),
        ("wide-often", Sampler(middle=0.9), 5),
        ("wide-now", Sampler(middle=0.9), 5),
        ("free", Sampler(nucleus=0.95), 5),
        ("free-now", Sampler(nucleus=0.95), 5),
        ("free-far", Sampler(nucleus=0.95), 10),
        ("free-often", Sampler(nucleus=0.95), 5),
        ("free-crowd", Sampler(nucleus=0.95), 5),
        ("free-drawn", Sampler(nucleus=0.95), 5),
    ):
        words = plan.play("umaze", "tt_q", 0, name).command
        _, *flags = words[words.index("trajectory_transformer") + 1 :]
        chosen: Any = parse("evaluate", COMMANDS["evaluate"], flags)
        assert (chosen.search.action, chosen.search.horizon) == (expected, horizon)
        assert chosen.search.replan_every == (1 if "often" in name else 3)
        assert chosen.search.context == (0 if "now" in name else 4)
        assert chosen.search.beam_width == (64 if "crowd" in name else 32)
        assert chosen.search.observation == Sampler(top_k=None if "drawn" in name else 1)
        words = plan.play("umaze", "greedy_q", 0, name).command
        _, *flags = words[words.index("trajectory_transformer") + 1 :]
        greedy: Any = parse("evaluate", COMMANDS["evaluate"], flags)
        assert (greedy.search.action, greedy.search.horizon, greedy.search.replan_every) == (expected, 1, 1)


def test_the_search_with_the_best_mean_over_tasks_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])
    plan = make_plan(tmp_path, "--tasks", "umaze", "large-play", "--searches", "free-drawn", "wide", "likely")
    for name, returns in (
        ("free-drawn", ([1, 1], [0, 0])),
        ("wide", ([1, 0], [1, 1])),
        ("likely", ([0, 1], [0, 1])),
    ):
        for task, own in zip(("umaze", "large-play"), returns, strict=True):
            played(plan.played(task, "tt_q", 0, f"tuning-{name}"), [float(value) for value in own])
    assert SCRIPT["choose_search"](plan) == "wide"
    stored = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert (stored["metrics"]["wide_average"], stored["metrics"]["umaze_wide"]) == (75.0, 50.0)
    assert make_plan(tmp_path, "--searches", "likely").tunings() == []


def test_the_table_holds_percent_of_episodes_by_task_and_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])

    def write(search: str, tasks: dict[str, dict[str, list[list[float]]]], *more: object) -> Any:
        """The table after a command that played these tasks, in a work folder of its own."""
        words = ("--work", tmp_path / "-".join(tasks), "--methods", "iql", "tt_q", "--seeds", 2, "--episodes", 2)
        plan = make_plan(tmp_path, *words, "--tasks", *tasks, *more)
        for task, of_method in tasks.items():
            plan.facts(task).parent.mkdir(parents=True, exist_ok=True)
            plan.facts(task).write_text("{}")
            for method, returns in of_method.items():
                if method == "iql":
                    played(plan.played(task, method), [value for own in returns for value in own])
                else:
                    for seed, own in enumerate(returns):
                        played(plan.played(task, method, seed), own)
        SCRIPT["write_cells"](plan, search)
        SCRIPT["write_table"](plan)
        return json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]

    one_of_four, three_of_four = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]
    write("likely", {"umaze": {"iql": one_of_four, "tt_q": three_of_four[:1]}})  # tt_q lacks a seed
    assert not (tmp_path / "out" / "umaze_tt_q.json").exists()
    others = ("medium-play", "medium-diverse", "large-play", "large-diverse")
    first = write("likely", {"umaze": {"iql": one_of_four, "tt_q": three_of_four}})
    assert (first["umaze_iql"], first["umaze_tt_q"]) == (25.0, 75.0)
    assert first["umaze_iql_stderr"] == pytest.approx(25.0)  # 50 and 0
    assert "tt_q_average" not in first and "tt_q: 1 of 5 tasks\n" in capsys.readouterr().out
    cell = json.loads((tmp_path / "out" / "umaze_tt_q.json").read_text())
    assert cell["successes"] == [[100.0, 100.0], [100.0, 0.0]] and cell["metrics"]["success_percent_episodes"] == 4
    mixed = write("free-drawn", {task: {"iql": three_of_four, "tt_q": one_of_four} for task in others})
    assert mixed["umaze_tt_q"] == 75.0 and mixed["iql_average"] == 65.0  # of the first command, and of both
    assert "tt_q_average" not in mixed and "tt_q: 5 of 5 tasks, with different settings" in capsys.readouterr().out
    table = write("likely", {task: {"tt_q": one_of_four} for task in others})
    assert (table["tt_q_average"], table["tt_q_average_stderr"]) == (35.0, 25.0)  # 60 and 10 by training seed
    assert table["iql_average"] == 65.0
    longer = write("likely", {"umaze": {"iql": one_of_four, "tt_q": three_of_four}}, "--baseline_steps", 9)
    assert not {"iql_average", "tt_q_average"} & set(longer) and longer["umaze_tt_q"] == 75.0  # of another Q function
    cell = json.loads((tmp_path / "out" / "umaze_tt_q.json").read_text())
    assert (cell["task"], cell["method"], cell["settings"]["replan_every"]) == ("umaze", "tt_q", 3)
    guide = cell["settings"]["q"]  # all settings, so that cells of an earlier preset are told apart
    assert (guide["preset"], guide["steps"], guide["target_rate"]) == ("iql-antmaze-wide", 9, 0.02)
    assert json.loads((tmp_path / "out" / "umaze_iql.json").read_text())["settings"]["preset"] == "iql-antmaze"


def test_methods_that_were_measured_on_other_data_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])
    for method, runs in (("iql", 3), ("bc", 3), ("cql", 4)):
        words = ("--work", tmp_path / method, "--methods", method, "--tasks", "umaze", "--seeds", 1, "--episodes", 1)
        plan = make_plan(tmp_path, *words)
        plan.facts("umaze").parent.mkdir(parents=True)
        plan.facts("umaze").write_text(json.dumps({"runs": runs}))
        played(plan.played("umaze", method), [1.0])
        SCRIPT["write_cells"](plan, "likely")
        SCRIPT["write_table"](plan)
        named = "umaze: measured on other data than the methods before: cql\n" in capsys.readouterr().out
        table = json.loads((tmp_path / "out" / "table.json").read_text())
        assert named == bool(table["other_data"]) == (method == "cql")
    assert table["other_data"] == {"umaze": ["cql"]}


def test_one_training_seed_has_no_error_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["antmaze.py"])
    plan = make_plan(tmp_path, "--methods", "bc", "iql", "--seeds", 2, "--one_seed", "bc", "--episodes", 2)
    for task in SCRIPT["TASKS"]:
        plan.facts(task).parent.mkdir(parents=True, exist_ok=True)
        plan.facts(task).write_text("{}")
        played(plan.played(task, "bc"), [1.0, 0.0])
        played(plan.played(task, "iql"), [1.0, 0.0, 1.0, 1.0])
    SCRIPT["write_cells"](plan, "likely")
    SCRIPT["write_table"](plan)
    table = json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    assert {name: table[name] for name in table if name.startswith(("umaze", "bc_average", "iql_average"))} == {
        "umaze_bc": 50.0,
        "bc_average": 50.0,
        "bc_average_n": 1.0,
        "umaze_iql": 75.0,
        "umaze_iql_stderr": pytest.approx(25.0),
        "iql_average": 75.0,
        "iql_average_stderr": pytest.approx(25.0),
        "iql_average_n": 2.0,
    }
    cell = json.loads((tmp_path / "out" / "umaze_bc.json").read_text())["metrics"]
    assert "success_percent_stderr" not in cell and cell["success_percent_stderr_episodes"] == pytest.approx(50.0)


def test_learners_of_several_mazes_are_those_of_each_maze_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(BENCHMARKS / "antmaze_baselines.py"))
    rng = np.random.default_rng(0)
    for task, size in (("umaze", 1.0), ("large-play", 3.0)):
        states = rng.normal(scale=size, size=(41, 29)).astype(np.float32)
        actions, rewards = rng.uniform(-1, 1, size=(40, 8)).astype(np.float32), np.zeros(40, np.float32)
        save_npz(Dataset((Episode(states, actions, rewards, True),), {"env": task}), tmp_path / f"antmaze-{task}.npz")
    settings = {"hidden": [8], "steps": 12, "batch_size": 4}
    words = ["iql-antmaze", "--method", "iql", "--datasets", str(tmp_path), "--runs", str(tmp_path / "runs")]
    words += ["--tasks", "umaze", "large-play", "--seeds", "2", "--settings", json.dumps(settings), "--device", "cpu"]

    class Interrupted:
        """Ctrl-C that comes before the first step."""

        def __enter__(self) -> list[int]:
            return [2]

        def __exit__(self, *error: object) -> None:
            pass

    done = script["trained"](tmp_path / "runs", "iql", ["umaze", "large-play"])
    with monkeypatch.context() as patch:
        patch.setitem(script["train"].__globals__, "noted_interrupts", Interrupted)
        assert script["main"](words) == 130
    assert not done.exists() and not (tmp_path / "runs" / "umaze_iql").exists()
    assert script["main"](words) == 0 and json.loads(done.read_text())["metrics"]["steps"] < 12
    with pytest.raises(SystemExit):
        script["main"]([*words, "--tasks", "medium-play"])
    assert "antmaze-medium-play.npz does not exist" in capsys.readouterr().err
    for task in ("umaze", "large-play"):
        together = Baseline.load(tmp_path / "runs" / f"{task}_iql")
        assert together.seeds == (0, 1) and together.metadata["env"] == task
        own = load_npz(tmp_path / f"antmaze-{task}.npz")
        alone = train_baseline(own, algorithm="iql-antmaze", settings=settings, seeds=[1], device="cpu")
        inputs = torch.randn(5, 29), torch.rand(5, 8)
        torch.testing.assert_close(together.q_function(1)(*inputs), alone.q_function(1)(*inputs))


def test_the_figure_shows_routes_and_the_candidates_of_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(BENCHMARKS / "antmaze_figure.py"))
    maze = AntMaze("AntMaze_UMaze-v5")
    start, goal = np.array(maze.center(maze.start_cell)), np.array(maze.goal)

    def journey(*, reached: bool) -> Episode:
        states = np.zeros((5, 29), np.float32)
        states[:, :2] = start + np.linspace(0, 1 if reached else 0.5, 5)[:, None] * (goal - start)
        return Episode(states, np.zeros((4, 8), np.float32), np.zeros(4, np.float32), terminated=reached)

    metadata = {"env": "AntMaze_UMaze-v5"}
    for name, ends in (("data", [True] * 3), ("iql", [False, True]), ("tt_q", [True, True])):
        save_npz(Dataset(tuple(journey(reached=end) for end in ends), metadata), tmp_path / f"{name}.npz")
    states = np.zeros((3, 3, 2, 29))
    states[2, :, :, 0] = [[1.0, 2.0], [3.0, 4.0], [np.nan, np.nan]]
    values = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, -0.5, np.nan]])  # the last candidate is missing
    now = np.full((3, 29), 9.0)
    np.savez(tmp_path / "plans.npz", env=[1, 0, 0], step=[7, 0, 7], state=now, states=states, scores=values)
    paths, found = script["candidates_of"](tmp_path / "plans.npz", 7)
    assert found.tolist() == [0.5, -0.5]
    assert paths.tolist() == [[[9.0, 9.0], [1.0, 0.0], [2.0, 0.0]], [[9.0, 9.0], [3.0, 0.0], [4.0, 0.0]]]
    with pytest.raises(SystemExit, match="no plan of environment 0 at step 9; its last plan is at step 7"):
        script["candidates_of"](tmp_path / "plans.npz", 9)
    files = [word for name in ("data", "iql", "tt_q") for word in (f"--{name}", str(tmp_path / f"{name}.npz"))]
    words = [*files, "--trace", str(tmp_path / "plans.npz"), "--step", "7", "--routes", "2"]
    script["main"]([*words, "--out", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        script["main"]([*words, "--trace", str(tmp_path / "missing.npz")])
    assert "missing.npz does not exist" in capsys.readouterr().err
    played = {"IQL": load_npz(tmp_path / "iql.npz"), "TT + Q": load_npz(tmp_path / "tt_q.npz")}
    figure = script["draw"](load_npz(tmp_path / "data.npz"), played, paths, found, routes=2)
    titles = [axes.get_title() for axes in figure.axes[:4]]
    assert titles == [
        "data: 2 of 3 episodes",
        "IQL: 1 of 2 reach the goal",
        "TT + Q: 2 of 2 reach the goal",
        "TT + Q: 2 candidates, 2 steps ahead",
    ]
    routes = next(each for each in figure.axes[1].collections if isinstance(each, LineCollection))
    np.testing.assert_allclose(routes.get_segments()[1][-1], goal, atol=1e-5)
    expected = [to_rgba(color, 0.5) for color in ("tab:red", "tab:green")]
    np.testing.assert_allclose(np.asarray(routes.get_colors(), np.float64), expected)
    walls = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(walls) == 25 - len(maze.free)
    (left, right), (bottom, top) = figure.axes[3].get_xlim(), figure.axes[3].get_ylim()
    assert right - left == pytest.approx(top - bottom)
    inside = (paths[..., 0] > left) & (paths[..., 0] < right) & (paths[..., 1] > bottom) & (paths[..., 1] < top)
    assert inside.all() and np.ptp(paths, axis=(0, 1)).max() > 0.8 * (right - left)  # all candidates, little around
    best = figure.axes[3].lines[-2]
    assert np.asarray(best.get_xdata()).tolist() == [9.0, 1.0, 2.0]


def test_facts_of_a_dataset_count_runs_that_go_on_at_the_goal_once(tmp_path: Path) -> None:
    data = runpy.run_path(str(BENCHMARKS / "antmaze_data.py"))

    def piece(*places: tuple[float, float], terminated: bool = False, flipped: bool = False) -> Episode:
        observations = np.zeros((len(places), 29), np.float32)
        observations[:, :2], observations[:, 3] = places, 1.0
        if flipped:
            observations[-1, 3:7] = 0.0, 1.0, 0.0, 0.0
        steps = len(places) - 1
        rewards = np.zeros(steps, np.float32)
        rewards[-1] = float(terminated)
        return Episode(observations, np.zeros((steps, 8), np.float32), rewards, terminated)

    maze = AntMaze("AntMaze_Medium-v5")
    start, way, goal = maze.center(maze.start_cell), (0.0, 0.0), maze.goal
    near = (goal[0] + 0.1, goal[1])
    episodes = (
        piece(start, way, goal, terminated=True), piece(goal, near, terminated=True), piece(near, way),  # one run
        piece((1.0, 0.0), way, goal, terminated=True),
        piece((2.0, 0.0), start, flipped=True),
        piece(start, way),
    )  # fmt: skip
    metadata: dict[str, str | int | float | bool | None] = {"env": "AntMaze_Medium-v5"}
    metadata |= {
        "policy.0.policy": "careful",
        "policy.0.episodes": 4,
        "policy.1.policy": "wild",
        "policy.1.episodes": 2,
    }
    save_npz(Dataset(episodes, metadata), tmp_path / "antmaze-medium-play.npz")
    facts = json.loads(data["make_facts"]("medium-play", tmp_path).read_text())
    assert (facts["runs"], facts["arrivals"], facts["steps"]) == (4, 2, 8)
    assert (facts["success_rate"], facts["whole_task_rate"], facts["flipped_rate"]) == (0.5, 0.25, 0.25)
    assert facts["success_rate_by_policy"] == {"careful": 1.0, "wild": 0.0}
