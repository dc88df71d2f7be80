"""What benchmark scripts promise: memory limits, and scores of the paper from jobs that may be interrupted."""

import itertools
import json
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trajectory_transformer import collect
from trajectory_transformer.config import SearchConfig
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.training.engine import EagerEngine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_transitions_are_tokenized_and_trained_on_in_two_gibibytes(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    subprocess.run([sys.executable, BENCHMARKS / "memory_mapped.py", "--out", out], check=True)
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["transitions"] == 10_000_000
    assert metrics["peak_mib"] < 2048


@pytest.fixture
def paper(tmp_path: Path, policies: Path) -> Callable[..., tuple[int, Path]]:
    """Run the script for scores of the paper at a small scale: exit code and work folder."""
    pytest.importorskip("mujoco")
    script = runpy.run_path(str(BENCHMARKS / "paper" / "run.py"))
    small = ["--scale", "0.0003", "--episodes", "3", "--at_once", "2", "--expert_episodes", "2", "--device", "cpu"]
    small += ["--model.width", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--model.window", "3"]
    small += ["--train.batch_size", "16", "--train.steps", "40"]
    small += ["--search.beam_width", "2", "--search.horizon", "1", "--search.context", "1", "--search.window", "2"]

    def run(name: str, *words: str) -> tuple[int, Path]:
        work = tmp_path / name
        own = ["--task", "hopper-medium-expert", "--policies", str(policies), "--work", str(work)]
        return script["main"]([*own, "--out", str(work / "result.json"), *small, *words]), work

    return run


def test_an_interrupted_job_for_a_score_of_the_paper_continues_to_the_same_result(
    paper: Callable[..., tuple[int, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, whole = paper("whole", "--discretizer", "uniform")
    assert code == 0
    result = json.loads((whole / "result.json").read_text())
    metrics = result["metrics"]
    assert metrics["normalized_score_n"] == metrics["percent_of_expert_n"] == 3
    assert result["seeds"] == [7_000_000, 7_000_001, 7_000_002]
    assert metrics["return"] == pytest.approx(sum(result["returns"]) / 3)
    assert metrics["percent_of_expert"] == pytest.approx(100 * metrics["return"] / metrics["expert_return"])
    assert metrics["train_steps"] == 40
    assert min(metrics[f"seconds_{stage}"] for stage in ("collect", "train", "evaluate")) > 0
    assert result["settings"]["train"]["tokens"]["discretizer"] == "uniform"
    assert result["settings"]["search"]["beam_width"] == 2
    # Another search of the same model, with its own result file: only the episodes are played again.
    other = ["--out", str(whole / "other.json"), "--search.beam_width", "3", "--search.window", "null"]
    before = (whole / "run" / "weights.safetensors").stat().st_mtime_ns
    assert paper("whole", "--discretizer", "uniform", *other)[0] == 0
    search = json.loads((whole / "other.json").read_text())["settings"]["search"]
    assert (search["beam_width"], search["window"]) == (3, None)
    assert (whole / "run" / "weights.safetensors").stat().st_mtime_ns == before
    assert json.loads((whole / "result.json").read_text()) == result

    # The same in pieces: data alone, half of the training, and the rest in another folder without the data.
    assert paper("cut", "--discretizer", "uniform", "--until", "collect")[0] == 0
    update = EagerEngine.update

    def slow_update(engine: EagerEngine) -> Tensor:
        time.sleep(0.2)
        return update(engine)

    with monkeypatch.context() as slow:
        slow.setattr(EagerEngine, "update", slow_update)
        code, cut = paper("cut", "--discretizer", "uniform", "--time_limit", "3")
    assert code == 75
    assert not (cut / "trained.json").exists()
    (cut / "data.npz").unlink()
    cut = cut.rename(cut.with_name("elsewhere"))
    assert paper("elsewhere", "--discretizer", "uniform")[0] == 0
    weights, others = (load_file(folder / "run" / "weights.safetensors") for folder in (whole, cut))
    assert all(weights[name].equal(others[name]) for name in weights)
    assert json.loads((cut / "result.json").read_text())["returns"] == result["returns"]


def test_flags_that_no_stage_has_are_refused(paper: Callable[..., tuple[int, Path]]) -> None:
    with pytest.raises(SystemExit, match="--beam_width: not a flag"):
        paper("none", "--beam_width", "3")


def test_plan_times_on_a_straight_line_have_distance_zero() -> None:
    distance = runpy.run_path(str(BENCHMARKS / "plan_latency.py"))["distance_from_line"]
    assert distance({5: 10.0, 10: 30.0, 15: 50.0, 20: 70.0}) == pytest.approx(0.0, abs=1e-12)
    # 5, 10, 15 and 20 seconds, except 12 instead of 10: the least-squares line is 1 + 0.96 h by hand, 5.8 at 5.
    assert distance({5: 5.0, 10: 12.0, 15: 15.0, 20: 20.0}) == pytest.approx(1 - 5 / 5.8, abs=1e-9)


@pytest.mark.parametrize(("task", "planner"), [("hopper", "return_planner"), ("antmaze", "q_planner")])
def test_forgetful_loops_plan_the_same_whatever_they_did_before(task: str, planner: str) -> None:
    script = runpy.run_path(str(BENCHMARKS / "real_time.py"))
    model = script["make_model"](task, 3, torch.device("cpu"))
    config = SearchConfig(beam_width=2, horizon=1, context=1)
    loops = [script["Loop"](script[planner](model, config), num_envs=2, forgetful=True) for _ in range(2)]
    for loop in loops:
        median, tail = script["measure"](loop, 3)
        assert 0.0 < median <= tail
    first, second = (np.concatenate(loop.actions) for loop in loops)
    assert first.shape == (2 * (config.context + 2 + 3), model.layout.action_dim)
    np.testing.assert_array_equal(first, second)


def test_plans_with_equal_noise_are_equal_and_with_other_noise_differ(
    tiny_model: TrajectoryModel, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(BENCHMARKS / "precision.py"))
    tiny_model.save(tmp_path / "run")
    save_npz(tiny_dataset, tmp_path / "episodes.npz")
    words = [str(tmp_path / "run"), str(tmp_path / "episodes.npz"), "--device", "cpu", "--context", "1"]
    words += ["--searches", "2:1,4:2", "--prompts", "40", "--out", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["precision.py", *words])
    script["main"]()
    metrics = json.loads((tmp_path / "x.json").read_text())["metrics"]
    for name in ("beam_2_horizon_1", "beam_4_horizon_2"):  # without a GPU both are float32
        assert metrics[f"same_first_action_{name}"] == 1.0 and metrics[f"action_gap_{name}"] == 0.0
        assert metrics[f"other_noise_{name}"] < 1.0 and metrics[f"action_gap_other_noise_{name}"] > 0.0
    prompts = script["draw_prompts"](tiny_model, tiny_dataset, 1, 40)
    layout = tiny_model.layout
    rows = [tiny_model.tokenizer.encode(each) for each in tiny_dataset]
    pairs = {(*first, *second[layout.observation]) for row in rows for first, second in itertools.pairwise(row)}
    assert {tuple(prompt) for prompt in prompts} <= pairs


def test_the_table_of_baselines_continues_and_joins_its_cells(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    for task, seed in (("hopper-medium", 0), ("hopper-medium-replay", 1)):
        save_npz(collect("Hopper-v5", "random", episodes=3, seed=seed), tmp_path / f"{task}.npz")
    table = runpy.run_path(str(BENCHMARKS / "baselines_table.py"))["main"]
    tasks, names = ["hopper-medium", "hopper-medium-replay"], ["bc", "dt"]
    words = ["--datasets", str(tmp_path), "--device", "cpu", "--tasks", *tasks, "--algorithms", *names]
    words += ["--steps", "12", "--seeds", "2", "--episodes", "2", "--curve", "3", "--curve_episodes", "1"]
    words += ["--tuning_episodes", "1", "--settings", '{"dt": {"hidden": [8], "context": 2}}']
    words += ["--workers", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert table([*words, "--time_limit", "1e-9"]) == 75
    assert not (tmp_path / "out").exists()
    assert table(words) == 0
    metrics = json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    for name in names:
        cells = [json.loads((tmp_path / "out" / f"{task}_{name}.json").read_text()) for task in tasks]
        scores = [np.mean(cell["scores"]) for cell in cells]
        assert metrics[f"{name}_average"] == pytest.approx(np.mean(scores))
        assert metrics[f"hopper-medium_{name}"] == pytest.approx(scores[0])
        errors = [cell["metrics"]["normalized_score_stderr"] for cell in cells]
        assert metrics[f"{name}_average_stderr"] == pytest.approx(np.sqrt(np.square(errors).sum()) / 2)
        assert [point["step"] for point in cells[0]["curve"]] == [4, 8, 12]
        assert len(cells[0]["returns"]["1"]) == 2 and cells[0]["metrics"]["normalized_score_seeds"] == 2
        assert cells[0]["metrics"]["normalized_score_episodes"] == 4
    chosen = json.loads((tmp_path / "out" / "hopper-medium_dt.json").read_text())["acting"]["1"]
    values = {settings["target_return"]: value for settings, value in chosen["tried"]}
    assert values.keys() == {3600.0, 1800.0}
    assert values[chosen["chosen"]["target_return"]] == max(values.values())
    # Cells that exist are not trained again.
    before = (tmp_path / "out" / "hopper-medium_bc.json").stat().st_mtime_ns
    assert table(words) == 0
    assert (tmp_path / "out" / "hopper-medium_bc.json").stat().st_mtime_ns == before


def test_the_table_of_baselines_trains_several_algorithms_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    script = runpy.run_path(str(BENCHMARKS / "baselines_table.py"))
    words = ["--datasets", str(tmp_path), "--device", "cpu", "--tasks", "hopper-medium", "--algorithms", "bc", "dt"]
    words += ["--seeds", "1", "--episodes", "1", "--curve", "2", "--curve_episodes", "1", "--tuning_episodes", "1"]
    words += ["--settings", '{"bc": {"steps": 8}, "dt": {"hidden": [8], "context": 2, "steps": 4}}']
    words += ["--workers", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--trainings", "2"]
    with pytest.raises(SystemExit, match=r"hopper-medium\.npz does not exist; give --policies"):
        script["main"](words)
    save_npz(collect("Hopper-v5", "random", episodes=3, seed=0), tmp_path / "hopper-medium.npz")
    trainings = [("train", "hopper-medium_dt"), ("train", "hopper-medium_bc")]
    assert [(job.kind, job.out.stem) for job in script["jobs"](script["parse"](words))] == trainings
    assert script["main"](words) == 0
    metrics = json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    assert metrics["bc_average_n"] == metrics["dt_average_n"] == 1
    assert not any(name.endswith("_stderr") for name in metrics), "there is one training seed"
    for name, steps in (("bc", 8), ("dt", 4)):
        cell = json.loads((tmp_path / "out" / f"hopper-medium_{name}.json").read_text())
        assert cell["metrics"]["train_steps"] == steps
    assert script["jobs"](script["parse"](words)) == []


def test_the_table_of_baselines_collects_the_parts_of_a_dataset_once(tmp_path: Path) -> None:
    script = runpy.run_path(str(BENCHMARKS / "baselines_table.py"))
    words = ["--datasets", str(tmp_path), "--policies", str(tmp_path), "--algorithms", "bc", "--out", str(tmp_path)]
    words += ["--tasks", "hopper-medium-expert", "hopper-medium"]
    found = script["jobs"](script["parse"](words))
    assert [(job.kind, job.out.stem, [path.stem for path in job.needs]) for job in found] == [
        ("collect", "hopper-medium", []),
        ("collect", "hopper-expert", []),
        ("collect", "hopper-medium-expert", ["hopper-medium", "hopper-expert"]),
        ("train", "hopper-medium_bc", ["hopper-medium-expert", "hopper-medium"]),
    ]
    (tmp_path / "hopper-medium-expert.npz").touch()  # its parts are not needed any more
    found = script["jobs"](script["parse"](words))
    assert [job.out.stem for job in found] == ["hopper-medium", "hopper-medium_bc"]


def test_an_interrupted_table_of_baselines_continues_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    save_npz(collect("Hopper-v5", "random", episodes=3, seed=0), tmp_path / "hopper-medium.npz")
    words = [sys.executable, "-u", BENCHMARKS / "baselines_table.py", "--datasets", tmp_path, "--device", "cpu"]
    words += ["--tasks", "hopper-medium", "--algorithms", "bc", "--steps", "50000", "--seeds", "1"]
    words += ["--settings", '{"bc": {"hidden": [8], "batch_size": 8}}']
    words += ["--workers", "0", "--work", tmp_path / "work", "--out", tmp_path / "out"]
    reached = []
    for _ in range(2):
        with subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()  # bc on hopper-medium: step 0 of 50000
            reached.append(int(first.split("step ")[1].split()[0]))
            assert process.stdout.readline().startswith("bc step")
            process.send_signal(signal.SIGINT)
            assert "out of time; run the same command to continue" in process.stdout.read()
        assert process.returncode == 75
    assert reached[0] == 0 and reached[1] >= 100


def test_the_table_chooses_the_penalty_of_brac_with_a_seed_that_is_not_scored(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    save_npz(collect("Hopper-v5", "random", episodes=3, seed=0), tmp_path / "hopper-medium.npz")
    script = runpy.run_path(str(BENCHMARKS / "baselines_table.py"))
    small = {"hidden": [8], "actor_hidden": [8], "clone_steps": 2, "warmup_steps": 2, "batch_size": 8}
    words = ["--datasets", str(tmp_path), "--device", "cpu", "--tasks", "hopper-medium", "--algorithms", "brac"]
    words += ["--steps", "11", "--seeds", "1", "--episodes", "1", "--curve", "3", "--curve_episodes", "1"]
    words += ["--workers", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert script["main"]([*words, "--settings", json.dumps({"brac": small})]) == 0
    out = tmp_path / "out" / "hopper-medium_brac.json"
    cell = json.loads(out.read_text())
    scores = {values["penalty"]: score for values, score in cell["chosen"]["tried"]}
    assert scores.keys() == {0.1, 1.0, 10.0}
    assert (
        cell["settings"]["penalty"] == cell["chosen"]["chosen"]["penalty"] == max(scores, key=lambda key: scores[key])
    )
    assert cell["training_seeds"] == [0] and [point["step"] for point in cell["curve"]] == [3, 6, 11]
    work = tmp_path / "work" / "brac_hopper-medium"
    trials = [sorted((work / f"choice_{index}" / "checkpoints").rglob("*.json")) for index in range(3)]
    assert all(path.name != "score.json" and path.parents[1].name == "5" for paths in trials for path in paths)
    # A penalty of the user is not chosen.
    out.unlink()
    words[words.index("--work") + 1] = str(tmp_path / "other")
    assert script["main"]([*words, "--settings", json.dumps({"brac": {**small, "penalty": 3.0}})]) == 0
    cell = json.loads(out.read_text())
    assert cell["settings"]["penalty"] == 3.0 and cell["chosen"] == {}


def test_stopped_players_store_what_was_played_and_drop_the_rest(tmp_path: Path) -> None:
    players = runpy.run_path(str(BENCHMARKS / "baselines_players.py"))["Players"](0, None)
    done, pending = Future[list[float]](), Future[list[float]]()
    done.set_result([3.0])
    players._waiting = [(tmp_path / "a.json", {0: done}), (tmp_path / "b.json", {0: done, 1: pending})]
    players.stop()
    assert json.loads((tmp_path / "a.json").read_text()) == {"0": [3.0]}
    assert not (tmp_path / "b.json").exists() and pending.cancelled()


def test_the_throughput_of_baselines_is_measured_for_each_number_of_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(BENCHMARKS / "baselines_throughput.py"))
    out = tmp_path / "throughput.json"
    words = ["--device", "cpu", "--algorithms", "bc", "cql", "--seeds", "1", "2", "--hidden", "8", "8"]
    words += ["--steps", "3", "--warm_up", "1", "--repeats", "4", "--episodes", "1", "--out", str(out)]
    script["main"]([*words, "--settings", '{"cql": {"bfloat16": true}}'])
    result = json.loads(out.read_text())
    metrics = result["metrics"]
    assert result["settings"]["cql"] == {"bfloat16": True}
    for name in ("bc", "cql"):
        assert metrics[f"{name}_steps_per_second"] == np.median(
            result["measured"][f"{name}_steps_per_second"]["repeats"]
        )
        speeds = [metrics[f"{name}_steps_per_second"], metrics[f"{name}_steps_per_second_2_seeds"]]
        assert min(speeds) > 0
        assert metrics[f"{name}_cost_2_seeds"] == pytest.approx(speeds[0] / speeds[1])
        assert metrics[f"{name}_steps_per_second_stderr"] > 0
    assert " us" not in capsys.readouterr().out
    script["main"]([*words[:3], "bc", *words[5:], "--profile", "3"])
    profile = capsys.readouterr().out.split("bc_steps_per_second_2_seeds")[1].splitlines()[1:5]
    total, *slowest = (float(line.split()[0]) for line in profile)
    assert sorted(slowest, reverse=True) == slowest and slowest[2] > 0 and sum(slowest) < total
