"""Numbers from episodes."""

import numpy as np
import pytest

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.evaluate import episode_metrics


def episode(total: float, outcome: dict[str, float]) -> Episode:
    rewards = np.array([total - 1.0, 1.0], dtype=np.float32)
    return Episode(
        np.zeros((3, 1), np.float32), np.zeros((2, 1), np.float32), rewards, terminated=True, outcome=outcome
    )


def test_success_is_counted_over_all_and_paths_over_successes() -> None:
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


def test_without_any_success_there_is_no_path_ratio() -> None:
    metrics = episode_metrics([episode(1.0, {"success": 0.0, "path_ratio": 1.0})])
    assert metrics["success_rate"] == 0.0
    assert "path_ratio" not in metrics


def test_the_state_a_simulator_reports_is_no_outcome() -> None:
    # As a hopper does: positions and parts of the last reward, but nothing about success.
    metrics = episode_metrics([episode(1.0, {"x_position": 3.0, "reward_survive": 1.0}) for _ in range(2)])
    assert {name.partition("_")[0] for name in metrics} == {"return", "steps"}
