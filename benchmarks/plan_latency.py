"""Planning time of the naive and the cached decoder at the sizes of a locomotion task.

    python benchmarks/plan_latency.py [--quick] [--device cpu] [--out results/planning/plan_latency_cpu.json]

Ratios are measured in one run, in turn. `cached_speedup` is for a context and horizon that fit the model's window,
`cached_speedup_sliding` for a sliding window. Cost by horizon is measured without sliding (window 25), with sliding at
every step (window 5), and with the default window of 10, where only the longer horizons slide. The weights are random.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.results import write_result
from trajectory_transformer.search.beam import beam_search
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Bins, Decoder, NaiveDecoder
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return
from trajectory_transformer.tokens.layout import TokenLayout

HOPPER = TokenLayout(goal_dim=0, observation_dim=11, action_dim=3, rewards=True)
NUM_BINS = 100


def make_gpt(window: int, device: torch.device) -> GPT:
    """The paper's model with random weights large enough to distinguish tokens."""
    torch.manual_seed(0)
    gpt = GPT(HOPPER, NUM_BINS, ModelConfig(window=window, dropout=0.0)).eval().to(device)
    torch.nn.init.normal_(gpt.token_embedding.weight)
    return gpt


def planner(decoder: Decoder, config: SearchConfig, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that makes one plan and copies it to the host."""
    generator = torch.Generator().manual_seed(1)
    length = HOPPER.length(config.context) + HOPPER.observation_dim
    prompt = torch.randint(NUM_BINS, (1, length), generator=generator).to(device)
    values = torch.linspace(-1, 1, NUM_BINS).expand(HOPPER.size, -1).contiguous().to(device)
    bins, objective = Bins(HOPPER, values), discounted_return(0.99)

    def plan() -> torch.Tensor:
        noise = Noise(torch.tensor([7], device=device))
        return beam_search(decoder, prompt, objective, bins=bins, config=config, noise=noise).best.cpu()

    return plan


def seconds_of(plan: Callable[[], torch.Tensor], repeats: int) -> list[float]:
    """Wall time of repeated plans."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        plan()
        times.append(time.perf_counter() - started)
    return times


def num_planned(horizon: int) -> int:
    """Tokens that a plan adds; its last transition has no next state."""
    return horizon * HOPPER.size - HOPPER.observation_dim


def phase_shares(gpt: GPT, config: SearchConfig, device: torch.device) -> dict[str, float]:
    """Where the time of a cached plan goes, in percent: token steps, reading the window again, selections, the rest."""
    spent = {"steps": 0.0, "refill": 0.0, "select": 0.0}

    def timed(kind: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            started, inside = time.perf_counter(), sum(spent.values())
            result = function(*arguments, **named)
            # A selection may read a token first: that counts as a step.
            spent[kind] += time.perf_counter() - started - (sum(spent.values()) - inside)
            return result

        return call

    decoder = CachedDecoder(gpt, config.window)
    decoder._extend = timed("steps", decoder._extend)  # type: ignore[method-assign, assignment]
    decoder.select = timed("select", decoder.select)  # type: ignore[method-assign, assignment]
    decoder._read_visible = timed("refill", decoder._read_visible)  # type: ignore[method-assign, assignment]
    plan = planner(decoder, config, device)
    started = time.perf_counter()
    for _ in range(3):
        plan()
    total = time.perf_counter() - started
    return {
        **{kind: 100 * part / total for kind, part in spent.items()},
        "rest": 100 * (1 - sum(spent.values()) / total),
    }


def distance_from_line(cost: Mapping[int, float]) -> float:
    """Largest relative distance of costs by horizon from their least-squares line."""
    horizons, costs = np.array(list(cost)), np.array(list(cost.values()))
    line = np.polyval(np.polyfit(horizons, costs, 1), horizons)
    return float(np.abs(costs / line - 1).max())


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and horizons, under a minute")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    repeats, naive_repeats = (5, 1) if options.quick else (11, 3)
    base = SearchConfig(
        beam_width=32, expansion=2, horizon=5, context=4, action=Sampler(nucleus=0.4), first_action=None
    )
    settings = {"": (make_gpt(9, device), base), "_sliding": (make_gpt(10, device), replace(base, window=5))}
    metrics: dict[str, float] = {}
    print(f"{'':>10} {'naive ms':>10} {'cached ms':>10} {'speed-up':>9}   steps  refill  select    rest (% of cached)")
    for suffix, (gpt, config) in settings.items():
        decoders = (NaiveDecoder(gpt, config.window), CachedDecoder(gpt, config.window))
        naive, cached = (planner(decoder, config, device) for decoder in decoders)
        expected = cached()  # also a warm-up
        same = True
        naive_times: list[float] = []
        cached_times: list[float] = []
        for _ in range(naive_repeats):  # in turn, so that a disturbance affects both
            began = time.perf_counter()
            same = same and torch.equal(naive(), expected)
            naive_times.append(time.perf_counter() - began)
            cached_times += seconds_of(cached, max(repeats // naive_repeats, 1))
        slow, fast = float(np.median(naive_times)), float(np.median(cached_times))
        shares = phase_shares(gpt, config, device)
        metrics |= {
            f"naive_ms{suffix}": 1000 * slow,
            f"cached_ms{suffix}": 1000 * fast,
            f"cached_speedup{suffix}": slow / fast,
            f"same_plan{suffix}": float(same),
            **{f"share_{kind}{suffix}": part for kind, part in shares.items()},
        }
        parts = "".join(f"{shares[kind]:8.1f}" for kind in ("steps", "refill", "select", "rest"))
        print(f"{suffix or 'fits':>10} {1000 * slow:10.0f} {1000 * fast:10.1f} {slow / fast:8.1f}x {parts}")
    horizons = (5, 20) if options.quick else (5, 10, 15, 20)
    models = {"": make_gpt(25, device), "_sliding": settings["_sliding"][0], "_default": settings["_sliding"][0]}
    for suffix, gpt in models.items():
        window = 5 if suffix == "_sliding" else None
        plans = {
            h: planner(CachedDecoder(gpt, window), replace(base, horizon=h, window=window), device) for h in horizons
        }
        times: dict[int, list[float]] = {h: [] for h in horizons}
        for _ in range(1 if options.quick else repeats // 2):
            for horizon, plan in plans.items():
                times[horizon] += seconds_of(plan, 1)
        cost = {h: float(np.median(values)) for h, values in times.items()}
        metrics |= {f"cached_ms_horizon_{horizon}{suffix}": 1000 * cost[horizon] for horizon in horizons}
        metrics[f"cost_per_step_20_over_5{suffix}"] = cost[20] / 20 / (cost[5] / 5)
        metrics[f"cost_per_token_20_over_5{suffix}"] = cost[20] / num_planned(20) / (cost[5] / num_planned(5))
        if len(horizons) > 2:
            metrics[f"distance_from_line{suffix}"] = distance_from_line(cost)
        shown = ", ".join(f"{h}: {1000 * cost[h] / h:.1f} ({1000 * cost[h] / num_planned(h):.2f})" for h in horizons)
        print(f"ms per planned transition (token) by horizon{suffix or ', nothing slides'}: {shown}")
    if options.out is not None:
        write_result(
            options.out,
            name="plan_latency",
            command="python " + shlex.join(sys.argv),
            device=device,
            seeds=[0, 1, 7],
            seconds=time.perf_counter() - started,
            metrics=metrics,
            details={"settings": {"layout": "11 + 3 + 2", "beam_width": 32, "expansion": 2, "context": 4, "float": 32}},
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
