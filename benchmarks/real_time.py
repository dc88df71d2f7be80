"""Planning latency on a GPU, from an observation on the host to an action on the host.

    python benchmarks/real_time.py [--quick] [--out results/planning/real_time_h200.json]

The weights are random; they only affect how many ancestors candidates share. `plan_ms_p50` and `plan_ms_p99` are for
hopper's sizes with beam 256, expansion 2, context 5, horizon 15 and a model whose window covers both; `sliding` uses
the authors' window of 5. `naive` and `cached` run in the same process, with the same search. `antmaze` is the preset
`default` at AntMaze's sizes, `antmaze_q` the same with the Q networks of IQL as objective; `q_cost` is their ratio.
"""

import argparse
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from trajectory_transformer.baselines import PRESETS
from trajectory_transformer.baselines.data import Learner
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import Step

SIZES = {"hopper": (11, 3), "halfcheetah": (17, 6), "ant": (27, 8), "antmaze": (29, 8)}
BASE = SearchConfig(beam_width=256, horizon=15, context=5, expansion=2, action=Sampler(nucleus=0.4), first_action=None)


def make_model(task: str, window: int, device: torch.device) -> TrajectoryModel:
    """The paper's model at the sizes of a task, with random weights large enough to distinguish tokens."""
    config = ModelConfig(window=window, dropout=0.0)
    model = TrajectoryModel.create(make_dataset(task), TokenConfig(), config, seed=0)
    with torch.no_grad():
        model.gpt.token_embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.gpt.to(device)
    return model


def make_dataset(task: str) -> Dataset:
    """Noise with the sizes of a task."""
    observation_dim, action_dim = SIZES[task]
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            rng.normal(size=(201, observation_dim)).astype(np.float32),
            rng.uniform(-1, 1, size=(200, action_dim)).astype(np.float32),
            rng.normal(size=200).astype(np.float32),
            terminated=index % 2 == 0,
        )
        for index in range(5)
    ]
    return Dataset(tuple(episodes))


def q_planner(model: TrajectoryModel, config: SearchConfig) -> Planner:
    """Plan by the Q networks of IQL at AntMaze's sizes, with random weights."""
    settings, learners = PRESETS["iql-antmaze"].settings, [Learner(0)]
    _, baseline = make_trainer("iql-antmaze", settings, [make_dataset("antmaze")], learners, device=model.device)
    return Planner(model, objective=baseline.objective(model), search=config, seed=0)


class Loop:
    """Controls an environment of noise."""

    def __init__(self, planner: Planner, *, num_envs: int = 1, forgetful: bool = False) -> None:
        """Control `num_envs` systems at once; a forgetful loop starts a new episode with every step."""
        self._forgetful = forgetful
        self._policy = planner.policy()
        self._rng = np.random.default_rng(1)
        self._shape = (num_envs, planner.model.layout.observation_dim)
        self._first = True
        self.actions: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        for _ in range(planner.search.context + 2):  # fill the context, and compile or capture whatever is made once
            self.step()

    def step(self) -> float:
        """Seconds from observation to action."""
        num_envs = self._shape[0]
        step = Step(
            observations=self._rng.normal(size=self._shape).astype(np.float32),
            rewards=self._rng.normal(size=num_envs).astype(np.float32),
            first=np.full(num_envs, self._first),
            goals=np.zeros((num_envs, 0), np.float32),
            active=np.full(num_envs, True),
        )
        self._first = self._forgetful
        started = time.perf_counter()
        self.actions.append(self._policy.act(step))
        return time.perf_counter() - started


def return_planner(model: TrajectoryModel, config: SearchConfig) -> Planner:
    """Plan by predicted returns."""
    return Planner(model, kind="return", discount=0.99, search=config, seed=0)


def measure(loop: Loop, repeats: int) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    times = [1000 * loop.step() for _ in range(repeats)]
    return float(np.median(times)), float(np.quantile(times, 0.99))


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    repeats = 30 if options.quick else 200
    metrics: dict[str, float] = {}

    def report(name: str, loop: Loop, count: int) -> float:
        median, tail = measure(loop, count)
        suffix = f"_{name}" if name else ""
        metrics[f"plan_ms_p50{suffix}"], metrics[f"plan_ms_p99{suffix}"] = median, tail
        print(f"{name or 'hopper, beam 256':28} {median:9.2f} ms, 99 % below {tail:9.2f} ms", flush=True)
        return median

    hopper, sliding = make_model("hopper", 21, device), make_model("hopper", 10, device)
    fused = report("", Loop(return_planner(hopper, BASE)), repeats)
    for width in (128, 32):
        report(f"beam_{width}", Loop(return_planner(hopper, replace(BASE, beam_width=width))), repeats)
    report("float32", Loop(return_planner(hopper, replace(BASE, backend="fused-float32"))), 10)
    report("sliding", Loop(return_planner(sliding, replace(BASE, context=4, window=5))), repeats)
    for task in ("halfcheetah", "ant"):
        report(task, Loop(return_planner(make_model(task, 21, device), BASE)), repeats)
    antmaze = make_model("antmaze", 10, device)
    plain = report("antmaze", Loop(return_planner(antmaze, SearchConfig())), repeats)
    metrics["q_cost"] = report("antmaze_q", Loop(q_planner(antmaze, SearchConfig())), repeats) / plain
    backends: tuple[Literal["cached", "naive"], ...] = ("cached", "naive")
    for name in backends:
        slow = report(name, Loop(return_planner(hopper, replace(BASE, backend=name))), 3)
        metrics[f"speedup_over_{name}"] = slow / fused
    num_envs = 64
    median, _ = measure(Loop(return_planner(hopper, replace(BASE, beam_width=128)), num_envs=num_envs), 10)
    metrics["plans_per_second_64_envs"] = 1000 * num_envs / median
    print(f"{num_envs} environments, beam 128: {1000 * num_envs / median:.0f} plans/s")

    # How often do both precisions choose the same first action, given the same noise and prompts? Every step starts an
    # episode, because a different action would change the prompts of later steps.
    config = replace(BASE, beam_width=64, context=0)
    precisions: tuple[Literal["fused", "fused-float32"], ...] = ("fused", "fused-float32")
    loops = [
        Loop(return_planner(hopper, replace(config, backend=each)), num_envs=16, forgetful=True) for each in precisions
    ]
    for loop in loops:
        measure(loop, 2 if options.quick else 8)
    pairs = zip(*(np.concatenate(loop.actions) for loop in loops), strict=True)
    metrics["same_first_action_bf16"] = float(np.mean([np.array_equal(*pair) for pair in pairs]))
    print(f"same first action in bfloat16 as in float32: {100 * metrics['same_first_action_bf16']:.1f} %")
    if options.out is not None:
        write_result(
            options.out,
            name="real_time",
            command="python " + shlex.join(sys.argv),
            device=device,
            seeds=[0, 1],
            seconds=time.perf_counter() - started,
            metrics=metrics,
            details={"settings": {"sizes": SIZES, "search": asdict(BASE), "repeats": repeats}},
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
