"""Training steps per second of the baselines, one seed and eight seeds at once, and of d3rlpy on the same machine.

    python benchmarks/baselines_throughput.py [--device cuda] [--d3rlpy] [--out results/baselines/throughput_X.json]

Random transitions with the sizes of halfcheetah (17 observation and 6 action dimensions); networks and batches of the
presets: 256 transitions, for dt 64 windows of 20 steps, for mbop 512 transitions for each of three ensembles of three.
`<algorithm>_steps_per_second` is the median over repeats with one seed, `<algorithm>_steps_per_second_8_seeds` with
eight seeds, where a step updates all of them; `<algorithm>_cost_8_seeds` is the ratio of the two. `--d3rlpy` also
measures d3rlpy, with `compile_graph` on a GPU:
`<algorithm>_d3rlpy_steps_per_second` and `<algorithm>_speedup`. `--profile 20` also lists the 20 GPU kernels, or
operations of a CPU, that take the most time in a step.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.baselines import PRESETS
from trajectory_transformer.baselines.brac import BRACSettings
from trajectory_transformer.baselines.cql import CQLSettings
from trajectory_transformer.baselines.data import Learner
from trajectory_transformer.baselines.presets import changed
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import mean_and_error, write_result

OBSERVATION_DIM, ACTION_DIM = 17, 6
ALGORITHMS = ("bc", "td3bc", "iql", "cql", "brac", "dt", "mbop")
D3RLPY = ALGORITHMS[:4]  # measured there as well


def random_dataset(num_episodes: int, steps: int = 1000) -> Dataset:
    """Noise of halfcheetah's sizes."""
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            rng.normal(size=(steps + 1, OBSERVATION_DIM)).astype(np.float32),
            rng.uniform(-1, 1, size=(steps, ACTION_DIM)).astype(np.float32),
            rng.normal(size=steps).astype(np.float32),
            terminated=index % 2 == 0,
        )
        for index in range(num_episodes)
    ]
    return Dataset(tuple(episodes))


def timed(
    advance: Callable[[int], None], device: torch.device, *, warm_up: int, steps: int, repeats: int
) -> list[float]:
    """Steps per second of each repeat, after a warm-up; `advance` takes a number of steps."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    advance(warm_up)
    found = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        advance(steps)
        wait()
        found.append(steps / (time.perf_counter() - started))
    return found


def profiled(advance: Callable[[int], None], device: torch.device, number: int, steps: int = 20) -> list[str]:
    """Microseconds per step, calls per step and name of what takes the most time, one line each."""
    kind = torch.profiler.ProfilerActivity
    gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[kind.CUDA if gpu else kind.CPU]) as profile:
        advance(steps)
        if gpu:
            torch.cuda.synchronize(device)
    events = profile.key_averages()
    times = [float(event.self_device_time_total if gpu else event.self_cpu_time_total) for event in events]
    order = sorted(range(len(events)), key=lambda index: -times[index])[:number]
    lines = [f"{sum(times) / steps:9.1f} us in all"]
    return lines + [f"{times[i] / steps:9.1f} us, {events[i].count / steps:6.1f} calls  {events[i].key}" for i in order]


def ours(
    name: str,
    dataset: Dataset,
    num_seeds: int,
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[list[float], float, list[str]]:
    """Steps per second of each repeat, seconds to the first steps with compilation, and a profile if asked for."""
    preset = changed(PRESETS[name].settings, {"steps": 10**9, **options.settings.get(name, {})})
    if isinstance(preset, CQLSettings):
        preset = replace(preset, clone_steps=0)  # the steps that most of a run consists of
    if isinstance(preset, BRACSettings):
        preset = replace(preset, clone_steps=0, warmup_steps=0)
    if options.hidden:
        preset = replace(preset, hidden=tuple(options.hidden))
    started = time.perf_counter()
    learners = [Learner(seed) for seed in range(num_seeds)]
    trainer, _ = make_trainer(name, preset, [dataset], learners, device=device, backend=options.backend)
    run = trainer.run(pause_every=options.steps)

    def advance(steps: int) -> None:
        last = trainer.step + steps
        while trainer.step < last:
            next(run)

    first: list[float] = []

    def noted(steps: int) -> None:
        advance(steps)
        if not first:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            first.append(time.perf_counter() - started)

    found = timed(noted, device, warm_up=options.warm_up, steps=options.steps, repeats=options.repeats)
    return found, first[0], profiled(advance, device, options.profile) if options.profile else []


def d3rlpy_speed(name: str, dataset: Dataset, device: torch.device, options: argparse.Namespace) -> list[float]:
    """Steps per second of d3rlpy, sampling included, compiled on a GPU."""
    import d3rlpy

    compiled = device.type == "cuda"
    configs = {
        "bc": d3rlpy.algos.BCConfig,
        "td3bc": d3rlpy.algos.TD3PlusBCConfig,
        "iql": d3rlpy.algos.IQLConfig,
        "cql": d3rlpy.algos.CQLConfig,
    }
    values: dict[str, object] = {"compile_graph": compiled, "batch_size": 256}
    if name == "cql":  # as in our preset: no Lagrange multiplier, three hidden layers
        encoder = d3rlpy.models.VectorEncoderFactory([256, 256, 256])
        values |= {"alpha_learning_rate": 0.0, "actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    algorithm = configs[name](**values).create(device="cuda:0" if compiled else "cpu:0")
    # Theirs marks the end of an episode by a terminal or by a timeout.
    columns = [np.concatenate([getattr(episode, part) for episode in dataset]) for part in ("actions", "rewards")]
    observations = np.concatenate([episode.observations[:-1] for episode in dataset])
    last = np.concatenate([np.arange(len(episode)) == len(episode) - 1 for episode in dataset])
    terminated = last & np.concatenate([np.full(len(episode), episode.terminated) for episode in dataset])
    data = d3rlpy.dataset.MDPDataset(
        observations, columns[0], columns[1], terminated.astype(np.float32), (last & ~terminated).astype(np.float32)
    )
    algorithm.build_with_dataset(data)

    def advance(steps: int) -> None:
        for _ in range(steps):
            algorithm.update(data.sample_transition_batch(256))

    return timed(advance, device, warm_up=20, steps=options.d3rlpy_steps, repeats=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 8], help="numbers of seeds trained at once")
    parser.add_argument("--steps", type=int, default=2000, help="steps of one repeat")
    parser.add_argument("--warm_up", type=int, default=200, help="steps before the first repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100, help="random episodes of 1000 steps to train on")
    parser.add_argument("--hidden", nargs="*", type=int, default=None, help="sizes of hidden layers; default: presets")
    parser.add_argument("--settings", type=json.loads, default={}, help='to change, as {"cql": {"bfloat16": true}}')
    parser.add_argument("--backend", choices=("auto", "eager", "captured", "compiled"), default="auto")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="also list the N slowest kernels of a step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--d3rlpy", action="store_true", help="also measure d3rlpy, which must be installed")
    parser.add_argument("--d3rlpy_steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    dataset = random_dataset(options.episodes)
    metrics: dict[str, float] = {}
    details: dict[str, object] = {}
    began = time.perf_counter()
    for name in options.algorithms:
        for number in options.seeds:
            speeds, first, profile = ours(name, dataset, number, device, options)
            key = f"{name}_steps_per_second" + ("" if number == 1 else f"_{number}_seeds")
            metrics |= mean_and_error(key, speeds) | {key: float(np.median(speeds))}
            details[key] = {"repeats": speeds, "start_seconds": first}
            if number > 1 and f"{name}_steps_per_second" in metrics:
                metrics[f"{name}_cost_{number}_seeds"] = metrics[f"{name}_steps_per_second"] / metrics[key]
            print(f"{key}: {metrics[key]:,.0f} (started in {first:.1f} s)", *profile, sep="\n", flush=True)
        if options.d3rlpy and name in D3RLPY:
            key = f"{name}_d3rlpy_steps_per_second"
            speeds = d3rlpy_speed(name, dataset, device, options)
            metrics[key] = float(np.median(speeds))
            if f"{name}_steps_per_second" in metrics:
                metrics[f"{name}_speedup"] = metrics[f"{name}_steps_per_second"] / metrics[key]
            print(f"{key}: {metrics[key]:,.0f}", flush=True)
    if options.out is not None:
        write_result(
            options.out,
            name="baselines throughput",
            command="python " + shlex.join(sys.argv),
            device=device,
            seeds=list(range(max(options.seeds))),
            seconds=time.perf_counter() - began,
            metrics=metrics,
            details={"settings": {"backend": options.backend, **options.settings}, "measured": details},
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
