"""Grids of runs: what is run, what is resumed, what is gathered; on this machine and on a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.cli.console import console
from trajectory_transformer.cli.grid import progress_table
from trajectory_transformer.grid import (
    Grid,
    LocalProcesses,
    RayCluster,
    RunError,
    State,
    execute_run,
    is_complete,
    last_line,
    load_grid,
    resumed,
    run_grid,
    runs_of,
)

TRAIN = (
    "tt train {data} --out {{out}}/run --seed {{seed}} --device cpu --model.width {{width}} --model.num_layers 1 "
    "--model.num_heads 2 --model.window 3 --train.steps {steps} --train.batch_size 4 --tokens.goal_dims [0,1] "
    "--tokens.rewards false --checkpoint_every 10"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "rooms.npz"
    assert main(["collect", "--out", str(path), "--episodes", "10"]) == 0
    return path


def training_grid(data: Path, *, steps: int, seeds: int = 2, **more: Any) -> Grid:
    axes: dict[str, Any] = {"width": [16], "seed": list(range(seeds))}
    return Grid(axes, (TRAIN.format(data=data, steps=steps),), ("run/weights.safetensors",), **more)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parts[-3]: path.read_bytes() for path in sorted(folder.glob("*/run/weights.safetensors"))}


def test_every_combination_is_a_run_with_its_values_filled_in() -> None:
    grid = Grid(
        {"task": ["a b", "c"], "seed": [0, 1]}, ("tt train {task} --seed {seed} --out {out}/run", "show '{{}}'")
    )
    runs = runs_of(grid)
    assert [run.name for run in runs] == ["a-b_0", "a-b_1", "c_0", "c_1"]
    assert runs[1].commands == (("train", "a b", "--seed", "1", "--out", "{out}/run"), ("show", "{}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: [1]", "axes must be a mapping of names to lists"),
        ("axes: {seed: []}", "axes must be a mapping of names to lists"),
        ("axes: {seed: [0, 0]}", "lists of different values"),
        ("axes: {seed: [0]}", "commands must be a list of `tt` commands"),
        ("axes: {seed: [0]}\ncommands: ['train {task}']", "placeholders are {seed}, {out}"),
        ("axes: {seed: [0]}\ncommands: [train]\nresults: [../x]", "results lie in the folder of a run"),
        ("axes: {seed: [0]}\ncommands: [train]\ncpus: 0", "cpus must be an integer of at least 1, got 0"),
        ("axes: {seed: [0]}\ncommands: [train]\ngpu: 1", "entries are axes, commands, .*, got gpu"),
        ("axes: {a: [", "grid.yaml is not YAML"),
        ("- 1", "must be a mapping"),
    ],
)
def test_a_bad_file_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    assert main(["grid", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    with pytest.raises(ValueError, match=message):
        load_grid(path)


def test_an_interrupted_training_is_resumed(tmp_path: Path) -> None:
    command = ["train", "data.npz", "--out", str(tmp_path), "--seed", "1", "--device", "cpu"]
    assert resumed(command) == command
    (tmp_path / "run.json").write_text("{}")
    assert resumed(command) == ["train", "data.npz", "--resume", str(tmp_path), "--device", "cpu"]
    assert resumed(["evaluate", "x", "--out", str(tmp_path)]) == ["evaluate", "x", "--out", str(tmp_path)]


def test_a_grid_runs_once_and_gathers_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "out" / "7" / "score.json"
    content = json.dumps({"metrics": {"return": 2.5}})
    script = tmp_path / "grid.yaml"
    script.write_text(
        "axes: {episodes: [7, 9]}\n"
        "commands: ['collect --episodes {episodes} --out {out}/data.npz']\n"
        "results: [score.json, data.npz]\n"
    )
    made.parent.mkdir(parents=True)
    made.write_text(content)
    assert main(["grid", str(script), "--out", str(tmp_path / "out"), "--parallel", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2 runs of 1 commands" in printed and "2 of 2: 9 finished" in printed
    assert (tmp_path / "out/table.csv").read_text() == "episodes,score.return\n7,2.5\n"
    before = (tmp_path / "out/9/data.npz").stat().st_mtime_ns
    assert main(["grid", str(script), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/9/data.npz").stat().st_mtime_ns == before
    script.write_text(script.read_text().replace("--out", "--seed 1 --out"))
    assert main(["grid", str(script), "--out", str(tmp_path / "out")]) == 2
    assert "was made by other commands" in capsys.readouterr().err


def test_a_failed_run_is_reported_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "grid.yaml"
    script.write_text("axes: {episodes: [-3, 4]}\ncommands: ['collect --episodes {episodes} --out {out}/data.npz']\n")
    assert main(["grid", str(script), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert "1 of 2 runs failed: 3; run the same command to retry" in printed.err
    assert "ended with exit code 2" in printed.out and "--episodes" in printed.out
    assert (tmp_path / "out/4/data.npz").exists()


def test_a_killed_command_is_started_again_and_ends_with_the_same_weights(tmp_path: Path, data: Path) -> None:
    grid = training_grid(data, steps=60, seeds=1)
    run = runs_of(grid)[0]
    execute_run(run, tmp_path / "whole")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(execute_run, run, tmp_path / "killed")
        kill_child(tmp_path / "killed")
        future.result(timeout=300)
    log = (tmp_path / "killed/log.txt").read_text()
    assert log.count("$ tt train") == 2 and "--resume" in log
    assert is_complete(run, tmp_path / "killed")
    same = [(tmp_path / name / "run/weights.safetensors").read_bytes() for name in ("whole", "killed")]
    assert same[0] == same[1]


def kill_child(folder: Path) -> None:
    """Kill the command that trains in a folder, after its first checkpoint."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list((folder / "run").glob("resume.safetensors")):
            found = subprocess.run(["pgrep", "-f", f"trajectory_transformer train .*{folder}"], capture_output=True)
            for process in found.stdout.split():
                os.kill(int(process), signal.SIGKILL)
            if found.stdout:
                return
        time.sleep(0.01)
    raise AssertionError("no training to kill")


def test_retries_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([-9, -9, -9, 0])
    monkeypatch.setattr("trajectory_transformer.grid._start", lambda *given: next(codes))
    run = runs_of(Grid({"seed": [0]}, ("train",), retries=1))[0]
    with pytest.raises(RunError, match="was killed by SIGKILL"):
        execute_run(run, tmp_path)
    execute_run(runs_of(Grid({"seed": [0]}, ("train",), retries=1))[0], tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="processes follow their parent on Linux")
def test_a_command_does_not_outlive_the_grid(tmp_path: Path, data: Path) -> None:
    script = tmp_path / "grid.yaml"
    script.write_text(
        json.dumps({"axes": {"width": [16], "seed": [0]}, "commands": [TRAIN.format(data=data, steps=10**6)]})
    )
    words = [sys.executable, "-m", "trajectory_transformer", "grid", str(script), "--out", str(tmp_path / "out")]
    grid = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "out/16_0/run/metrics.jsonl").exists())
    grid.kill()
    grid.wait()
    find = ["pgrep", "-f", f"trajectory_transformer train .*{tmp_path}/out"]
    wait_until(lambda: not subprocess.run(find, capture_output=True).stdout)


def wait_until(check: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_gpus_are_shared_by_as_many_runs_as_fit() -> None:
    assert LocalProcesses(Grid({}, (), gpus=0.5), num_gpus=2).parallel == 4
    assert LocalProcesses(Grid({}, (), gpus=2), num_gpus=4).parallel == 2
    places = LocalProcesses(Grid({}, (), gpus=0.5), num_gpus=2)._places
    assert [places.get()["CUDA_VISIBLE_DEVICES"] for _ in range(4)] == ["0", "1", "0", "1"]
    with pytest.raises(ValueError, match="which has 0, got 1"):
        LocalProcesses(Grid({}, (), gpus=1), num_gpus=0)


def test_the_last_line_is_what_was_printed_last(tmp_path: Path) -> None:
    assert last_line(tmp_path) == ""
    (tmp_path / "log.txt").write_text("one\ntwo\rthree 50 %\r")
    assert last_line(tmp_path) == "three 50 %"


def test_the_progress_shows_names_and_lines_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/log.txt").write_text("training [5/10] loss 2\n")
    states: dict[str, State] = {"a[x]": "finished", "b": "waiting", "c": "failed", "d": "waiting"}
    console.print(progress_table(tmp_path, states))
    printed = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in row] for row in printed]
    assert rows == [["b", "working", "training [5/10] loss 2"], ["c", "failed", ""], ["a[x]", "finished", ""]]


def test_files_of_another_machine_are_gathered(tmp_path: Path) -> None:
    class Elsewhere:
        def submit(self, run: Any, folder: Path) -> "Future[dict[str, bytes]]":
            future: Future[dict[str, bytes]] = Future()
            future.set_result({"score.json": b"{}", "deep/x": b"1"})
            return future

        def close(self) -> None: ...

    assert run_grid(Grid({"seed": [3]}, ("train",)), tmp_path, Elsewhere()) == {}
    assert (tmp_path / "3/score.json").read_bytes() == b"{}" and (tmp_path / "3/deep/x").read_bytes() == b"1"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_of_a_ray_cluster_costs_nothing_but_time(tmp_path: Path, data: Path) -> None:
    """Two nodes, one is killed while it trains: every run ends once, with the bits of the local run."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'trajectory-transformer[ray]'")
    from ray.cluster_utils import Cluster

    grid = training_grid(data, steps=400, seeds=4)
    local = LocalProcesses(grid, 0, parallel=2)
    assert run_grid(grid, tmp_path / "local", local) == {}
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [machines.add_node(num_cpus=1) for _ in range(2)]
    ray = RayCluster(grid, machines.address)
    try:
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(run_grid, grid, tmp_path / "ray", ray)
            wait_until(lambda: len(list((tmp_path / "ray").glob("*/run/resume.safetensors"))) >= 2, 300)
            machines.remove_node(nodes[0], allow_graceful=False)
            assert errors.result(timeout=600) == {}
    finally:
        ray.close()
        machines.shutdown()
    found, expected = weights(tmp_path / "ray"), weights(tmp_path / "local")
    assert len(expected) == 4 and found == expected
    logs = [(tmp_path / "ray" / name / "log.txt").read_text() for name in expected]
    starts = [log.count("$ tt train") for log in logs]
    assert sorted(starts) == [1, 1, 1, 2], "the run of the lost node continued on the other"
    assert any("--resume" in log for log in logs)
    print("starts per run", starts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_driver_stops_its_runs_and_the_same_command_continues(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'trajectory-transformer[ray]'")
    from ray.cluster_utils import Cluster

    script = tmp_path / "grid.yaml"
    content = {"axes": {"width": [16], "seed": [0, 1]}, "commands": [TRAIN.format(data=data, steps=400)]}
    script.write_text(json.dumps(content))
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    words = [sys.executable, "-m", "trajectory_transformer", "grid", str(script), "--out", str(tmp_path / "out")]
    words += ["--address", machines.address]
    try:
        driver = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        wait_until(lambda: len(list((tmp_path / "out").glob("*/run/resume.safetensors"))) == 2, 300)
        driver.kill()
        driver.wait()
        find = ["pgrep", "-f", f"trajectory_transformer train .*{tmp_path}/out"]
        wait_until(lambda: not subprocess.run(find, capture_output=True).stdout)
        assert not list((tmp_path / "out").glob("*/grid.json"))
        assert subprocess.run(words, timeout=600).returncode == 0
    finally:
        machines.shutdown()
    assert len(weights(tmp_path / "out")) == 2
    for log in (tmp_path / "out").glob("*/log.txt"):
        assert log.read_text().count("$ tt train") == 2 and "--resume" in log.read_text()
