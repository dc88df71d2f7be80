"""Sentences about data, models and machines that do not suit each other: from the command line and from Python."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trajectory_transformer import Dataset, Dimension, Episode, Planner, SearchConfig, TrajectoryModel, save_dataset
from trajectory_transformer.checkpoint import save_checkpoint
from trajectory_transformer.cli import main
from trajectory_transformer.runs import memory

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]

TINY = [
    "--preset",
    "default",
    "--model.window",
    "3",
    "--model.num_layers",
    "1",
    "--model.num_heads",
    "2",
    "--model.width",
    "16",
]
TINY += ["--tokens.num_bins", "8", "--train.batch_size", "4", "--train.steps", "2"]
SEARCH = ["--search.beam_width", "2", "--search.horizon", "1"]


def dataset(observations: int = 2, steps: int = 200, *, goal: bool = False) -> Dataset:
    rng = np.random.default_rng(0)
    episode = Episode(
        rng.normal(size=(steps + 1, observations)).astype(np.float32),
        rng.uniform(-1, 1, (steps, 1)).astype(np.float32),
        np.ones(steps, np.float32),
        terminated=False,
        goal=np.ones(2, np.float32) if goal else None,
    )
    return Dataset((episode,))


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on random episodes of CartPole-v1."""
    folder = tmp_path_factory.mktemp("pole")
    words = ["--env", "CartPole-v1", "--policy", "random", "--episodes", "4", "--workers", "1"]
    assert main(["collect", *words, "--out", str(folder / "pole.npz")]) == 0
    assert main(["train", str(folder / "pole.npz"), "--out", str(folder / "run"), *TINY]) == 0
    return folder / "run"


def test_unused_goals_are_reported(tt: Run, caplog: pytest.LogCaptureFixture) -> None:
    save_dataset(dataset(goal=True), "goals.npz")
    sentence = "the episodes have goals, but tokens.goal_dims is empty"
    code, text = tt("data", "show", "goals.npz")
    assert code == 0 and f"note: {sentence}" in text
    assert tt("train", "goals.npz", "--out", "run", *TINY)[0] == 0
    assert sentence in caplog.text
    caplog.clear()
    assert tt("train", "goals.npz", "--out", "goal", *TINY, "--tokens.goal_dims", "[0,1]")[0] == 0
    assert tt("data", "show", "goals.npz", "--tokens.goal_dims", "[0,1]")[1].count(sentence) == 0
    assert sentence not in caplog.text
    with pytest.raises(ValueError, match=r"this model has no goal: it was trained without tokens\.goal_dims"):
        Planner("run").act([0.0, 0.0], goal=[1.0, 1.0])


def test_an_environment_with_goals_that_the_model_ignores_is_reported(
    tt: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert tt("collect", "--episodes", 2, "--out", "rooms.npz")[0] == 0
    assert tt("train", "rooms.npz", "--out", "run", *TINY)[0] == 0
    caplog.clear()
    assert tt("evaluate", "run", "--episodes", 1, "--env_options", '{"goal": [0.9, 0.9]}', *SEARCH)[0] == 0
    assert "the environment has goals, but the model was trained without tokens.goal_dims" in caplog.text


def test_huge_values_and_dimensions_of_one_bin_are_reported(tt: Run, caplog: pytest.LogCaptureFixture) -> None:
    data = dataset()
    data.episodes[0].observations[7, 1] = 1e30
    save_dataset(data, "huge.npz")
    code, text = tt("data", "show", "huge.npz", "--tokens.discretizer", "uniform")
    assert code == 0
    assert "note: observation 1 has the value 1e+30, more than a million times further from the median" in text
    assert "note: observation 1: 200 of 201 values fall into one bin" in text
    assert "observation 0 has" not in text and "observation 0:" not in text
    code, text = tt("train", "huge.npz", "--out", "run", "--tokens.discretizer", "uniform", *TINY)
    assert code == 0 and "observation 1 has the value 1e+30" in caplog.text


def test_one_bin_is_refused(refused: Refused) -> None:
    refused(r"tokens\.num_bins must be at least 2: one bin tells nothing, got 1", "train", "x", "--tokens.num_bins", 1)


def description_of(run: Path) -> dict[str, object]:
    description: dict[str, object] = json.loads((run / "checkpoint.json").read_text())
    return {name: value for name, value in description.items() if name not in ("format", "kind", "weights_sha256")}


def test_weights_that_are_not_finite_are_refused(refused: Refused, pole: Path, tmp_path: Path) -> None:
    shutil.copytree(pole, tmp_path / "run")
    weights = load_file(tmp_path / "run/weights.safetensors")
    weights["gpt.heads"][0, 0, 0] = torch.nan
    save_checkpoint(tmp_path / "run", weights, description_of(tmp_path / "run"))
    refused(r"run: the weights are not finite \(heads has NaN", "evaluate", "run", *SEARCH)
    with pytest.raises(ValueError, match="the weights are not finite"):
        Planner("run")


def test_states_far_outside_the_training_range_are_counted(
    tt: Run, pole: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = TrajectoryModel.load(pole)
    planner = Planner(model, search=SearchConfig(beam_width=2, horizon=1))
    policy = planner.policy()
    planner._one = policy
    planner.act([0.0, 0.0, 0.0, 0.0], reward=1.0)
    assert (policy.num_states, policy.num_outside) == (1, 0) and not caplog.text
    planner.act([0.0, 1e30, 0.0, 0.0], reward=1.0)
    planner.act([0.0, 1e30, 0.0, 0.0], reward=1.0)
    assert (policy.num_states, policy.num_outside) == (3, 2)
    assert caplog.text.count("a state is far outside the training range, so its plan means little") == 1
    assert "observation 1 is 1e+30, in training it was" in caplog.text

    code, text = tt("evaluate", pole, "--episodes", 2, *SEARCH, "--out", "in.json")
    assert code == 0, text
    assert json.loads(Path("in.json").read_text())["metrics"]["outside_training_range"] == 0
    (tmp_path / "far_away.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Shift(gymnasium.ObservationWrapper):\n"
        "    def observation(self, observation):\n"
        "        return observation + np.float32(100)\n"
        "gymnasium.register('FarAway-v0', lambda **options: Shift(gymnasium.make('CartPole-v1', **options)),"
        " disable_env_checker=True)\n"
    )
    code, text = tt("evaluate", pole, "--env", "far_away:FarAway-v0", "--episodes", 2, *SEARCH, "--out", "out.json")
    assert code == 0, text
    assert "outside_training_range" in text
    assert json.loads(Path("out.json").read_text())["metrics"]["outside_training_range"] == 1


def test_a_planner_says_what_it_plans_for_and_when_it_lacks_rewards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_dataset(dataset(), "x.npz")
    assert main(["train", "x.npz", "--out", "run", *TINY]) == 0
    with caplog.at_level(logging.INFO, logger="trajectory_transformer.planner"):
        planner = Planner("run")
    assert "planning for return with SearchConfig(beam_width=32, horizon=5" in caplog.text
    planner.act([0.0, 0.0])
    assert "without the reward" not in caplog.text
    for _ in range(2):
        planner.act([0.0, 0.0])
    assert caplog.text.count("act was called without the reward of the last action, which then counts as 0") == 1


def test_discrete_actions_are_what_the_environment_takes(pole: Path) -> None:
    planner = Planner(pole, search=SearchConfig(beam_width=2, horizon=1))
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        action = planner.act(observation, reward=1.0)
        assert env.action_space.contains(action) and isinstance(action, np.int64)
        observation, *_ = env.step(action)


def test_categories_of_a_table_come_back_by_name(tt: Run, tmp_path: Path) -> None:
    rows = [f"{i % 5},{'eco' if i % 3 else 'sport'},{'left' if i % 2 else 'right'}" for i in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(["speed,mode,turn", *rows]) + "\n")
    columns = ["--columns.observations", "[speed,mode]", "--columns.actions", "[turn]", "--columns.categories"]
    columns += ["{mode: [eco, sport], turn: [left, right]}", "--tokens.rewards", "false"]
    for extra in ([], ["--shards", "tokens"]):
        code, text = tt("train", "log.csv", *columns, *TINY, "--out", "run", *extra, "--overwrite", "true")
        assert code == 0, text
        model = TrajectoryModel.load("run")
        assert model.tokenizer.action_dimensions == (Dimension("turn", 2, ("left", "right")),)
        assert Planner(model).act([3.0, "eco"]) in ("left", "right")
        with pytest.raises(ValueError, match="mode must be one of eco, sport, got 'race'"):
            Planner(model).act([3.0, "race"])


def test_image_observations_are_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "camera.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Camera(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "gymnasium.register('Camera-v0', Camera)\n"
    )
    words = ["collect", "--env", "camera:Camera-v0", "--policy", "random", "--out", "x.npz"]
    refused(r"observations of shape \(32, 32, 3\) are images, which are not supported: .* 3,072 for each step", *words)


def test_a_window_longer_than_any_episode_is_refused(refused: Refused, tt: Run, tmp_path: Path) -> None:
    save_dataset(dataset(steps=4), "short.npz")
    words = ["train", "short.npz", "--out", "run", *TINY[4:], "--model.window"]
    rule = r"model\.window must be at most 5, the states of the longest episode: set --model\.window 5, got 6"
    refused(rule, *words, 6)
    assert not (tmp_path / "run").exists()
    assert tt(*words, 5)[0] == 0


def test_a_run_that_does_not_fit_into_memory_is_refused(
    refused: Refused, tt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dataset(dataset(observations=3000, steps=20), "wide.npz")
    refused(
        r"training needs about \d+\.\d GiB of memory and \S+ GiB are available: a batch has 256 windows of 10 "
        r"transitions, 30,030 tokens each; lower --train\.batch_size, --model\.window or the number of dimensions",
        *("train", "wide.npz", "--out", "run", "--preset", "default"),
    )
    assert not (tmp_path / "run").exists()
    save_dataset(dataset(), "x.npz")
    code, text = tt("train", "x.npz", "--out", "run", *TINY)
    assert code == 0 and "this needs about 0.0" in text
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    refused(r"training needs about 0\.0 GiB", "train", "x.npz", "--out", "other", *TINY)


def test_too_little_memory_on_a_gpu_is_one_sentence(tt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: object, batch: object, rate: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    save_dataset(dataset(), "x.npz")
    monkeypatch.setattr("trajectory_transformer.training.engine.EagerEngine.step", fail)
    code, text = tt("train", "x.npz", "--out", "run", *TINY)
    assert code == 2
    assert "error: the GPU has too little memory (CUDA out of memory. Tried" in text and "--train.batch_size" in text


def test_the_time_of_a_long_run_is_estimated_after_a_warm_up(tt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dataset(dataset(), "x.npz")
    code, text = tt("train", "x.npz", "--out", "a", *TINY)
    assert code == 0 and "more steps at" not in text
    for name, seconds in (("WARM_UP_SECONDS", 0.0), ("LONG_SECONDS", 0.0)):
        monkeypatch.setattr(f"trajectory_transformer.cli.train.{name}", seconds)
    code, text = tt("train", "x.npz", "--out", "b", *TINY[:-1], "30")
    assert code == 0, text
    assert text.count("about 0 min for 28 more steps at 0.0") == 1, text
