"""Peak memory of tokenizing and training on a stream of ten million transitions that is never held in memory.

    python benchmarks/memory_mapped.py [--steps 10_000_000] [--out results/training/memory_mapped.json]

Each part runs in its own process. Its peak resident memory is `ru_maxrss`; mapped pages count once they are touched.
`import_peak_mib` is that of a process that only imports the package.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import write_result
from trajectory_transformer.tokens.shards import build_shards, open_shards
from trajectory_transformer.training.train import Trainer

EPISODE = 1000  # steps


def stream(num_steps: int) -> Iterator[Episode]:
    """Random walks of 4 observation and 2 action dimensions, one episode at a time."""
    for number in range(num_steps // EPISODE):
        rng = np.random.default_rng(number)
        actions = rng.uniform(-1, 1, size=(EPISODE, 2)).astype(np.float32)
        noise = rng.normal(size=(EPISODE + 1, 4)).astype(np.float32)
        noise[1:, :2] += actions
        yield Episode(
            (np.cumsum(noise, axis=0) / 30).astype(np.float32),
            actions,
            rng.normal(size=EPISODE).astype(np.float32),
            terminated=number % 2 == 0,
        )


def tokenize_stream(folder: Path, num_steps: int) -> dict[str, float]:
    """Fit on a sample and write the shards."""
    build_shards(folder, lambda: stream(num_steps), TokenConfig(truncated="stop"), source="random walks")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"shards_mib": size / 2**20}


def train(folder: Path, num_steps: int) -> dict[str, float]:
    """A hundred steps of a tiny model, with batches spread over all shards."""
    shards = open_shards(folder)
    assert shards.data.num_windows == num_steps // EPISODE * EPISODE
    sizes = ModelConfig(window=10, num_layers=1, num_heads=2, width=32, dropout=0.1)
    model = TrajectoryModel.build(shards.tokenizer, sizes, shards.metadata, seed=0)
    trainer = Trainer(model, shards.data, TrainConfig(steps=100, batch_size=64, learning_rate=6e-4), log_every=100)
    losses = [metrics.loss for metrics in trainer.run() if metrics is not None]
    return {"loss": losses[-1]}


def measured(part: str, folder: Path, num_steps: int) -> dict[str, float]:
    """Run one part in a fresh process: seconds, peak memory, and its own numbers."""
    words = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--steps", str(num_steps)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", choices=("import", "tokenize", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.perf_counter()
    if options.part is not None:
        numbers: dict[str, float] = {}
        if options.part != "import":
            numbers = (tokenize_stream if options.part == "tokenize" else train)(options.folder, options.steps)
        numbers["seconds"] = time.perf_counter() - started
        numbers["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(numbers))
        return
    metrics: dict[str, float] = {"transitions": options.steps}
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("import", "tokenize", "train"):
            numbers = measured(part, Path(scratch) / "shards", options.steps)
            print(f"{part:10}" + "".join(f"{name} {value:.4g}  " for name, value in numbers.items()))
            metrics |= {f"{part}_{name}": value for name, value in numbers.items()}
    metrics["peak_mib"] = max(metrics["tokenize_peak_mib"], metrics["train_peak_mib"])
    if options.out is not None:
        write_result(
            options.out,
            name="memory_mapped",
            command="python " + shlex.join(sys.argv),
            device=torch.device("cpu"),
            seeds=[0],
            seconds=time.perf_counter() - started,
            metrics=metrics,
            details={"settings": {"layout": "4 + 2 + 2", "window": 10, "batch_size": 64, "train_steps": 100}},
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
