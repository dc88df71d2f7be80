"""`tt evaluate --q` as a user types it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer import Baseline, Planner, SearchConfig, TrajectoryModel, evaluate, q_guided
from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import load_npz

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]
SMALL = ["--settings", "{hidden: [16, 16], batch_size: 16}", "--steps", "12", "--device", "cpu"]
SEARCH = ["--search.beam_width", 4, "--search.horizon", 2, "--search.context", 1, "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random episodes of two environments, a model of the first, and baselines with and without a Q function."""
    folder = tmp_path_factory.mktemp("guided")
    for name, env, *more in (
        ("data", "Pendulum-v1"),
        ("later", "Pendulum-v1", "--seed", "1"),
        ("moon", "Pendulum-v1", "--env_options", '{"g": 1.6}'),
        ("car", "MountainCarContinuous-v0"),
    ):
        words = ["collect", "--env", env, "--policy", "random", "--steps", "120", *more]
        assert main([*words, "--out", str(folder / f"{name}.npz")]) == 0
    sizes = ["--model.window", "3", "--model.num_layers", "1", "--model.width", "16", "--tokens.num_bins", "8"]
    words = ["train", str(folder / "data.npz"), "--out", str(folder / "run"), "--train.steps", "3", "--device", "cpu"]
    assert main([*words, *sizes]) == 0
    for name, algorithm, data in (
        ("iql", "iql-antmaze", "data"),
        ("bc", "bc", "data"),
        ("car", "iql", "car"),
        ("later", "iql", "later"),
        ("moon", "iql", "moon"),
    ):
        words = ["baseline", str(folder / f"{data}.npz"), "--algorithm", algorithm, "--out", str(folder / name)]
        assert main([*words, "--seeds", "[3,5]", *SMALL]) == 0
    return folder


def test_evaluate_plans_by_the_q_function_of_a_baseline(tt: Run, made: Path, tmp_path: Path) -> None:
    words = ["evaluate", made / "run", "--plan", "return", "--q", made / "iql", "--training_seed", 5, "--episodes", 2]
    code, text = tt(*words, *SEARCH, "--out", "guided.json")
    assert code == 0, text
    assert "planning for return by" in text
    result = json.loads((tmp_path / "guided.json").read_text())
    assert f"--q {made / 'iql'}" in result["command"] and result["settings"]["q"] == str(made / "iql")
    assert result["settings"]["q_training"]["metrics"]["steps"] == 12
    # The same in Python: rewards were shifted by -1 in the training of Q, with a discount of 0.99.
    model, baseline = TrajectoryModel.load(made / "run"), Baseline.load(made / "iql")
    search = SearchConfig(beam_width=4, horizon=2, context=1)
    planner = Planner(
        model, objective=q_guided(baseline.q_function(5), 0.99, reward_shift=-1.0), search=search, seed=1_000_000
    )
    found = evaluate(planner, episodes=2)
    for played, expected in zip(load_npz(tmp_path / "guided.npz"), found.episodes, strict=True):
        np.testing.assert_array_equal(played.actions, expected.actions)
    # Another seed and no Q at all give other plans.
    for name, more in (("other", ["--q", made / "iql", "--training_seed", 3]), ("plain", [])):
        assert tt("evaluate", made / "run", "--episodes", 2, *more, *SEARCH, "--out", f"{name}.json")[0] == 0
        assert any(
            (a.actions != b.actions).any()
            for a, b in zip(load_npz(tmp_path / f"{name}.npz"), found.episodes, strict=True)
        )


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--q", "bc"], r"bc: BC has no Q function; train iql, cql or td3bc"),
        (["--q", "car"], "has 2 observation and 1 action dimensions, the model 3 and 1"),
        (
            ["--q", "moon"],
            r"for another environment than the model: env_options is '{\"g\": 1.6}' for Q and None for the model",
        ),
        (["--q", "run"], "not a run of tt baseline; train one with: tt baseline DATA --algorithm iql"),
        (["--q", "iql", "--plan", "imitate"], "--q is for planning for return, not for imitate"),
        (["--q", "iql", "--training_seed", "4"], r"trained with the seeds \[3, 5\], not with 4"),
        (["--q", "iql", "--discount", "2.0"], r"the discount must lie in \[0, 1\], got 2"),
    ],
)
def test_a_q_function_that_does_not_fit_is_refused(refused: Refused, made: Path, words: list[str], rule: str) -> None:
    full = [str(made / word) if before == "--q" else word for before, word in zip(["", *words], words, strict=False)]
    refused(rule, "evaluate", made / "run", *full, "--episodes", 1, *SEARCH)


def test_a_q_function_of_other_data_from_the_same_environment_fits(tt: Run, made: Path) -> None:
    code, text = tt("evaluate", made / "run", "--q", made / "later", "--training_seed", 3, "--episodes", 1, *SEARCH)
    assert code == 0, text


def test_a_baseline_does_not_plan_by_another(refused: Refused, made: Path) -> None:
    refused("is a baseline, which does not plan: leave out --q", "evaluate", made / "iql", "--q", made / "iql")
