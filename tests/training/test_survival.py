"""A run that is killed at any moment resumes from its last checkpoint and reaches the same weights."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dataset, save_npz

SETTINGS = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
SETTINGS += ["--model.dropout", "0.2", "--tokens.num_bins", "8", "--train.batch_size", "4", "--device", "cpu"]
SETTINGS += ["--train.steps", "220", "--checkpoint_every", "5"]

DIFFERENT = r"run was started on a different dataset \(expected sha256:\w{64}, got sha256:\w{64}\)"

# Imports everything once and forks: the kills hit the run and not the imports. A moment is a number of saves and
# then a number of seconds after the start. Steps are slowed down, or a fast machine would finish before the last kill.
KILLER = """
import json, os, signal, sys, time
from pathlib import Path
import torch._dynamo  # torch does when it makes an optimizer
from trajectory_transformer.cli import main
from trajectory_transformer.report import dataset, page
from trajectory_transformer.training.engine import EagerEngine

words, run, moments = json.loads(sys.argv[1])
state = Path(run) / "resume.safetensors"
outcomes = []

def written():
    return state.stat().st_mtime_ns if state.exists() else None

for moment in [*moments, None]:
    command = ["train", "--resume", run] if Path(run).exists() else ["train", *words, "--out", run]
    child = os.fork()
    if child == 0:
        if moment is not None:
            step = EagerEngine.step
            EagerEngine.step = lambda self, batch, rate: (time.sleep(0.005), step(self, batch, rate))[1]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(command))
    if moment is not None:
        saves, seconds = moment
        for _ in range(saves):
            before, deadline = written(), time.monotonic() + 60
            while written() == before and time.monotonic() < deadline:
                time.sleep(0.0005)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    outcomes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(outcomes))
"""


@pytest.fixture
def words(tiny_dataset: Dataset, tmp_path: Path) -> list[str]:
    """A dataset file and the settings of a run on it."""
    save_npz(tiny_dataset, tmp_path / "data.npz")
    return [str(tmp_path / "data.npz"), *SETTINGS]


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs hold the same bits."""
    first, second = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def steps_of(run: Path) -> list[int]:
    """Steps that a run reported."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_killed_twenty_times_reaches_the_weights_of_an_uninterrupted_run(
    words: list[str], tmp_path: Path, rng: np.random.Generator
) -> None:
    seconds = rng.uniform(0.0, 0.025, size=20)
    moments = [(index % 3, float(wait)) for index, wait in enumerate(seconds)]  # the first one before the folder exists
    arguments = json.dumps([words, str(tmp_path / "killed"), moments])
    done = subprocess.run([sys.executable, "-c", KILLER, arguments], capture_output=True, text=True, check=True)
    *killed, last = json.loads(done.stdout.splitlines()[-1])
    assert (killed, last) == ([-9] * 20, 0), done.stderr

    alone = json.dumps([words, str(tmp_path / "whole"), []])
    subprocess.run([sys.executable, "-c", KILLER, alone], capture_output=True, check=True)
    assert same_weights(tmp_path / "killed", tmp_path / "whole")
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole") == [*range(2, 221, 2)]


@pytest.fixture
def run(words: list[str], tmp_path: Path) -> Path:
    """A run of six steps."""
    assert main(["train", *words, "--train.steps", "6", "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_temporary_files_of_a_killed_run_do_no_harm(words: list[str], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "hurt")
    for name in ("run.json", "resume.safetensors", "weights.safetensors", "checkpoint.json", "metrics.jsonl"):
        (tmp_path / "hurt" / f"{name}.0.tmp").write_bytes(b"half")
    with (tmp_path / "hurt/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "losses": {"action": 1.0}')  # cut off, though it ends like a whole line
    (tmp_path / "new.0.tmp").mkdir()
    (tmp_path / "new.0.tmp/run.json").write_text("half")

    assert main(["train", "--resume", str(tmp_path / "hurt")]) == 0
    assert same_weights(run, tmp_path / "hurt") and steps_of(tmp_path / "hurt") == [1, 2, 3, 4, 5, 6]
    assert main(["train", *words, "--train.steps", "6", "--out", str(tmp_path / "new")]) == 0
    assert same_weights(run, tmp_path / "new")


def test_a_kill_between_the_two_files_of_a_save_is_repaired(run: Path, tmp_path: Path) -> None:
    weights = load_file(run / "weights.safetensors")
    shutil.copytree(run, tmp_path / "hurt")
    save_file({name: value * 0 for name, value in weights.items()}, tmp_path / "hurt/weights.safetensors")
    assert main(["train", "--resume", str(tmp_path / "hurt")]) == 0
    assert same_weights(run, tmp_path / "hurt")


def test_a_changed_dataset_is_refused(
    run: Path, tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_npz(Dataset(tiny_dataset.episodes[:-1]), tmp_path / "data.npz")
    assert main(["train", "--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert (
        re.search(DIFFERENT, error)
        and "has " + str(tmp_path / "data.npz") + " changed?" in error
        and len(error.splitlines()) == 1
    )


def test_a_run_resumes_with_its_data_in_another_place(
    run: Path, tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "data.npz").rename(tmp_path / "elsewhere/data.npz")
    assert main(["train", str(moved), "--resume", str(run)]) == 0
    save_npz(Dataset(tiny_dataset.episodes[:-1]), moved)
    assert main(["train", str(moved), "--resume", str(run)]) == 2
    assert re.search(DIFFERENT, capsys.readouterr().err)
