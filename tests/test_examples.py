"""What the README and the examples show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trajectory_transformer.cli import main

ROOT = Path(__file__).parent.parent
TINY = ["--model.window", "3", "--model.num_layers", "1", "--model.width", "16", "--train.steps", "3"]


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `runs/demo` is a run on four rooms, hardly trained."""
    folder = tmp_path_factory.mktemp("rooms")
    assert main(["collect", "--out", str(folder / "rooms.npz"), "--episodes", "5"]) == 0
    words = ["--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false", "--train.batch_size", "4"]
    assert main(["train", str(folder / "rooms.npz"), "--out", str(folder / "runs/demo"), *words, *TINY]) == 0
    return folder


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_the_readme_runs(rooms: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        assert "success" in run(rooms, "-c", block)


def test_control_without_gymnasium_runs(rooms: Path) -> None:
    assert "there" in run(rooms, str(ROOT / "examples/own_loop.py"), "runs/demo")


def test_a_custom_objective_runs(tmp_path: Path) -> None:
    data = str(tmp_path / "pendulum.npz")
    assert main(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]) == 0
    words = ["--tokens.num_bins", "10", "--train.batch_size", "4", *TINY]
    assert main(["train", data, "--out", str(tmp_path / "run"), *words]) == 0
    lines = run(tmp_path, str(ROOT / "examples/custom_objective.py"), "run", "12").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["return alone", "gentle"]
