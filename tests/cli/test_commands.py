"""The commands as a user types them: what they write, and what they answer to input that cannot be used."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from trajectory_transformer.cli import main

TINY_MODEL = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
TINY = [*TINY_MODEL, "--tokens.num_bins", "16", "--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false"]
SHORT = ["--train.batch_size", "8", "--train.checkpoint_every", "5", "--train.log_every", "2"]

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset and a run trained on it for a moment."""
    folder = tmp_path_factory.mktemp("made")
    assert main(["collect", "--out", str(folder / "rooms.npz"), "--episodes", "6"]) == 0
    words = ["train", str(folder / "rooms.npz"), "--out", str(folder / "run"), *TINY, *SHORT, "--train.steps", "6"]
    assert main(words) == 0
    return folder


def refused(answer: tuple[int, str], pattern: str) -> None:
    """Exit code 2 and one sentence."""
    code, text = answer
    assert code == 2, text
    assert len(text.strip().splitlines()) == 1, text
    assert re.search(pattern, text), text


def edited(path: Path, source: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A dataset file with its arrays changed."""
    with np.load(source) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)
    return path


def test_collect_writes_a_dataset_that_show_describes(tt: Run, tmp_path: Path) -> None:
    code, text = tt("collect", "--episodes", 4, "--out", "rooms.npz", "--seed", 3)
    assert code == 0, text
    code, text = tt("data", "show", "rooms.npz")
    assert code == 0
    assert "4 episodes" in text
    assert "env: tt/FourRooms-v0" in text
    assert "ended by the task: 100.0 %" in text
    assert "observation 1" in text
    with np.load(tmp_path / "rooms.npz") as file:
        assert len(file["lengths"]) == 4


def test_a_run_holds_checkpoint_metrics_and_tensorboard(tt: Run, made: Path, tmp_path: Path) -> None:
    code, text = tt(
        "train", made / "rooms.npz", "--out", "run", *TINY, *SHORT, "--train.steps", 4, "--tensorboard", "true"
    )
    assert code == 0, text
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {
        "run.json",
        "checkpoint.json",
        "weights.safetensors",
        "resume.safetensors",
        "metrics.jsonl",
        "tensorboard",
    }
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    assert records[0].keys() >= {"loss", "losses", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_a_config_file_sets_flags_and_flags_override_it(tt: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("train: {steps: 2, batch_size: 4}\nmodel: {num_layers: 1, width: 16}\n")
    code, text = tt("train", "--config", "small.yaml", made / "rooms.npz", "--out", "run", "--train.steps", 3)
    assert code == 0, text
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["train"]["steps"] == 3
    assert stored["train"]["batch_size"] == 4
    assert stored["model"]["width"] == 16


def test_a_preset_changes_defaults_and_flags_override_it(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["--preset", "paper", "--train.steps", 1, "--train.batch_size", 2, "--train.weight_decay", 0.5, *TINY_MODEL]
    code, text = tt("train", made / "rooms.npz", "--out", "run", *words)
    assert code == 0, text
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["train"]["learning_rate"] == 2.5e-4
    assert stored["train"]["weight_decay"] == 0.5
    assert stored["tokens"]["value_includes_reward"] is True


def test_evaluate_writes_a_result_file_and_repeats_itself(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["evaluate", made / "run", "--episodes", 3, "--search.beam_width", 2, "--search.horizon", 2]
    for name in ("a.json", "b.json"):
        code, text = tt(*words, "--out", name)
        assert code == 0, text
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["metrics"] == second["metrics"]
    assert first["metrics"].keys() >= {"success_rate", "success_rate_n", "success_rate_stderr", "return", "steps"}
    assert first.keys() >= {"name", "command", "commit", "device", "versions", "seeds", "seconds", "metrics"}
    assert first["seeds"] == [1_000_000, 1_000_001, 1_000_002]
    assert "--search.beam_width 2" in first["command"]


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["trian"], r"no command 'trian'; did you mean 'train'\? valid are demo, collect"),
        (["data", "shw"], "did you mean 'data show'"),
        (["train", "x.npz", "--train.stepz", "5"], r"did you mean --train\.steps"),
        (["collect", "--colour", "red"], r"valid are --config --env --env_options --episodes"),
        (["train", "x.npz", "--train.steps", "many"], r"--train\.steps: expected int or null, got many"),
        (["train", "x.npz", "--train.steps", "0"], r"train\.steps must be at least 1, got 0"),
        (["train", "x.npz", "--model.width", "30"], r"model\.width must be a multiple of 4 heads, got 30"),
        (["train", "x.npz"], r"x\.npz: no such dataset file"),
        (["train"], "name the dataset file"),
        (["evaluate", "nowhere"], "nowhere: no such checkpoint folder"),
        (["evaluate", "x", "--search.horizon", "0"], r"search\.horizon must be at least 1, got 0"),
        (["collect", "--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["collect", "--env", "Nothing-v0"], "'Nothing-v0' cannot be made"),
        (["collect", "--env", "Pendulum-v1"], "knows only tt/FourRooms-v0"),
        (["train", "--resume", "nowhere"], r"nowhere/run\.json: the file is missing"),
        (["train", "x.npz", "--device", "abacus"], "--device must be auto, cpu or cuda, got 'abacus'"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(tt: Run, tmp_path: Path, words: list[str], pattern: str) -> None:
    refused(tt(*words), pattern)
    assert list(tmp_path.iterdir()) == []


def test_a_typo_in_a_config_file_is_answered_with_the_right_name(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text("train: {stepz: 2}\n")
    refused(tt("train", "--config", "typo.yaml", "x.npz"), r"did you mean --train\.steps")


def test_nan_in_an_episode_is_refused(tt: Run, made: Path, tmp_path: Path) -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays["observations"][len(arrays["observations"]) - 1, 1] = np.nan

    edited(tmp_path / "bad.npz", made / "rooms.npz", spoil)
    refused(tt("train", "bad.npz", "--out", "run", *TINY), r"bad\.npz, episode 5: observations must be finite, got nan")
    assert not (tmp_path / "run").exists()


def test_as_many_observations_as_actions_are_refused(tt: Run, made: Path, tmp_path: Path) -> None:
    def drop_final_states(arrays: dict[str, np.ndarray]) -> None:
        arrays["observations"] = arrays["observations"][: len(arrays["actions"])]

    edited(tmp_path / "bad.npz", made / "rooms.npz", drop_final_states)
    refused(tt("train", "bad.npz", "--out", "run", *TINY), r"bad\.npz: .*one more observation than actions")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["weights.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_a_broken_checkpoint_is_refused(tt: Run, made: Path, tmp_path: Path, name: str, fault: str) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run" / name
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = sorted((tmp_path / "run").iterdir())
    refused(tt("evaluate", "run"), f"{re.escape(name)}: .*{fault}")
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_checkpoint_of_a_newer_format_is_refused(tt: Run, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run/checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    refused(tt("evaluate", "run"), r"checkpoint format 99 is newer than 1")


def test_an_environment_that_does_not_fit_is_refused(tt: Run, made: Path, tmp_path: Path) -> None:
    refused(
        tt("evaluate", made / "run", "--env", "Pendulum-v1", "--out", "x.json"),
        "does not fit the model: it has 3 observation",
    )
    refused(
        tt("evaluate", made / "run", "--env", "CartPole-v1", "--out", "x.json"), "does not fit the model: it has 4 obs"
    )
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_unasked(tt: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there.npz").write_text("mine")
    refused(tt("train", made / "rooms.npz", "--out", "there", *TINY), "there exists already")
    refused(tt("collect", "--out", "there.npz"), r"there\.npz exists already")
    refused(tt("evaluate", made / "run", "--out", "there.npz"), r"there\.npz exists already")
    refused(tt("demo", "--out", "there"), "there exists already")
    assert list((tmp_path / "there").iterdir()) == []
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_resume_refuses_other_settings(tt: Run, made: Path) -> None:
    refused(tt("train", "--resume", made / "run", "--train.steps", 9), "leave out train")


def test_ctrl_c_leaves_a_checkpoint_and_resume_ends_with_the_weights_of_an_uninterrupted_run(
    tt: Run, made: Path, tmp_path: Path
) -> None:
    steps = ["--train.steps", "60", "--model.dropout", "0.2"]
    words = [sys.executable, "-m", "trajectory_transformer", "train", str(made / "rooms.npz"), *TINY, *SHORT, *steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--out", "whole"], check=True, env=environment, capture_output=True)

    process = subprocess.Popen(
        [*words, "--out", "cut"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "cut/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists():
        assert time.monotonic() < deadline, "training never reported"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "go on with: tt train --resume cut" in output
    stopped_at = int(re.findall(r"stopped at step (\d+)", output)[0])
    assert 0 < stopped_at < 60

    resumed = subprocess.run(
        [*words[:4], "--resume", "cut"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"continuing cut at step {stopped_at} of 60" in resumed.stdout
    whole, cut = load_file(tmp_path / "whole/weights.safetensors"), load_file(tmp_path / "cut/weights.safetensors")
    assert whole.keys() == cut.keys()
    assert all(whole[name].equal(cut[name]) for name in whole)
    steps_reported = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps_reported == list(range(2, 61, 2))
