"""Runs to look at."""

from pathlib import Path

import pytest

from trajectory_transformer.cli import main

TINY = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
STEPS = ["--train.steps", "3", "--train.batch_size", "4"]


@pytest.fixture(scope="session")
def rooms_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on four rooms, with goals and without rewards."""
    folder = tmp_path_factory.mktemp("rooms")
    data, run = str(folder / "rooms.npz"), folder / "run"
    assert main(["collect", "--out", data, "--episodes", "8"]) == 0
    tokens = ["--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false", "--tokens.num_bins", "20"]
    assert main(["train", data, "--out", str(run), *tokens, *TINY, *STEPS]) == 0
    return run


@pytest.fixture(scope="session")
def pendulum_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on Pendulum-v1, with rewards."""
    folder = tmp_path_factory.mktemp("pendulum")
    data, run = str(folder / "pendulum.npz"), folder / "run"
    assert main(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]) == 0
    assert main(["train", data, "--out", str(run), "--tokens.num_bins", "10", *TINY, *STEPS]) == 0
    return run
