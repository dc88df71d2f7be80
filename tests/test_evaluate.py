"""Metrics of episodes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.data.scores import References
from trajectory_transformer.evaluate import episode_metrics, evaluate, rate_interval
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.results import counted, mean_and_error, with_error, write_result


def episode(total: float, outcome: dict[str, float]) -> Episode:
    rewards = np.array([total - 1.0, 1.0], dtype=np.float32)
    return Episode(
        np.zeros((3, 1), np.float32), np.zeros((2, 1), np.float32), rewards, terminated=True, outcome=outcome
    )


def test_success_is_averaged_over_all_episodes_and_path_ratio_over_successful_ones() -> None:
    metrics = episode_metrics(
        [
            episode(1.0, {"success": 1.0, "path_ratio": 1.0}),
            episode(2.0, {"success": 1.0, "path_ratio": 1.5}),
            episode(6.0, {"success": 0.0, "path_ratio": 9.0}),
        ]
    )
    assert metrics["success_rate"] == pytest.approx(2 / 3)
    assert metrics["success_rate_n"] == 3
    assert metrics["path_ratio"] == pytest.approx(1.25)
    assert metrics["path_ratio_n"] == 2
    assert metrics["return"] == pytest.approx(3.0)
    assert metrics["return_stderr"] == pytest.approx(np.std([1, 2, 6], ddof=1) / np.sqrt(3))
    assert metrics["steps"] == 2


def test_one_episode_has_no_error_and_no_interval() -> None:
    metrics = episode_metrics([episode(5.0, {})], References(0.0, 10.0))
    assert metrics == {"return": 5.0, "return_n": 1, "normalized_score": 50.0, "normalized_score_n": 1} | {
        "steps": 2,
        "steps_n": 1,
    }
    assert with_error(metrics, "return") == "5"
    assert (counted(1, "episode"), counted(2.0, "episode")) == ("1 episode", "2 episodes")
    assert (counted(1, "process", "processes"), counted(0, "process", "processes")) == ("1 process", "0 processes")
    two = episode_metrics([episode(5.0, {}), episode(8.0, {})])
    assert two["return_low"] == 5.0 and two["return_high"] == 8.0
    assert with_error(two, "return") == "6.5 ± 1.5"
    assert mean_and_error("x", [5.0, 8.0]) == {"x": 6.5, "x_stderr": pytest.approx(1.5)}
    assert mean_and_error("x", [5.0]) == {"x": 5.0}


def test_without_a_success_there_is_no_path_ratio() -> None:
    metrics = episode_metrics([episode(1.0, {"success": 0.0, "path_ratio": 1.0})])
    assert metrics["success_rate"] == 0.0
    assert "path_ratio" not in metrics


def test_states_that_a_simulator_reports_are_left_out() -> None:
    # As Hopper does: positions and parts of the last reward, but nothing about success.
    metrics = episode_metrics([episode(1.0, {"x_position": 3.0, "reward_survive": 1.0}) for _ in range(2)])
    assert {name.partition("_")[0] for name in metrics} == {"return", "steps"}


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Values of Wilson's formula, computed separately: never outside [0, 1], and never of width 0.
    [(475, 500, 0.92723, 0.96591), (10, 10, 0.72247, 1.0), (0, 10, 0.0, 0.27753), (1, 2, 0.09453, 0.90547)],
)
def test_success_rates_have_wilson_intervals(successes: int, count: int, low: float, high: float) -> None:
    values = [1.0] * successes + [0.0] * (count - successes)
    interval = rate_interval("x", values)
    assert interval == pytest.approx({"x_low": low, "x_high": high}, abs=2e-5)


def test_tt_commit_names_the_commit_of_a_copied_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TT_COMMIT", "abc123")
    write_result(
        tmp_path / "x.json", name="x", command="x", device=torch.device("cpu"), seeds=[0], seconds=1.0, metrics={}
    )
    assert json.loads((tmp_path / "x.json").read_text())["commit"] == "abc123"


def cart_pole(*dimensions: Dimension) -> TrajectoryModel:
    """An untrained model of random episodes with the sizes of CartPole-v1."""
    rng = np.random.default_rng(0)
    recorded = Episode(
        rng.normal(size=(21, 4)).astype(np.float32),
        rng.integers(2, size=(20, 1)).astype(np.float32),
        np.ones(20, np.float32),
        terminated=True,
    )
    sizes = ModelConfig(window=2, num_layers=1, num_heads=2, width=16)
    data = Dataset((recorded,), {}, (), dimensions)
    return TrajectoryModel.create(data, TokenConfig(num_bins=2, discretizer="uniform"), sizes, seed=0)


def test_categories_are_planned_with_a_nucleus_and_unknown_ones_not_with_a_middle() -> None:
    search = SearchConfig(beam_width=2, horizon=1)
    known, unknown = cart_pole(Dimension("push", 2)), cart_pole()
    assert evaluate(Planner(known, search=search), "CartPole-v1", episodes=1).metrics["return"] > 0
    message = (
        r"search\.action\.middle is for continuous actions, .* are categories, .*: use --search\.action\.nucleus 0\.4"
    )
    with pytest.raises(ValueError, match=message):
        evaluate(Planner(unknown, search=search), "CartPole-v1", episodes=1)
    nucleus = SearchConfig(beam_width=2, horizon=1, action=Sampler(nucleus=0.4))
    assert evaluate(Planner(unknown, search=nucleus), "CartPole-v1", episodes=1).metrics["return"] > 0
    # Imitation samples no actions.
    assert evaluate(Planner(unknown, kind="imitate", search=search), "CartPole-v1", episodes=1).metrics["return"] > 0
