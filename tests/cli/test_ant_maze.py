"""AntMaze by commands, from a recipe to a score."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gymnasium_robotics", reason="needs pip install 'trajectory-transformer[mazes]'")

from tests.envs.walker import write_walker
from trajectory_transformer.data.episode import load_npz
from trajectory_transformer.evaluate import environment_of


def test_recipe_to_score_by_commands(tt: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    walker = write_walker(tmp_path / "walker.safetensors")
    recipe = {
        "env": "AntMaze_UMaze-v5",
        "env_options": {"max_episode_steps": 8},
        "collect_options": {"cells": "random"},
        "parts": [{"policy": "walker noise=0.3", "steps": 60}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe))
    assert tt("collect", "--recipe", "tiny.yaml", "--policies", walker.parent, "--out", "ant.npz")[0] == 0
    dataset = load_npz(tmp_path / "ant.npz")
    assert (dataset.num_steps, dataset.observation_dim, dataset.action_dim) == (60, 29, 8)
    assert json.loads(str(dataset.metadata["collect_options"])) == {"cells": "random"}
    assert "version.gymnasium-robotics" in dataset.metadata
    # An evaluation starts where the task starts, not where the data did.
    assert environment_of(dataset.metadata, None, None) == ("AntMaze_UMaze-v5", {"max_episode_steps": 8})
    sizes = ["--model.window", 2, "--model.num_layers", 1, "--model.width", 16, "--tokens.num_bins", 8]
    code, text = tt("train", "ant.npz", "--out", "run", *sizes, "--train.steps", 3, "--device", "cpu")
    assert code == 0, text
    search = ["--search.beam_width", 2, "--search.horizon", 2, "--search.context", 1]
    code, text = tt("evaluate", "run", "--episodes", 2, *search, "--device", "cpu", "--out", "score.json")
    assert code == 0, text
    metrics = json.loads((tmp_path / "score.json").read_text())["metrics"]
    assert metrics["success_rate"] == 0.0 and metrics["steps"] == 8
