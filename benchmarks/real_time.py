"""Whether planning keeps up with control on a GPU: an observation on the host in, an action on the host out.

    python benchmarks/real_time.py [--quick] [--out results/planning/real_time_h200.json]

Random weights: time depends on them only in how many ancestors candidates have in common. `plan_ms_p50` and
`plan_ms_p99` are at hopper's sizes with beam 256, expansion 2, context 5, horizon 15 and a model whose window covers
both; `sliding` has the authors' window of 5. `naive` and `cached` run beside the fused decoder, with the same search.
"""

import argparse
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanningPolicy
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import Step
from trajectory_transformer.search.objectives import discounted_return

SIZES = {"hopper": (11, 3), "halfcheetah": (17, 6), "ant": (27, 8)}
BASE = SearchConfig(beam_width=256, horizon=15, context=5, expansion=2)


def make_model(task: str, window: int, device: torch.device) -> TrajectoryModel:
    """The paper's model for noise of a task's sizes, with random weights big enough to tell tokens apart."""
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
    config = ModelConfig(window=window, dropout=0.0)
    model = TrajectoryModel.create(Dataset(tuple(episodes)), TokenConfig(), config, seed=0)
    with torch.no_grad():
        model.gpt.token_embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.gpt.to(device)
    return model


class Loop:
    """An environment of noise under control; remembers how long every action took."""

    def __init__(
        self, model: TrajectoryModel, config: SearchConfig, *, num_envs: int = 1, forgetful: bool = False
    ) -> None:
        """Control so many systems at once; a forgetful loop begins anew with every step."""
        self._forgetful = forgetful
        self._policy = PlanningPolicy(model, config, discounted_return(0.99), seed=0)
        self._rng = np.random.default_rng(1)
        self._shape = (num_envs, model.layout.observation_dim)
        self._first = True
        self.actions: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        for _ in range(config.context + 2):  # a full context, and whatever is made once
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
    fused = report("", Loop(hopper, BASE), repeats)
    for width in (128, 32):
        report(f"beam_{width}", Loop(hopper, replace(BASE, beam_width=width)), repeats)
    report("float32", Loop(hopper, replace(BASE, precision="float32")), 10)
    report("sliding", Loop(sliding, replace(BASE, context=4, window=5)), repeats)
    for task in ("halfcheetah", "ant"):
        report(task, Loop(make_model(task, 21, device), BASE), repeats)
    for name in ("cached", "naive"):
        slow = report(name, Loop(hopper, replace(BASE, decoder=name)), 3)
        metrics[f"speedup_over_{name}"] = slow / fused
    num_envs = 64
    median, _ = measure(Loop(hopper, replace(BASE, beam_width=128), num_envs=num_envs), 10)
    metrics["plans_per_second_64_envs"] = 1000 * num_envs / median
    print(f"{num_envs} environments, beam 128: {1000 * num_envs / median:.0f} plans a second")

    # The same noise and prompts in both precisions: how often is the first action the same? Every step begins an
    # episode, since a different action would make different prompts of the steps after it.
    config = replace(BASE, beam_width=64, context=0)
    loops = [
        Loop(hopper, replace(config, precision=precision), num_envs=16, forgetful=True)
        for precision in ("bf16", "float32")
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
