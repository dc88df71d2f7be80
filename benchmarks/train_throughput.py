"""Training throughput, time by phase, and loss curves.

    python benchmarks/train_throughput.py [--device cuda] [--compare] [--curves 400] [--out results/training/X.json]

The paper's model at the sizes of hopper (11 + 3 + 2 tokens, window 10) on random data. `overhead_share` is the share of
wall time outside forward, backward and optimizer: batches, learning rate, metrics, the loop itself. `tokens_per_second`
comes from a run that is not timed inside. Several backends take turns, so that a disturbance affects all of them.
`start_seconds` is the time of the first steps, compilation included; on a GPU `peak_mib` is the peak memory of one
step: weights, moments, tokens and activations.

On a GPU every phase is compared with its roofline: `*_gflop` of matmuls and `*_mib` that must be moved if each matmul
and each attention reads its inputs and writes its results once, in bfloat16, and all else is fused; `*_floor_ms` is the
time that the measured ceilings of the machine (--tflops, --tbs) allow. `--curves N` trains N steps with the eager
backend (float32) and with the default one on learnable data, with three seeds each: `loss_gap_auto` is the mean
difference of their final losses, `loss_gap_float32_redrawn` that of float32 with other dropout, `loss_seed_spread` the
standard deviation between seeds.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.gpu.backends import make_batch_maker, make_engine
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import summarize, write_result
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

PHASES = ("batch", "forward", "backward", "optimizer")


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


def learnable_dataset(num_episodes: int = 100, steps: int = 1000) -> Dataset:
    """A noisy linear system of hopper's sizes under a noisy linear controller."""
    rng = np.random.default_rng(1)
    dynamics = 0.95 * np.linalg.qr(rng.normal(size=(11, 11)))[0]
    influence, control = rng.normal(size=(11, 3)) / 3, rng.normal(size=(3, 11)) / 3
    episodes = []
    for index in range(num_episodes):
        states, actions = [rng.normal(size=11)], []
        for _ in range(steps):
            actions.append(np.tanh(control @ states[-1] + 0.1 * rng.normal(size=3)))
            states.append(dynamics @ states[-1] + influence @ actions[-1] + 0.05 * rng.normal(size=11))
        rewards = -np.square(states[1:]).sum(axis=1)
        arrays = [np.asarray(part, dtype=np.float32) for part in (states, actions, rewards)]
        episodes.append(Episode(arrays[0], arrays[1], arrays[2], terminated=index % 2 == 0))
    return Dataset(tuple(episodes))


class Clock:
    """Time spent in named phases; on a GPU between events, so that nothing waits while it runs.

    Events of a recorded step are recorded with it and hold the times of its last replay: `tick` adds them up.
    """

    def __init__(self, device: torch.device) -> None:
        """Start at zero."""
        self._device = device
        self._spans: list[tuple[str, float, float]] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._recorded: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._spent = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside towards a phase."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._spans.append((name, started, time.perf_counter()))
            return
        recording = torch.cuda.is_current_stream_capturing()
        first, last = (
            torch.cuda.Event(enable_timing=True, external=recording)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        yield
        last.record()
        (self._recorded if recording else self._events).append((name, first, last))

    def tick(self) -> None:
        """Count a step that was replayed; waits for the device."""
        if self._recorded:
            torch.cuda.synchronize()
            for name, first, last in self._recorded:
                self._spent[name] += first.elapsed_time(last) / 1000

    def reset(self) -> None:
        """Forget the times; what was recorded stays."""
        self._spans, self._events = [], []
        self._spent = dict.fromkeys(PHASES, 0.0)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        spent = dict(self._spent)
        for name, started, ended in self._spans:
            spent[name] += ended - started
        for name, first, last in self._events:
            spent[name] += first.elapsed_time(last) / 1000
        return spent


def timed(clock: Clock, name: str, function: Callable[..., object]) -> Callable[..., object]:
    """The function with its time counted towards a phase."""

    def call(*arguments: object) -> object:
        with clock.phase(name):
            return function(*arguments)

    return call


def time_phases(trainer: Trainer) -> Clock:
    """Put a clock into a trainer and its engine."""
    clock, engine = Clock(trainer.model.device), trainer.engine
    trainer._make_batch = timed(clock, "batch", trainer._make_batch)  # type: ignore[assignment]
    for phase, method in (("forward", "forward"), ("backward", "backward"), ("optimizer", "update")):
        setattr(engine, method, timed(clock, phase, getattr(engine, method)))
    return clock


def seconds_of(trainer: Trainer, steps: int, clock: Clock | None = None) -> float:
    """Wall time of some steps of a run, including metrics every 20 steps."""
    run = trainer.run()
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        next(run)
        if clock is not None:
            clock.tick()
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def work_of(model: TrajectoryModel, batch_size: int) -> dict[str, tuple[float, float]]:
    """Products to compute and bytes to move in each phase of a step: FLOP, bytes."""
    config, length = model.gpt.config, model.layout.length(model.gpt.config.window)
    tokens, width, logits = batch_size * length, config.width, model.gpt.num_bins + 1
    parameters = sum(parameter.numel() for parameter in model.gpt.parameters())
    linear = 24 * tokens * width**2 * config.num_layers + 2 * tokens * width * logits
    attention = 2 * tokens * length * width * config.num_layers  # scores and sums, half of each is causal
    # Numbers a token, in widths, that a layer reads and writes. Forward: qkv 1 + 3, attention 3 + 1, out with residual
    # and norm 2 + 2, up with gelu 1 + 8, down with residual and norm 5 + 2. Backward: norms 2 (3 + 2), down 5 + 4 and
    # for its weights 5, up 4 + 1 and 5, attention 5 + 3, out 1 + 1 and 2, qkv 3 + 1 and 4.
    forward = tokens * (28 * width * config.num_layers + 3 * width + logits)
    backward = tokens * (54 * width * config.num_layers + 6 * width + 3 * logits)
    return {
        "batch": (0.0, 2.0 * tokens * 9),  # a byte read, a token and a flag written
        "forward": (linear + attention, 2.0 * forward),
        "backward": (2 * linear + 2.5 * attention, 2.0 * backward),
        "optimizer": (0.0, 32.0 * parameters),  # weights, moments, decay and gradient in; weights, moments, copy out
    }


class Redrawn(Trainer):
    """The same run with other dropout."""

    def _seed_dropout(self) -> None:
        super()._seed_dropout()
        torch.manual_seed(torch.initial_seed() + 1)


def make_trainer(
    dataset: Dataset,
    model_config: ModelConfig,
    config: TrainConfig,
    device: torch.device,
    *,
    seed: int = 0,
    log_every: int = 20,
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """A run at step 0, on a device."""
    model = TrajectoryModel.create(dataset, TokenConfig(truncated="stop"), model_config, seed=seed)
    data = tokenize(dataset, model.tokenizer).to(device)
    model.gpt.to(device)
    engine, make_batch = make_engine(model, config, World()), make_batch_maker(model, data, config)
    return kind(model, data, config, seed=seed, engine=engine, make_batch=make_batch, log_every=log_every)


def curves(device: torch.device, config: TrainConfig, model_config: ModelConfig) -> dict[str, list[list[float]]]:
    """Losses of every step in float32 and with the given backend: for each, one list per seed."""
    dataset, eager = learnable_dataset(), replace(config, backend="eager")
    found: dict[str, list[list[float]]] = {"float32": [], "float32_redrawn": [], "auto": []}
    for seed in range(3):
        for name, train in (("float32", eager), ("float32_redrawn", eager), ("auto", config)):
            kind = Redrawn if name == "float32_redrawn" else Trainer
            trainer = make_trainer(dataset, model_config, train, device, seed=seed, log_every=1, kind=kind)
            found[name].append([metrics.loss for metrics in trainer.run() if metrics is not None])
    return found


def curve_metrics(found: dict[str, list[list[float]]]) -> dict[str, float]:
    """Last losses (mean of the last tenth), how far apart the settings are, and how far the seeds."""
    last = {name: np.array([np.mean(losses[-len(losses) // 10 :]) for losses in runs]) for name, runs in found.items()}
    metrics = {f"loss_{name}": float(values.mean()) for name, values in last.items()}
    for name in ("auto", "float32_redrawn"):
        metrics |= summarize(f"loss_gap_{name}", (last[name] - last["float32"]).tolist())
    return metrics | {"loss_seed_spread": float(last["float32"].std(ddof=1))}


def every(losses: Sequence[float], count: int) -> list[float]:
    """Means of `count` losses at a time."""
    return [round(float(np.mean(losses[start : start + count])), 5) for start in range(0, len(losses), count)]


def allocated(device: torch.device, *, peak: bool = False) -> float:
    """MiB allocated on a GPU, now or at most since the last call; 0 on a CPU."""
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
    parser.add_argument("--compare", action="store_true", help="also all other backends")
    parser.add_argument("--curves", type=int, default=0, help="steps of the loss curves to compare")
    parser.add_argument("--tflops", type=float, default=780.0, help="measured ceiling of products in bfloat16")
    parser.add_argument("--tbs", type=float, default=4.3, help="measured ceiling of the memory, in TB/s")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    model_config = ModelConfig(dropout=options.dropout)
    config = TrainConfig(batch_size=options.batch_size, steps=10**9, learning_rate=6e-4)
    dataset = random_dataset()
    settings = {"auto": config}
    if options.compare:
        settings["eager"] = replace(config, backend="eager")
        if device.type == "cuda":
            settings["compiled"] = replace(config, backend="compiled")

    def make(train: TrainConfig, *, timed: bool = False) -> tuple[Trainer, dict[str, float], Clock | None]:
        before = allocated(device)
        trainer = make_trainer(dataset, model_config, train, device)
        clock = time_phases(trainer) if timed else None
        costs = {"start_seconds": seconds_of(trainer, 1)}  # warm-up: compilation, the first shuffle, allocations
        allocated(device)
        costs["start_seconds"] += seconds_of(trainer, 3)  # one eager step, one captured, one replayed
        if device.type == "cuda":
            costs["peak_mib"] = allocated(device, peak=True) - before
        return trainer, costs, clock

    made = {name: make(train) for name, train in settings.items()}
    trainers = {name: each[0] for name, each in made.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    watched, _, clock = make(config, timed=True)
    assert clock is not None
    walls: list[float] = []
    phases: list[dict[str, float]] = []
    for _ in range(options.repeats):
        for name, trainer in trainers.items():
            times[name].append(seconds_of(trainer, options.steps) / options.steps)
        clock.reset()
        walls.append(seconds_of(watched, options.steps, clock) / options.steps)
        phases.append({name: spent / options.steps for name, spent in clock.seconds().items()})

    layout = watched.model.layout
    tokens_a_step = options.batch_size * layout.length(model_config.window)
    step = {name: float(np.median(values)) for name, values in times.items()}
    if device.type == "cuda":
        walls = times["auto"]  # a timed step waits for the device
    outside = [1 - sum(part[name] for name in PHASES[1:]) / wall for part, wall in zip(phases, walls, strict=True)]
    floors = {
        name: (flop, size, 1000 * max(flop / options.tflops / 1e12, size / options.tbs / 1e12))
        for name, (flop, size) in work_of(watched.model, options.batch_size).items()
    }
    roofline: dict[str, float] = {}
    if device.type == "cuda":
        for name, (flop, size, floor) in floors.items():
            roofline |= {f"{name}_gflop": flop / 1e9, f"{name}_mib": size / 2**20, f"{name}_floor_ms": floor}
        roofline["floor_share"] = sum(floor for _, _, floor in floors.values()) / (1000 * step["auto"])
    learnt = curves(device, replace(config, steps=options.curves), model_config) if options.curves else {}
    metrics = {
        "tokens_per_second": tokens_a_step / step["auto"],
        "overhead_share": float(np.median(outside)),
        "step_ms": 1000 * step["auto"],
        "step_ms_spread": 1000 * (max(times["auto"]) - min(times["auto"])),
        **{f"{name}_ms": 1000 * float(np.median([part[name] for part in phases])) for name in PHASES},
        **made["auto"][1],
        **roofline,
        **(curve_metrics(learnt) if learnt else {}),
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
                },
                **{f"curve_{name}": [every(losses, 20) for losses in runs] for name, runs in learnt.items()},
            },
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
