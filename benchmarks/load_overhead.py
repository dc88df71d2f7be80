"""Time to load a model with all checks of its files, compared with loading the same files without any.

    python benchmarks/load_overhead.py [--repeats 61] [--out results/reliability/load_overhead.json]

The checks: SHA-256 of the weights, finite weights, sizes against the tensors, types of the settings, bins and edges.
Both ways of loading alternate, in another order each time, and medians are compared: other work on the machine
disturbs both. The digest is computed in a second thread while the model is built. Three clocks say what that is worth:

- elapsed time (`overhead_percent`), which depends on what else the machine does;
- processor time of the thread that loads (`main_thread_overhead_percent`): what it costs if a core is free;
- processor time of all threads (`cpu_overhead_percent`): what it costs if no core is free.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.checkpoint import DESCRIPTION, WEIGHTS, read_tensors
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import write_result
from trajectory_transformer.tokens.discretizer import Discretizer
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import Tokenizer

SIZES = {"default": ModelConfig(), "large": ModelConfig(num_layers=8, num_heads=8, width=256)}


def load_unchecked(folder: Path) -> TrajectoryModel:
    """What loading amounts to if the files are believed."""
    stored = json.loads((folder / DESCRIPTION).read_text())
    tensors, _ = read_tensors(folder / WEIGHTS)
    layout, tokens = TokenLayout(**stored["layout"]), TokenConfig(**{**stored["tokens"], "goal_dims": ()})
    edges, values = (tensors.pop(f"discretizer.{name}").double().numpy() for name in ("edges", "values"))
    gpt = GPT(layout, tokens.num_bins, ModelConfig(**stored["model"]))
    gpt.load_state_dict({name.removeprefix("gpt."): value for name, value in tensors.items()})
    return TrajectoryModel(gpt.eval(), Tokenizer(layout, Discretizer(tuple(edges), values), tokens), stored["metadata"])


def small_data() -> Dataset:
    """Episodes with the sizes of Hopper: 11 observation and 3 action dimensions."""
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(1001, 11)), rng.uniform(-1, 1, size=(1000, 3))
    rewards = rng.normal(size=1000).astype(np.float32)
    return Dataset((Episode(states.astype(np.float32), actions.astype(np.float32), rewards, terminated=True),))


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Medians of both ways of loading by three clocks, and how much longer the one with checks takes."""
    ways: dict[str, Callable[[Path], TrajectoryModel]] = {"checked": TrajectoryModel.load, "unchecked": load_unchecked}
    clocks = {"": time.perf_counter, "main_thread_": time.thread_time, "cpu_": time.process_time}
    seconds: dict[tuple[str, str], list[float]] = {(clock, name): [] for clock in clocks for name in ways}
    for load in ways.values():
        load(folder)
    for repeat in range(repeats):
        for name in sorted(ways, reverse=repeat % 2 == 1):
            began = {clock: read() for clock, read in clocks.items()}
            ways[name](folder)
            for clock, read in clocks.items():
                seconds[clock, name].append(read() - began[clock])
    metrics = dict[str, float]()
    for clock in clocks:
        checked, unchecked = (1000 * statistics.median(seconds[clock, name]) for name in ways)
        metrics |= {f"{clock}checked_ms": checked, f"{clock}unchecked_ms": unchecked}
        metrics[f"{clock}overhead_percent"] = 100 * (checked / unchecked - 1)
    return metrics


def main() -> None:
    """Measure both sizes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--out", type=Path, default=Path("results/reliability/load_overhead.json"))
    options = parser.parse_args()
    began, metrics = time.perf_counter(), dict[str, float]()
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = TrajectoryModel.create(small_data(), TokenConfig(), sizes, seed=0)
            model.save(folder)
            found = measure(Path(folder), options.repeats)
        found["parameters"] = sum(parameter.numel() for parameter in model.gpt.parameters())
        metrics |= {key if name == "default" else f"{name}_{key}": value for key, value in found.items()}
    write_result(
        options.out,
        name="load overhead",
        command=shlex.join(["python", "benchmarks/load_overhead.py", *sys.argv[1:]]),
        device=torch.device("cpu"),
        seeds=[0],
        seconds=time.perf_counter() - began,
        metrics=metrics,
        details={"repeats": options.repeats},
    )
    for key, value in metrics.items():
        print(f"{key}: {value:.4g}")


if __name__ == "__main__":
    main()
