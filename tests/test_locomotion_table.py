"""The script for the locomotion table: its jobs, how they are run and resumed, and what it writes."""

import json
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_transformer.actors import ScriptedPolicy, make_script, parse_actor
from trajectory_transformer.cli import main as tt
from trajectory_transformer.collect import collect
from trajectory_transformer.data.episode import Dataset, load_npz, save_npz
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.rollout import make_envs, rollout

PAPER = Path(__file__).parents[1] / "benchmarks" / "paper"
TABLE = runpy.run_path(str(PAPER / "table.py"))
Job, Queue = TABLE["Job"], TABLE["Queue"]


def touching(path: Path, *, kind: str = "train", needs: tuple[Path, ...] = (), wait: float = 0.0) -> Any:
    """A job that makes an empty file."""
    code = f"import pathlib, time; time.sleep({wait}); pathlib.Path({str(path)!r}).write_text('')"
    return Job(kind, path, (sys.executable, "-c", code), needs)


def queue(tmp_path: Path, limit: float = 60.0) -> Any:
    return Queue({"train": 1, "play": 1}, tmp_path / "logs", time.monotonic() + limit)


def test_jobs_wait_for_their_inputs_and_finished_ones_are_skipped(tmp_path: Path) -> None:
    first, second, done = (tmp_path / name for name in ("first", "second", "done"))
    done.write_text("kept")
    jobs = [touching(second, kind="play", needs=(first,)), touching(first), touching(done)]
    assert queue(tmp_path).run(jobs)
    assert second.stat().st_mtime_ns >= first.stat().st_mtime_ns
    assert done.read_text() == "kept"


def test_an_interrupted_job_is_resumed_and_a_failed_one_is_shown(tmp_path: Path) -> None:
    out, started = tmp_path / "out", tmp_path / "run.json"
    resume = touching(out).command
    broken = Job("train", out, (sys.executable, "-c", "raise SystemExit('no such flag')"), (), resume, started)
    with pytest.raises(SystemExit, match="no such flag"):
        queue(tmp_path).run([broken])
    started.write_text("")
    assert queue(tmp_path).run([broken])


def test_jobs_of_a_lane_run_one_after_the_other_and_kinds_without_slots_not_at_all(tmp_path: Path) -> None:
    def noting(name: str, lane: str) -> Any:
        # The other of its lane must not run at the same time; `alone` runs beside both.
        code = f"""
import pathlib, sys, time
folder = pathlib.Path({str(tmp_path)!r})
(folder / "running-{lane}-{name}").touch()
time.sleep(0.5)
overlap = len(list(folder.glob("running-{lane}-*"))) > 1
(folder / "running-{lane}-{name}").unlink()
(folder / {name!r}).touch()
sys.exit(overlap)
"""
        return Job("train", tmp_path / name, (sys.executable, "-c", code), lane=lane)

    jobs = [noting("a", "x"), noting("b", "x"), noting("alone", "y"), touching(tmp_path / "played", kind="play")]
    assert not Queue({"train": 3, "play": 0}, tmp_path / "logs", time.monotonic() + 60.0).run(jobs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "alone", "b", "logs"]


def test_evaluations_give_way_to_trainings_on_a_shared_gpu(tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ.get('CUDA_MPS_CLIENT_PRIORITY', 'default'))"
    jobs = [
        Job(kind, tmp_path / kind, (sys.executable, "-c", code, str(tmp_path / kind))) for kind in ("train", "play")
    ]
    assert queue(tmp_path).run(jobs)
    assert [(tmp_path / kind).read_text() for kind in ("train", "play")] == ["default", "1"]


def test_the_deadline_stops_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    slow, later = touching(tmp_path / "slow", wait=60.0), touching(tmp_path / "later")
    before = time.monotonic()
    assert not queue(tmp_path, limit=0.5).run([slow, later])
    assert time.monotonic() - before < 30.0
    assert not (tmp_path / "slow").exists() and not (tmp_path / "later").exists()


def test_a_job_whose_input_nobody_makes_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs .*missing, which no job makes"):
        queue(tmp_path).run([touching(tmp_path / "x", needs=(tmp_path / "missing",))])


def plan_of(tmp_path: Path, *words: str) -> Any:
    required = ["--policies", "p", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    return TABLE["parse"]([*required, *words])


def test_all_cells_have_their_jobs_with_one_recipe(tmp_path: Path) -> None:
    jobs = plan_of(tmp_path, "--parts", "scores", "ablations", "imitation", "--train.steps", "9").jobs()
    counts = {kind: sum(job.kind == kind for job in jobs) for kind in ("collect", "train", "play")}
    assert counts == {"collect": 9 + 3, "train": (18 + 3) * 3, "play": (18 + 3 * 5 + 3 * 2) * 3}
    assert len({job.out for job in jobs}) == len(jobs)
    settings = set()
    for job in jobs:
        if job.kind != "train":
            continue
        words = list(job.command)
        for name in ("--out", "--seed", "--tokens.discretizer"):
            del words[words.index(name) : words.index(name) + 2]
        settings.add(tuple(words[5:]))  # without the dataset
        assert words[-2:] == ["--train.steps", "9"]
    assert len(settings) == 1, "no flags of single datasets"


def test_data_is_collected_again_only_where_a_model_needs_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--tasks", "hopper-medium", "walker2d-medium", "--discretizers", "uniform", "--seeds", "1")

    def outputs() -> list[Path]:
        return [job.out for job in plan.jobs() if job.kind == "collect" and not job.out.exists()]

    assert outputs() == [plan.facts("hopper-medium"), plan.facts("walker2d-medium")]
    for task in ("hopper-medium", "walker2d-medium"):
        write_json(plan.facts(task), {})
    write_json(plan.trained("hopper-medium", "uniform", 0), {})
    assert outputs() == [plan.data("walker2d-medium")]


def test_flags_that_no_command_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_of(tmp_path, "--horizon", "3")
    assert "--horizon: not a flag of this script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "task", "flags"),
    [
        ("authors_search", "walker2d-medium-expert", "--preset walker2d-medium-expert"),
        ("authors_search", "hopper-medium-expert", "--preset reference"),
        ("sampled_rewards", "hopper-medium-expert", "--search.reward.top_k null"),
    ],
)
def test_ablations_change_the_search_only(name: str, task: str, flags: str) -> None:
    assert [str(word) for word in TABLE["ablation_flags"](name, task)] == flags.split()


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_results_hold_means_and_both_errors(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--tasks", "hopper-medium", "--discretizers", "uniform", "--seeds", "2", "--episodes", "2")
    low, high = -20.272305, 3234.3  # returns of scores 0 and 100
    part = {"score": 50.0}
    facts = {"env": "Hopper-v5", "data": part, "best_policy_noisy": part, "best_policy_noiseless": {"score": 60.0}}
    write_json(plan.facts("hopper-medium"), facts)
    for seed, returns in enumerate([[low, high], [high, high]]):
        write_json(plan.played("hopper-medium", "uniform", seed), {"returns": returns})
        training = {"seconds": 3.0 + seed, "metrics": {}}
        write_json(plan.trained("hopper-medium", "uniform", seed), training)
    TABLE["write_scores"](plan)
    cell = json.loads((tmp_path / "out" / "hopper-medium_uniform.json").read_text())["metrics"]
    assert cell["normalized_score"] == pytest.approx(75.0)
    assert cell["normalized_score_stderr"] == pytest.approx(25.0)  # of 50 and 100
    assert cell["normalized_score_stderr_episodes"] == pytest.approx(25.0)  # of 0, 100, 100 and 100
    assert (cell["best_policy_noiseless_score"], cell["data_score"], cell["seconds_train"]) == (60.0, 50.0, 3.5)
    table = json.loads((tmp_path / "out" / "table.json").read_text())["metrics"]
    assert table["cells"] == table["cells_uniform"] == 1
    assert table["hopper-medium_uniform"] == table["average_uniform"] == pytest.approx(75.0)
    assert table["hopper-medium_uniform_stderr"] == pytest.approx(25.0)


def test_an_ablation_says_how_many_training_seeds_it_has(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--tasks", "hopper-medium-expert", "--seeds", "2")
    write_json(plan.facts("hopper-medium-expert"), {"env": "Hopper-v5"})
    low, high = -20.272305, 3234.3  # returns of scores 0 and 100
    for seed, value in enumerate((low, high)):
        write_json(plan.played("hopper-medium-expert", "quantile", seed), {"returns": [value]})
    write_json(plan.played("hopper-medium-expert", "quantile", 1, "nucleus"), {"returns": [low, high]})
    TABLE["write_ablations"](plan)
    metrics = json.loads((tmp_path / "out" / "ablations.json").read_text())["metrics"]
    assert (metrics["hopper-medium-expert_default"], metrics["hopper-medium-expert_default_seeds"]) == (50.0, 2)
    assert (metrics["hopper-medium-expert_nucleus"], metrics["hopper-medium-expert_nucleus_seeds"]) == (50.0, 1)
    assert metrics["hopper-medium-expert_nucleus_episodes"] == 2
    assert "hopper-medium-expert_no_search" not in metrics
    assert plan.scores("hopper-medium-expert", "quantile") == [[0.0], [100.0]]
    plan.played("hopper-medium-expert", "quantile", 0).unlink()
    assert plan.scores("hopper-medium-expert", "quantile") is None  # a cell needs all


def test_imitation_is_given_in_percent_of_the_expert_with_and_without_noise(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--seeds", "1", "--best", "uniform")
    facts = {"best_policy_noisy_return": 100.0, "best_policy_noiseless_return": 125.0}
    write_json(plan.facts("walker2d-expert"), facts)
    write_json(plan.played("walker2d-expert", "uniform", 0, "median"), {"returns": [100.0, 110.0]})
    TABLE["write_imitation"](plan)
    metrics = json.loads((tmp_path / "out" / "imitation.json").read_text())["metrics"]
    assert metrics["walker2d_median"] == pytest.approx(105.0)
    assert metrics["walker2d_median_of_noiseless"] == pytest.approx(84.0)
    assert "walker2d_mode" not in metrics and "hopper_median" not in metrics


def test_the_episodes_of_each_policy_follow_each_other() -> None:
    by_policy = runpy.run_path(str(PAPER / "locomotion_data.py"))["by_policy"]
    metadata = {
        "env": "x",
        "policy.0.policy": "a",
        "policy.0.episodes": 1,
        "policy.1.policy": "b",
        "policy.1.episodes": 2,
    }
    assert by_policy([7.0, 1.0, 3.0], metadata) == {"a": [7.0], "b": [1.0, 3.0]}


def test_a_medium_expert_set_made_of_two_equals_the_recipe(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    data = runpy.run_path(str(PAPER / "locomotion_data.py"))
    made = load_npz(data["make_dataset"]("hopper-medium-expert", tmp_path / "made", policies, scale=1e-4))
    recipe = tmp_path / "recipe.yaml"
    parts = ("hopper-medium-sac sto", "hopper-expert-berkeley sto")
    lines = "".join(f"  - {{policy: {policy}, steps: 100}}\n" for policy in parts)
    recipe.write_text(f"env: Hopper-v5\nparts:\n{lines}")
    words = ["--recipe", recipe, "--policies", policies, "--out", tmp_path / "whole.npz", "--workers", "1"]
    assert tt(["collect", *map(str, words)]) == 0
    whole = load_npz(tmp_path / "whole.npz")
    assert made.metadata == whole.metadata
    for one, other in zip(made, whole, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
        assert one.terminated == other.terminated
    words = ["hopper-medium-expert", "--policies", policies, "--out", tmp_path / "made"]
    assert data["main"]([*map(str, words), "--episodes", "0"]) == 0
    assert not (tmp_path / "made" / "hopper-medium-expert.json").exists()
    # What it is compared with: the best policy is the one with the best episodes in the data.
    path = data["make_facts"]("hopper-medium-expert", tmp_path / "made", policies, episodes=1, workers=1)
    facts = json.loads(path.read_text())
    assert list(facts["policies"]) == list(parts)
    assert facts["best_policy"] == max(parts, key=facts["policies"].__getitem__)
    assert facts["best_policy_noisy"]["score"] == facts["policies"][facts["best_policy"]]
    assert facts["best_policy_noiseless"]["score_n"] == 1
    assert facts["best_policy_noisy"]["score"] != facts["best_policy_noiseless"]["score"]


def test_discounted_returns_are_those_of_the_recorded_rewards(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    script = runpy.run_path(str(PAPER / "discounted_returns.py"))
    assert script["discounted"](np.array([1.0, 2.0, 4.0]), 0.5) == 3.0
    words = ["--policies", policies, "--envs", "hopper", "--episodes", 2, "--out", tmp_path / "x.json"]
    script["main"](list(map(str, words)))
    metrics = json.loads((tmp_path / "x.json").read_text())["metrics"]
    for name, policy in (("medium", "hopper-medium-sac sto"), ("expert", "hopper-expert-berkeley sto")):
        played = collect("Hopper-v5", policy, episodes=2, seed=script["SEED"], policies=policies)
        expected = np.mean(
            [sum(0.99**step * reward for step, reward in enumerate(np.asarray(each.rewards))) for each in played]
        )
        assert metrics[f"hopper_{name}_discounted_return"] == pytest.approx(expected)
        assert metrics[f"hopper_{name}_steps"] == np.mean([len(each) for each in played])


def test_failures_compare_episodes_with_the_policies_of_the_data(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    script = runpy.run_path(str(PAPER / "failures.py"))["main"]
    good, poor = "hopper-expert-berkeley", "hopper-medium-sac"
    envs = make_envs("Hopper-v5", 1, {"max_episode_steps": 100})
    for name in (good, poor):
        actor = make_script(
            parse_actor(f"{name} det", policies), "Hopper-v5", action_leaf(envs.single_action_space), 11
        )
        policy = ScriptedPolicy(actor, np.random.default_rng(0))
        played = rollout(envs, policy, num_episodes=2, seed=5)
        save_npz(Dataset(tuple(played), {"seed": 5}), tmp_path / f"{name}.npz")
    envs.close()
    words = ["--env", "Hopper-v5", "--policies", policies, "--names", good, poor, "--data", tmp_path / f"{good}.npz"]

    def looked_at(name: str, below: float) -> dict[str, Any]:
        out = tmp_path / f"{name}_{below}.json"
        own = [tmp_path / f"{name}.npz", *words, "--below", below, "--steps", 20, "--out", out]
        assert script([str(word) for word in own]) == 0
        return dict(json.loads(out.read_text()))

    found = {name: looked_at(name, 1e9) for name in (good, poor)}
    for name, result in found.items():
        assert result["metrics"][f"followed_{name}"] == 1.0
        assert [each["repeated_steps"] for each in result["played"]] == [100, 100]
        assert result["played"][0]["action_distance"][name] == pytest.approx(0.0, abs=1e-5)
    assert found[good]["played"][0]["state_distance"] == pytest.approx(0.0, abs=1e-2)
    assert found[poor]["played"][0]["state_distance"] > 0.1
    # A policy that is started in a state of its own episode earns what followed there.
    for episode, entry in zip(load_npz(tmp_path / f"{good}.npz"), found[good]["played"], strict=True):
        assert episode.rewards is not None
        starts = [start for start in entry["starts"] if start["step"] + 20 <= len(episode.rewards)]
        assert [start["step"] for start in starts] == list(range(0, 81, 10))
        for start in starts:
            follows = float(episode.rewards[start["step"] : start["step"] + 20].sum())
            assert (start["return"], start["steps"]) == (pytest.approx(follows, abs=0.06), 20)
    # No episode failed: all are the control. An episode that its seed does not repeat gives no starts.
    control = looked_at(good, -1e9)["metrics"]
    assert (control["failed"], control["starts_control"], control["survived_control"]) == (0, 2, 1.0)
    moved = load_npz(tmp_path / f"{good}.npz")
    save_npz(replace(moved, metadata={"seed": 6}), tmp_path / f"{good}.npz")
    assert [entry["starts"] for entry in looked_at(good, 1e8)["played"]] == [[], []]


def test_failures_name_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(PAPER / "failures.py"))["main"]
    played = tmp_path / "played.npz"
    words = [str(played), "--env", "Hopper-v5", "--policies", str(tmp_path), "--names", "hopper-expert-berkeley"]
    words += ["--data", str(tmp_path / "data.npz"), "--below", "1", "--out", str(tmp_path / "out.json")]
    for missing in ("played.npz", "data.npz"):
        with pytest.raises(SystemExit):
            script(words)
        assert f"{missing} does not exist" in capsys.readouterr().err
        played.touch()
