"""Several processes train like one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trajectory_transformer.cli import main
from trajectory_transformer.config import TrainConfig
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import batch_indices, tokenize
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

SETTINGS = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
SETTINGS += ["--model.dropout", "0", "--tokens.num_bins", "8", "--train.batch_size", "12", "--device", "cpu"]
SETTINGS += ["--train.steps", "40"]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def in_two_processes(*words: str) -> str:
    """Run a command in two processes of one thread each; returns what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*TORCHRUN, *words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics_of(run: Path) -> list[dict[str, float]]:
    """All metrics of a run except its speed."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{"loss": record["loss"], "norm": record["gradient_norm"], **record["losses"]} for record in records]


def test_two_processes_give_the_metrics_and_weights_of_one(tiny_dataset: Dataset, tmp_path: Path) -> None:
    save_npz(tiny_dataset, tmp_path / "data.npz")
    words = ["train", str(tmp_path / "data.npz"), *SETTINGS]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    printed = in_two_processes("-m", "trajectory_transformer", *words, "--out", str(tmp_path / "two"))

    assert "(2 processes, cpu)" in printed
    assert printed.count("wrote ") == 1  # only the first process prints
    one, both = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert len(one) == len(both) == 40
    for alone, together in zip(one, both, strict=True):
        assert together == pytest.approx(alone, rel=1e-5)
    weights, others = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads listed in /proc")
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """A thread that still runs while Python exits can abort a process that has done its work."""
    script = tmp_path / "steps.py"
    script.write_text(
        """
import sys
from pathlib import Path
import torch
from trajectory_transformer.gpu.backends import joined_world

def threads():
    return sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())

with joined_world(torch.device("cpu")) as (world, _):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = world.add_up(torch.ones(3))
    optimizer.step()
    during = threads()
line = f"{sum('gloo' in name for name in during) > 0} {sum('gloo' in name for name in threads())}\\n"
sys.stdout.write(line)  # print writes the end of a line apart, and the lines of two processes may mix
"""
    )
    assert in_two_processes(str(script)).splitlines() == ["True 0", "True 0"]


def test_shares_of_a_batch_add_up_to_the_batch() -> None:
    index = batch_indices(100, 12, seed=0, step=3)
    shares = [World(rank, 4).share(index) for rank in range(4)]
    assert [len(share) for share in shares] == [3, 3, 3, 3]
    assert torch.equal(torch.cat(shares), index)


def test_a_batch_that_cannot_be_shared_evenly_is_refused(tiny_dataset: Dataset, tiny_model: TrajectoryModel) -> None:
    data = tokenize(tiny_dataset, tiny_model.tokenizer)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 2 processes, got 7"):
        Trainer(tiny_model, data, TrainConfig(batch_size=7), world=World(0, 2))
