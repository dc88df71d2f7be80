"""The commands as a user types them: what they write, and how they answer invalid input."""

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
SHORT = ["--train.batch_size", "8", "--checkpoint_every", "5"]

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset and a run of six steps on it."""
    folder = tmp_path_factory.mktemp("made")
    assert main(["collect", "--out", str(folder / "rooms.npz"), "--episodes", "6"]) == 0
    words = ["train", str(folder / "rooms.npz"), "--out", str(folder / "run"), *TINY, *SHORT, "--train.steps", "6"]
    assert main(words) == 0
    return folder


def refused(answer: tuple[int, str], pattern: str) -> None:
    """Exit code 2 and one sentence."""
    code, text = answer
    assert code == 2, text
    assert len(text.splitlines()) == 1, text
    assert re.search(pattern, text), text


def edited(path: Path, source: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A dataset file with its arrays changed."""
    with np.load(source) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)
    return path


def test_collect_writes_a_dataset_that_data_show_describes(tt: Run, tmp_path: Path) -> None:
    code, text = tt("collect", "--episodes", 4, "--out", "rooms.npz", "--seed", 3)
    assert code == 0, text
    code, text = tt("data", "show", "rooms.npz")
    assert code == 0
    assert "4 episodes" in text
    assert "env: tt/FourRooms-v0" in text
    assert "terminated: 100.0 %, truncated: 0.0 %" in text
    assert "observation 1" in text
    with np.load(tmp_path / "rooms.npz") as file:
        assert len(file["lengths"]) == 4


def test_a_run_holds_checkpoint_metrics_and_tensorboard(tt: Run, made: Path, tmp_path: Path) -> None:
    code, text = tt(
        "train", made / "rooms.npz", "--out", "run", *TINY, *SHORT, "--train.steps", 4, "--log", "tensorboard"
    )
    assert code == 0, text
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {
        "run.json",
        "checkpoint.json",
        "weights.safetensors",
        "resume.safetensors",
        "metrics.jsonl",
        "training.json",
        "report.html",
        "tensorboard",
    }
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0].keys() >= {"loss", "losses", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.parametrize(("rate", "diverges"), [(0.003, False), (3.0, True)])
def test_train_warns_when_the_loss_has_risen_since_its_minimum(
    tt: Run, made: Path, rate: float, diverges: bool
) -> None:
    words = ["--train.steps", 60, "--train.learning_rate", rate, "--train.warmup_steps", 50]
    code, text = tt("train", made / "rooms.npz", "--out", "run", *TINY, *SHORT, *words)
    assert code == 0, text
    warning = r"warning: the loss has risen from its minimum of \S+ at step \d+ to \S+; lower --train\.learning_rate"
    assert bool(re.search(warning, text)) == diverges, text


def test_a_config_file_sets_flags_and_flags_override_it(tt: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("train: {steps: 2, batch_size: 4}\nmodel: {num_layers: 1, width: 16}\n")
    code, text = tt("train", "--config", "small.yaml", made / "rooms.npz", "--out", "run", "--train.steps", 3)
    assert code == 0, text
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["train"]["steps"] == 3
    assert stored["train"]["batch_size"] == 4
    assert stored["model"]["width"] == 16


def test_a_preset_changes_defaults_and_flags_override_it(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["--preset", "paper", "--train.steps", 1, "--train.batch_size", 2, *TINY_MODEL]
    words += ["--train.warmup_steps", 7]
    code, text = tt("train", made / "rooms.npz", "--out", "run", *words)
    assert code == 0, text
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["train"]["learning_rate"] == 2.5e-4
    assert stored["train"]["optimizer"] == "adam"
    assert stored["train"]["warmup_steps"] == 7
    assert stored["tokens"]["value_includes_reward"] is True


def test_evaluate_writes_a_result_file_and_is_deterministic(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["evaluate", made / "run", "--episodes", 3, "--search.beam_width", 2, "--search.horizon", 2]
    for name in ("a.json", "b.json"):
        code, text = tt(*words, "--out", name)
        assert code == 0, text
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    untimed = [
        {key: value for key, value in result["metrics"].items() if "plan_ms" not in key} for result in (first, second)
    ]
    assert untimed[0] == untimed[1]
    assert {"plan_ms_p50", "plan_ms_p99", "return_low", "return_high"} <= first["metrics"].keys()
    assert first["metrics"].keys() >= {"success_rate", "success_rate_n", "success_rate_stderr", "return", "steps"}
    assert first.keys() >= {"name", "command", "commit", "device", "versions", "seeds", "seconds", "metrics"}
    assert first["seeds"] == [1_000_000, 1_000_001, 1_000_002]
    assert "--search.beam_width 2" in first["command"]


def test_evaluate_uses_the_environment_options_of_the_dataset(tt: Run, tmp_path: Path) -> None:
    options = '{"step_reward": -0.5}'
    words = ["--episodes", 2, "--env_options", options, "--out", "priced.npz", "--result", "data.json"]
    assert tt("collect", *words)[0] == 0
    assert f"--env_options '{options}'" in json.loads((tmp_path / "data.json").read_text())["command"]
    assert tt("train", "priced.npz", "--out", "run", *TINY, *SHORT, "--train.steps", 1)[0] == 0
    words = ["--episodes", 1, *SMALL_SEARCH, "--video", "video.gif"]
    code, text = tt("evaluate", "run", *words, "--out", "x.json")
    assert code == 0, text
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["settings"]["env_options"] == options
    success, steps = (result["metrics"][name] for name in ("success_rate", "steps"))
    assert result["metrics"]["return"] == pytest.approx(success - 0.5 * steps)
    # The options belong to the environment of the dataset, not to another one.
    code, text = tt("evaluate", "run", *words[:-2], "--env", "tt/FourRoomsRace-v0", "--out", "y.json")
    assert code == 0, text
    assert "env_options" not in json.loads((tmp_path / "y.json").read_text())["settings"]


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["data"], 2), (["data", "--help"], 0)])
def test_help_lists_the_commands_of_a_group(tt: Run, words: list[str], code: int) -> None:
    found, text = tt(*words)
    assert found == code
    assert "data convert  Convert a dataset" in text
    assert ("Train a model" in text) == ("data" not in words)


@pytest.mark.parametrize("command", ["train", "data show", "data convert"])
def test_help_names_every_kind_of_dataset(tt: Run, command: str) -> None:
    code, text = tt(*command.split(), "--help")
    assert code == 0
    described = " ".join(text.split())
    assert "A file (.npz, .hdf5, .parquet, .csv), the folder of a LeRobot dataset, a Minari id, or a bench" in described


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
        (["train"], "name the dataset to train on"),
        (["evaluate", "nowhere"], "nowhere: no such checkpoint folder"),
        (["evaluate", "x", "--search.horizon", "0"], r"search\.horizon must be at least 1, got 0"),
        (["collect", "--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["collect", "--env", "Nothing-v0"], "'Nothing-v0' cannot be made"),
        (["collect", "--env", "Pendulum-v1"], "supports only tt/FourRooms-v0"),
        (["train", "--resume", "nowhere"], r"nowhere/run\.json: the file is missing"),
        (["train", "x.npz", "--device", "abacus"], "the device must be auto, cpu or cuda, got 'abacus'"),
    ],
)
def test_invalid_input_gets_one_sentence_and_writes_nothing(
    tt: Run, tmp_path: Path, words: list[str], pattern: str
) -> None:
    refused(tt(*words), pattern)
    assert list(tmp_path.iterdir()) == []


def test_a_typo_in_a_config_file_gets_the_right_name(tt: Run, tmp_path: Path) -> None:
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
    refused(tt("evaluate", "run"), r"checkpoint format 99 is not supported, expected at most 2")


def test_an_environment_that_does_not_fit_is_refused(tt: Run, made: Path, tmp_path: Path) -> None:
    refused(
        tt("evaluate", made / "run", "--env", "Pendulum-v1", "--out", "x.json"),
        "does not fit the model: it has 3 observation",
    )
    refused(
        tt("evaluate", made / "run", "--env", "CartPole-v1", "--out", "x.json"), "does not fit the model: it has 4 obs"
    )
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tt: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there.npz").write_text("mine")
    refused(tt("train", made / "rooms.npz", "--out", "there", *TINY), "there exists already")
    refused(tt("collect", "--out", "there.npz"), r"there\.npz exists already")
    refused(tt("evaluate", made / "run", "--out", "there.npz"), r"there\.npz exists already")
    refused(tt("demo", "--out", "there"), "there exists already")
    assert list((tmp_path / "there").iterdir()) == []
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_resume_refuses_other_settings(tt: Run, made: Path) -> None:
    refused(tt("train", "--resume", made / "run", "--train.batch_size", 9), r"leave out --train\.batch_size")
    refused(tt("train", "--resume", made / "run", "--train.steps", 6), "has taken 6 steps: to extend it.*larger, got 6")
    refused(tt("train", "--resume", made / "run", "--preset", "paper"), "leave out --preset")
    refused(tt("train", "--resume", made / "run", "--out", "other"), "leave out --out")


def test_ctrl_c_saves_a_checkpoint_and_resume_reaches_the_weights_of_an_uninterrupted_run(
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
    assert "resume with: tt train --resume cut" in output
    stopped_at = int(re.findall(r"stopped at step (\d+)", output)[0])
    assert 0 < stopped_at < 60

    resumed = subprocess.run(
        [*words[:4], "--resume", "cut"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"resuming cut at step {stopped_at} of 60" in resumed.stdout
    whole, cut = load_file(tmp_path / "whole/weights.safetensors"), load_file(tmp_path / "cut/weights.safetensors")
    assert whole.keys() == cut.keys()
    assert all(whole[name].equal(cut[name]) for name in whole)
    steps_reported = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps_reported == list(range(1, 61))


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset with rewards and a run of three steps on it."""
    folder = tmp_path_factory.mktemp("pendulum")
    data = str(folder / "pendulum.npz")
    assert main(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]) == 0
    words = [*TINY_MODEL, "--tokens.num_bins", "8", *SHORT, "--train.steps", "3"]
    assert main(["train", data, "--out", str(folder / "run"), *words]) == 0
    return folder


SMALL_SEARCH = ["--search.beam_width", "2", "--search.horizon", "2"]


def test_traces_hold_every_plan_with_its_predictions(tt: Run, made: Path, tmp_path: Path) -> None:
    code, text = tt("evaluate", made / "run", "--episodes", 2, *SMALL_SEARCH, "--out", "x.json", "--trace", "plans.npz")
    assert code == 0, text
    with np.load(tmp_path / "plans.npz") as file:
        plans = dict(file)
    result = json.loads((tmp_path / "x.json").read_text())
    total = result["metrics"]["steps"] * 2
    assert plans["tokens"].shape == (total, 2, 6)  # two kept candidates of action, state, action
    assert plans["actions"].shape == (total, 2, 2, 2)
    assert plans["states"].shape == (total, 2, 1, 2)
    assert plans["state"].shape == (total, 2)
    assert (np.diff(plans["scores"], axis=1) <= 0).all()
    assert plans["step"].max() < 200


def test_a_video_is_recorded_without_a_display(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["--episodes", 1, *SMALL_SEARCH, "--out", "x.json"]
    code, text = tt("evaluate", made / "run", *words, "--video", "video.gif")
    assert code == 0, text
    assert (tmp_path / "video.gif").read_bytes()[:4] == b"GIF8"
    refused(
        tt("evaluate", made / "run", *words, "--video", "video.avi"),
        r"a video file must be \.gif or \.mp4, got video\.avi",
    )


def test_planning_for_return_needs_rewards_and_planning_for_a_goal_needs_a_goal(
    tt: Run, made: Path, pendulum: Path
) -> None:
    refused(tt("evaluate", made / "run", "--plan", "return"), "planning for return needs a model with rewards")
    refused(tt("evaluate", pendulum / "run", "--plan", "goal"), "planning for a goal needs a model with a goal")


def test_a_beam_too_large_for_memory_is_refused_with_its_size(tt: Run, pendulum: Path) -> None:
    words = ["--episodes", 1, "--search.beam_width", 10**9, "--out", "x.json"]
    refused(tt("evaluate", pendulum / "run", *words), r"2000000000 candidates needs [\d.]+ GiB .* GiB are free")


def test_the_search_window_may_not_exceed_the_training_window(tt: Run, pendulum: Path) -> None:
    refused(tt("evaluate", pendulum / "run", "--search.window", 4), r"search\.window must not exceed the 3 transitions")


@pytest.mark.parametrize("own_actions", [False, True])
def test_predictions_are_plotted_against_the_recording(
    tt: Run, pendulum: Path, tmp_path: Path, own_actions: bool
) -> None:
    words = ["--dataset", pendulum / "pendulum.npz", "--start", 3, "--horizon", 5, "--samples", 4, "--out", "a/b.png"]
    code, text = tt("predict", pendulum / "run", *words, "--actions", "false" if own_actions else "true")
    assert code == 0, text
    assert (tmp_path / "a/b.png").read_bytes()[1:4] == b"PNG"
    assert "after 1 step" in text


def test_attention_is_drawn_and_heads_are_scored(tt: Run, pendulum: Path, made: Path, tmp_path: Path) -> None:
    words = ("attention", pendulum / "run", "--dataset", pendulum / "pendulum.npz", "--episode", 1, "--start", 10)
    code, text = tt(*words, "--out", tmp_path / "all.png")
    assert code == 0 and "0-0" in text and "uniform" in text and "Striation" in text
    code, text = tt(*words, "--heads", "[0-0]", "--out", tmp_path / "one.png")
    assert code == 0, text
    sizes = [(tmp_path / name).read_bytes()[16:24] for name in ("all.png", "one.png")]  # of the PNG header
    assert sizes[0] != sizes[1]
    refused(tt(*words, "--out", tmp_path / "all.png"), "all.png exists already")
    refused(tt(*words, "--heads", "[7-7]", "--out", tmp_path / "x.png"), r"--heads must be among 0-0.*, got 7-7")
    refused(tt(*words[:-1], 200, "--out", tmp_path / "x.png"), r"--start must lie in \[0, 200\), got 200")
    refused(tt("attention", made / "run", *words[2:], "--out", tmp_path / "x.png"), "must have the model's")
    assert not (tmp_path / "x.png").exists()


def test_predictions_outside_the_recording_are_refused(tt: Run, made: Path, pendulum: Path) -> None:
    data = ["--dataset", pendulum / "pendulum.npz"]
    refused(tt("predict", pendulum / "run", *data, "--episode", 2), r"--episode must lie in \[0, 2\), got 2")
    refused(tt("predict", pendulum / "run", *data, "--start", 200), r"--start must lie in \[0, 200\), got 200")
    refused(tt("predict", pendulum / "run", *data, "--dims", "[3]"), r"--dims must lie in \[0, 3\), got \(3,\)")
    refused(
        tt("predict", made / "run", *data),
        r"must have the model's \(2, 2\) observation and action dimensions, got \(3, 1\)",
    )


def test_models_with_maps_need_maps_of_the_same_shape(
    tt: Callable[..., tuple[int, str]], refused: Callable[..., None]
) -> None:
    env = ["--env", "MiniGrid-MultiRoom-N2-S4-v0"]
    small = ["--env_options", '{"width": 9, "height": 9, "max_steps": 12}']
    assert tt("collect", *env, *small, "--policy", "expert", "--episodes", 6, "--out", "maps.npz")[0] == 0
    code, text = tt("data", "show", "maps.npz")
    assert code == 0
    assert "map of each episode: uint8 (2, 9, 9), 6 different" in text
    assert "9 categories" in text
    tokens = ["--tokens.num_bins", 9, "--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false"]
    sizes = ["--model.window", 2, "--model.num_layers", 1, "--model.width", 16, "--model.map_channels", 2]
    train = ["--train.steps", 2, "--train.batch_size", 4, "--train.augment", "grid", "--device", "cpu"]
    assert tt("train", "maps.npz", "--out", "run", *tokens, *sizes, *train)[0] == 0
    assert tt("train", "maps.npz", "--shards", "tokens", "--out", "mapped", *tokens, *sizes, *train)[0] == 0
    search = ["--search.beam_width", 2, "--search.horizon", 1, "--device", "cpu"]
    code, text = tt("evaluate", "run", "--episodes", 2, *search)  # the map's size is the dataset's
    assert code == 0, text
    result = json.loads(Path("run/evaluation.json").read_text())
    assert "--env_options" in result["command"]
    message = r"search\.imitate median is for continuous actions, the actions of .* are categories: use mode"
    refused(message, "evaluate", "run", "--search.imitate", "median", "--out", "m.json")
    assert result["settings"]["search"]["action"] == {"temperature": 1.0, "top_k": None, "nucleus": 0.4, "middle": None}
    assert result["training"]["command"].startswith("tt train maps.npz --out run --preset default --tokens.num_bins 9")
    refused(
        r"does not fit the model: it has a map of shape \(2, 25, 25\)",
        "evaluate",
        "run",
        "--env",
        "MiniGrid-MultiRoom-N4-S5-v0",
        "--out",
        "other.json",
        *search,
    )
    refused("policy expert: supports only MiniGrid env", "collect", "--env", "CartPole-v1", "--policy", "expert")
    refused("only .npz files can store the maps", "data", "convert", "maps.npz", "--out", "maps.hdf5")
    half = ["--tokens.goal_dims", "[0]"]
    refused("train.augment grid needs a goal of x and y", "train", "maps.npz", "--out", "bad", *half, *train)
