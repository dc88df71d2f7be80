"""OGBench files, written here as their specification says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dimension
from trajectory_transformer.data.sources import load_dataset


def write(path: Path, **changed: Any) -> Path:
    """Two trajectories of four transitions: five rows each, of which the last one holds the final state."""
    arrays: dict[str, Any] = {
        "observations": np.arange(20.0, dtype=np.float32).reshape(10, 2),
        "actions": np.arange(10.0, dtype=np.float32)[:, None] / 10,
        "terminals": np.array([0, 0, 0, 0, 1] * 2, dtype=np.bool_),
        "qpos": np.zeros((10, 15), np.float32),
        "qvel": np.zeros((10, 14), np.float32),
    }
    np.savez_compressed(path, **{name: values for name, values in (arrays | changed).items() if values is not None})
    return path


def test_the_last_row_of_a_trajectory_is_its_final_state(tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "antmaze-medium-navigate-v0.npz"))
    first, second = dataset.episodes
    np.testing.assert_array_equal(first.observations[:, 0], [0, 2, 4, 6, 8])
    np.testing.assert_allclose(second.actions[:, 0], [0.5, 0.6, 0.7, 0.8])
    assert not first.terminated and not second.terminated and first.rewards is None
    assert dataset.metadata == {"format": "OGBench", "episodes_found_by": "the array terminals"}


def test_discrete_actions_are_categories(tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "x.npz", actions=np.array([0, 1, 2, 3, 0] * 2, np.int32)))
    assert dataset.action_dimensions == (Dimension("action 0", 4),)


def test_the_command_line_shows_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "x.npz"))
    assert main(["data", "show", path]) == 0
    text = capsys.readouterr().out
    assert "2 episodes, 8 steps" in text and "format: OGBench" in text and "train with --tokens.rewards false" in text
    sizes = ["--model.window", "3", "--model.num_layers", "1", "--model.width", "16", "--train.steps", "1"]
    assert main(["train", path, "--tokens.rewards", "false", "--out", str(tmp_path / "run"), *sizes]) == 0


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"observations": np.zeros((10, 64, 64, 3), np.uint8)}, r"shape \(10, 64, 64, 3\); images are not supported"),
        ({"terminals": np.zeros(9, np.bool_)}, r"terminals must have as many rows as observations, 10, got \(9,\)"),
        ({"actions": np.full((10, 1), np.nan)}, r"row 1: actions must be a finite number"),
    ],
)
def test_invalid_files_are_refused(
    tmp_path: Path, changed: dict[str, Any], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=rule):
        load_dataset(write(tmp_path / "x.npz", **changed))
    assert main(["train", str(tmp_path / "x.npz")]) == 2
    assert "Traceback" not in capsys.readouterr().err
