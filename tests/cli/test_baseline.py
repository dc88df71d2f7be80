"""`tt baseline` as a user types it, and `tt evaluate` on what it writes."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from trajectory_transformer import Baseline, evaluate, load_dataset
from trajectory_transformer.baselines import PRESETS, BaselineTrainer
from trajectory_transformer.cli import main
from trajectory_transformer.config import FIRST_SEED
from trajectory_transformer.data.episode import load_npz

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]
SMALL = ["--settings", "{hidden: [16, 16], batch_size: 16}"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random episodes of Pendulum-v1, whose actions reach from -2 to 2, and a run with two seeds."""
    folder = tmp_path_factory.mktemp("baseline")
    data = str(folder / "data.npz")
    words = ["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]
    assert main(words) == 0
    words = ["baseline", data, "--algorithm", "iql", "--out", str(folder / "iql"), "--steps", "12"]
    assert main([*words, "--seeds", "[3,5]", "--device", "cpu", *SMALL]) == 0
    return folder


def test_a_run_folder_holds_checkpoint_metrics_and_what_to_resume_from(made: Path) -> None:
    written = {path.name for path in (made / "iql").iterdir()}
    names = ("run.json", "checkpoint.json", "weights.safetensors", "resume.safetensors", "metrics.jsonl")
    assert written >= {*names, "training.json"}
    lines = [json.loads(line) for line in (made / "iql" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(len(line["losses"]["q"]) == 2 for line in lines)
    assert lines[-1]["seconds_left"] == 0
    result = json.loads((made / "iql" / "training.json").read_text())
    assert result["name"] == "baseline iql" and result["seeds"] == [3, 5] and result["metrics"]["steps"] == 12
    assert result["command"].startswith("tt baseline") and "--seeds '[3, 5]'" in result["command"]
    stored = json.loads((made / "iql" / "checkpoint.json").read_text())
    assert stored["algorithm"]["settings"]["hidden"] == [16, 16] and stored["metadata"]["env"] == "Pendulum-v1"


def test_evaluate_plays_every_training_seed(tt: Run, made: Path, tmp_path: Path) -> None:
    code, text = tt("evaluate", made / "iql", "--episodes", 2, "--out", "all.json", "--device", "cpu")
    assert code == 0, text
    assert "iql, 2 training seeds, 4 episodes" in text
    result = json.loads((tmp_path / "all.json").read_text())
    assert result["name"] == "evaluate Pendulum-v1 iql" and result["metrics"]["return_n"] == 4
    assert result["training"]["metrics"]["steps"] == 12
    baseline = Baseline.load(made / "iql")
    for index, seed in enumerate((3, 5)):
        found = evaluate(baseline.policy(seed), episodes=2, seed=FIRST_SEED)
        returns = [episode.total_reward for episode in found.episodes]
        assert result["returns"][2 * index : 2 * index + 2] == returns
        assert result["by_training_seed"][str(seed)]["return"] == pytest.approx(np.mean(returns))
        assert {"plan_ms_p50", "steps"} <= found.metrics.keys()
    actions = np.concatenate([episode.actions for episode in load_npz(tmp_path / "all.npz")])
    assert np.abs(actions).max() <= 2
    assert np.abs(actions).max() > 0

    code, text = tt("evaluate", made / "iql", "--episodes", 2, "--training_seed", 5, "--out", "one.json")
    assert code == 0, text
    assert json.loads((tmp_path / "one.json").read_text())["returns"] == result["returns"][2:]


def test_a_stopped_run_resumes_to_the_same_weights(
    tt: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--algorithm", "td3bc", "--steps", 25, "--seeds", "[1,2]", "--checkpoint_every", 4, *SMALL]
    code, text = tt("baseline", made / "data.npz", "--out", "whole", *words)
    assert code == 0, text
    take_steps = BaselineTrainer._take_steps

    def interrupted(trainer: BaselineTrainer[object], kinds: tuple[str, ...]) -> None:
        take_steps(trainer, kinds)
        if trainer.step == 9:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(BaselineTrainer, "_take_steps", interrupted)
        code, text = tt("baseline", made / "data.npz", "--out", "cut", *words)
    assert code == 130
    assert "stopped at step 10 of 25; resume with: tt baseline --resume cut" in text
    code, text = tt("baseline", "--resume", "cut")
    assert code == 0, text
    assert "resuming cut at step 10 of 25" in text
    whole, cut = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    losses = [[json.loads(line)["losses"] for line in part] for part in lines]
    assert losses[0] == losses[1]


def test_resume_refuses_other_settings_and_other_data(tt: Run, refused: Refused, made: Path) -> None:
    refused("uses the settings of the run; leave out --steps", "baseline", "--resume", made / "iql", "--steps", 5)
    words = ["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", 1, "--out", "other.npz"]
    assert tt(*words)[0] == 0
    refused("started on a different dataset", "baseline", "other.npz", "--resume", made / "iql")


def test_invalid_input_is_answered_with_one_sentence(refused: Refused, made: Path) -> None:
    data = made / "data.npz"
    refused("name the dataset to train on", "baseline", "--out", "x")
    refused("must be one of bc, .*mbop, got 'sac'", "baseline", data, "--algorithm", "sac", "--out", "x")
    refused("exists already", "baseline", data, "--out", made / "iql")
    refused("seeds must differ", "baseline", data, "--seeds", "[1,1]", "--out", "x")
    refused(
        "unknown setting expectil; did you mean expectile?",
        "baseline",
        data,
        "--settings",
        "{expectil: 0.8}",
        "--out",
        "x",
    )
    refused("setting steps must be int", "baseline", data, "--settings", "{steps: many}", "--out", "x")
    refused("expectile must lie in", "baseline", data, "--settings", "{expectile: 1.5}", "--out", "x")
    refused("action_margin must lie in", "baseline", data, "--settings", "{action_margin: -0.1}", "--out", "x")
    refused("the same setting", "baseline", data, "--settings", "{steps: 5}", "--steps", 6, "--out", "x")
    refused("backend captured cannot be used here: it needs a GPU", "baseline", data, "--backend", "captured")
    refused("is a baseline, .*leave out --search.horizon", "evaluate", made / "iql", "--search.horizon", 3)
    refused("is a baseline, .*leave out --plan", "evaluate", made / "iql", "--plan", "return")
    refused("trained with the seeds \\[3, 5\\], not with 4", "evaluate", made / "iql", "--training_seed", 4)
    refused("'CartPole-v1' does not fit the model", "evaluate", made / "iql", "--env", "CartPole-v1")


def test_data_that_an_algorithm_cannot_learn_from_is_refused(tt: Run, refused: Refused, tmp_path: Path) -> None:
    assert tt("collect", "--episodes", 2, "--out", "rooms.npz")[0] == 0
    with np.load(tmp_path / "rooms.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "rewards"}
    np.savez(tmp_path / "no_rewards.npz", **arrays)
    refused("learns from rewards, and this dataset has none", "baseline", "no_rewards.npz", "--algorithm", "cql")
    assert tt("baseline", "no_rewards.npz", "--algorithm", "bc", "--steps", 2, *SMALL, "--out", "bc")[0] == 0
    words = ["collect", "--env", "CartPole-v1", "--policy", "random", "--episodes", 2, "--out", "pole.npz"]
    assert tt(*words)[0] == 0
    refused("is for continuous actions, and action 0 has categories", "baseline", "pole.npz", "--algorithm", "td3bc")


def test_goals_of_the_environment_reach_the_policy(tt: Run, tmp_path: Path) -> None:
    assert tt("collect", "--episodes", 3, "--out", "rooms.npz")[0] == 0
    goals = load_dataset(tmp_path / "rooms.npz").episodes[0].goal
    assert goals is not None
    assert tt("baseline", "rooms.npz", "--algorithm", "bc", "--steps", 2, *SMALL, "--out", "bc")[0] == 0
    assert Baseline.load(tmp_path / "bc").dims.goal == goals.size
    code, text = tt("evaluate", "bc", "--episodes", 1)
    assert code == 0, text
    assert "success_rate" in text


def test_help_names_every_preset(tt: Run) -> None:
    text = re.sub(r"-\n\s+", "-", tt("baseline", "--help")[1])  # names may be wrapped at a hyphen
    assert all(re.search(rf"\b{name}\b", text) for name in PRESETS)


def test_tables_are_read_by_their_columns_and_a_run_on_one_resumes(tt: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{run},{speed:.3f},{np.tanh(speed):.3f},{-speed:.3f}" for run in range(3) for speed in rng.normal(size=8)]
    (tmp_path / "log.csv").write_text("\n".join(["run,speed,torque,cost", *rows]) + "\n")
    columns = ["--columns.episode", "run", "--columns.observations", "[speed]", "--columns.actions", "[torque]"]
    words = ["--algorithm", "bc", "--steps", 4, "--device", "cpu", "--checkpoint_every", 2, *SMALL]
    code, text = tt("baseline", "log.csv", *columns, "--columns.reward", "cost", "--out", "run", *words)
    assert code == 0, text
    assert "21 transitions" in text  # the last row of a run is its final state
    code, text = tt("baseline", "--resume", "run", "--device", "cpu")
    assert code == 0 and "at step 4 of 4" in text, text
    code, text = tt("baseline", "log.csv", *columns, "--out", "run", "--overwrite", "true", *words)
    assert code == 0, text
