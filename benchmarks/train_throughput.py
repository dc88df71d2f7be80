"""How fast training goes, and how much of its time is not the model's: tokens per second, time per phase.

    python benchmarks/train_throughput.py [--device cuda] [--compare] [--out results/training/train_throughput.json]

The paper's model at the sizes of hopper (11 + 3 + 2 tokens, window 10) on random data. `overhead_share` is the share of
wall time outside forward, backward and optimiser: batches, learning rate, metrics, the loop itself. `tokens_per_second`
comes from a run that is not timed inside. Several settings of one run take turns, so that a disturbance hits all.
`start_seconds` is what the first two steps take, compilation among it; on a GPU `peak_mib` is the most memory that one
step holds: weights, moments, tokens and activations.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import write_result
from trajectory_transformer.tokens.windows import Batch, tokenize
from trajectory_transformer.training.train import Trainer

PHASES = ("batch", "forward", "backward", "optimiser")


def random_dataset(num_episodes: int = 100, steps: int = 1000) -> Dataset:
    """Noise of hopper's sizes."""
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            rng.normal(size=(steps + 1, 11)).astype(np.float32),
            rng.uniform(-1, 1, size=(steps, 3)).astype(np.float32),
            rng.normal(size=steps).astype(np.float32),
            terminated=index % 2 == 0,
        )
        for index in range(num_episodes)
    ]
    return Dataset(tuple(episodes))


class Clock:
    """Time spent in named phases; on a GPU between events, so that nothing waits while it runs."""

    def __init__(self, device: torch.device) -> None:
        """Start at zero."""
        self._device = device
        self._spans: list[tuple[str, float, float]] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside towards a phase."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._spans.append((name, started, time.perf_counter()))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        spent = dict.fromkeys(PHASES, 0.0)
        for name, started, ended in self._spans:
            spent[name] += ended - started
        for name, first, last in self._events:
            spent[name] += first.elapsed_time(last) / 1000
        return spent


class TimedTrainer(Trainer):
    """The same loop with a clock in it."""

    clock: Clock

    def batch(self) -> Batch:
        """Timed."""
        with self.clock.phase("batch"):
            return super().batch()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Timed."""
        with self.clock.phase("forward"):
            return super().forward(batch)

    def backward(self, loss: Tensor) -> None:
        """Timed."""
        with self.clock.phase("backward"):
            super().backward(loss)

    def update(self) -> Tensor:
        """Timed."""
        with self.clock.phase("optimiser"):
            return super().update()


def seconds_of(trainer: Trainer, steps: int) -> float:
    """Wall time of so many steps of a run, the metrics every 20 steps included."""
    run = trainer.run()
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        next(run)
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def allocated(device: torch.device, *, peak: bool = False) -> float:
    """MiB that tensors hold on a GPU, now or at most since this was last asked for; 0 elsewhere."""
    if device.type != "cuda":
        return 0.0
    held = torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return held / 2**20


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="steps a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compare", action="store_true", help="also every precision, compiled and not")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    model_config = ModelConfig(dropout=options.dropout)
    config = TrainConfig(batch_size=options.batch_size, steps=10**9, log_every=20)
    dataset = random_dataset()
    tokens = TokenConfig()
    settings = {"auto": config}
    if options.compare:
        for precision in ("float32", "bf16"):
            for compiled in (False, True):
                name = f"{precision}_{'compiled' if compiled else 'eager'}"
                settings[name] = replace(config, precision=precision, compile=compiled)

    def make(kind: type[Trainer], train: TrainConfig) -> tuple[Trainer, dict[str, float]]:
        before = allocated(device)
        model = TrajectoryModel.create(dataset, tokens, model_config, seed=0)
        data = tokenize(dataset, model.discretizer, model.layout, tokens).to(device)
        model.gpt.to(device)
        trainer = kind(model, data, train)
        if isinstance(trainer, TimedTrainer):
            trainer.clock = Clock(device)
        costs = {"start_seconds": seconds_of(trainer, 2)}  # warm: compilation, the first shuffle, allocations
        if device.type == "cuda":
            allocated(device)
            seconds_of(trainer, 1)
            costs["peak_mib"] = allocated(device, peak=True) - before
        return trainer, costs

    made = {name: make(Trainer, train) for name, train in settings.items()}
    trainers = {name: trainer for name, (trainer, _) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    timed, _ = make(TimedTrainer, config)
    assert isinstance(timed, TimedTrainer)
    walls: list[float] = []
    phases: list[dict[str, float]] = []
    for _ in range(options.repeats):
        for name, trainer in trainers.items():
            times[name].append(seconds_of(trainer, options.steps) / options.steps)
        timed.clock = Clock(device)
        walls.append(seconds_of(timed, options.steps) / options.steps)
        phases.append({name: spent / options.steps for name, spent in timed.clock.seconds().items()})

    layout = timed.model.layout
    tokens_a_step = options.batch_size * layout.length(model_config.window)
    step = {name: float(np.median(values)) for name, values in times.items()}
    outside = [1 - sum(part[name] for name in PHASES[1:]) / wall for part, wall in zip(phases, walls, strict=True)]
    metrics = {
        "tokens_per_second": tokens_a_step / step["auto"],
        "overhead_share": float(np.median(outside)),
        "step_ms": 1000 * step["auto"],
        "step_ms_spread": 1000 * (max(times["auto"]) - min(times["auto"])),
        **{f"{name}_ms": 1000 * float(np.median([part[name] for part in phases])) for name in PHASES},
        **made["auto"][1],
        **{f"tokens_per_second_{name}": tokens_a_step / value for name, value in step.items() if name != "auto"},
        **{f"{cost}_{name}": value for name in made if name != "auto" for cost, value in made[name][1].items()},
    }
    for name, value in metrics.items():
        print(f"{name:40} {value:12.4g}")
    if options.out is not None:
        write_result(
            options.out,
            name="train_throughput",
            command="python " + shlex.join(sys.argv),
            device=device,
            seeds=[0],
            seconds=time.perf_counter() - started,
            metrics=metrics,
            details={
                "settings": {
                    "layout": "11 + 3 + 2",
                    "model": asdict(model_config),
                    "batch_size": options.batch_size,
                    "steps": options.steps,
                    "repeats": options.repeats,
                }
            },
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
