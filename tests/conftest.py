"""Fixtures that several test files share."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of policy files, which are too large for the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "policies"
    parser.addoption("--policies", type=Path, default=default, help="folder of policy files to collect data with")
    ants = default.with_name("antgoal")
    parser.addoption(
        "--ant_policies", type=Path, default=ants, help="folder of the walker to collect AntMaze data with"
    )


def pytest_configure() -> None:
    """Let Ctrl-C interrupt: a shell ignores it in what a script starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests on machines without a GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none")


@pytest.fixture(scope="session")
def policies(pytestconfig: pytest.Config) -> Path:
    """The folder of policy files; tests that need it are skipped if it does not exist."""
    folder = pytestconfig.getoption("--policies")
    assert isinstance(folder, Path)
    if not folder.is_dir():
        pytest.skip(f"needs policy files, and there is no folder {folder}: set it with --policies")
    return folder


@pytest.fixture(scope="session")
def ant_policies(pytestconfig: pytest.Config) -> Path:
    """The folder of `antgoal.safetensors`; tests that need it are skipped if it does not exist."""
    folder = pytestconfig.getoption("--ant_policies")
    assert isinstance(folder, Path)
    if not (folder / "antgoal.safetensors").is_file():
        pytest.skip(f"needs antgoal.safetensors, and it is not in {folder}: set its folder with --ant_policies")
    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    """A new generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def tiny_dataset(rng: np.random.Generator) -> Dataset:
    """Six short random episodes of 3 observation and 2 action dimensions, with rewards; every other one terminated."""
    episodes = [
        Episode(
            observations=rng.normal(size=(steps + 1, 3)).astype(np.float32),
            actions=rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32),
            rewards=rng.normal(size=steps).astype(np.float32),
            terminated=index % 2 == 0,
        )
        for index, steps in enumerate((3, 7, 1, 5, 9, 4))
    ]
    return Dataset(tuple(episodes), {"env_id": "tiny", "seed": 0})


@pytest.fixture
def tiny_model(tiny_dataset: Dataset) -> TrajectoryModel:
    """An untrained model of the tiny dataset: 10 bins, 3 transitions, 2 layers, width 32."""
    return TrajectoryModel.create(
        tiny_dataset, TokenConfig(num_bins=10), ModelConfig(window=3, num_layers=2, width=32, dropout=0.1), seed=0
    )
