"""Compare plans in bfloat16 and float32: a trained model, prompts from recorded episodes, the same noise.

    python benchmarks/precision.py RUN EPISODES.npz [--prompts 1000] [--out results/precision/plans.json]

EPISODES can be the file that `tt evaluate` writes beside its result. For every search (`beam_WIDTH_horizon_HORIZON`),
`same_first_action_*` is the share of plans whose first actions are equal in all tokens. `other_noise_*` is that share
for two float32 searches with different noise, as a reference. `action_gap_*` is the mean distance of first actions in
standard deviations of the recorded actions, for both.
"""

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trajectory_transformer.config import PRESETS, SearchConfig
from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.results import write_result

TokenArray = npt.NDArray[np.int64]
BATCH = 16  # prompts planned for at once


def draw_prompts(model: TrajectoryModel, dataset: Dataset, context: int, count: int) -> TokenArray:
    """Prompts of `context` transitions and a state [count, L], from random steps of the episodes."""
    layout, rng = model.layout, np.random.default_rng(0)
    rows = [model.tokenizer.encode(episode) for episode in dataset]
    places = [
        (index, start) for index, episode in enumerate(dataset) for start in range(max(0, len(episode) - context))
    ]
    if not places:
        raise SystemExit(f"no episode has the {context + 1} steps that a prompt needs")
    length = context * layout.size + layout.observation_dim
    chosen = rng.choice(len(places), count, replace=len(places) < count)
    return np.stack([rows[index][start:].ravel()[:length] for index, start in (places[place] for place in chosen)])


def first_actions(model: TrajectoryModel, prompts: TokenArray, config: SearchConfig, *, seed: int) -> TokenArray:
    """First action tokens of the best plan of each prompt [count, A]."""
    planner = Planner(model, kind="return", search=config)
    found = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        plan = planner.plan(batch, seed + np.arange(start, start + len(batch)))
        found.append(plan.best[:, : model.layout.action_dim].cpu().numpy())
    return np.concatenate(found)


def compare(
    model: TrajectoryModel, one: TokenArray, other: TokenArray, spread: npt.NDArray[np.floating]
) -> tuple[float, float]:
    """Share of equal actions, and their mean distance in units of `spread` [A]."""
    gap = np.abs(model.tokenizer.decode_action(one) - model.tokenizer.decode_action(other))
    return float((one == other).all(axis=1).mean()), float((gap / spread).mean())


def main() -> None:
    """Plan, compare and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("episodes", type=Path)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--context", type=int, default=5)
    parser.add_argument("--searches", default="32:5,128:15", help="WIDTH:HORIZON, ...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    model = TrajectoryModel.load(options.run, device)
    dataset = load_npz(options.episodes)
    prompts = draw_prompts(model, dataset, options.context, options.prompts)
    spread = np.concatenate([episode.actions for episode in dataset]).std(axis=0)
    metrics: dict[str, float] = {"prompts": float(len(prompts))}
    for search in options.searches.split(","):
        width, horizon = (int(number) for number in search.split(":"))
        plan = replace(PRESETS["reference"].search, context=options.context, window=None)
        cpu = device.type == "cpu"
        plan = replace(plan, beam_width=width, horizon=horizon, backend="cached" if cpu else "fused-float32")
        exact = first_actions(model, prompts, plan, seed=0)
        rounded = first_actions(model, prompts, replace(plan, backend="cached" if cpu else "fused"), seed=0)
        redrawn = first_actions(model, prompts, plan, seed=10**6)
        name = f"beam_{width}_horizon_{horizon}"
        metrics[f"same_first_action_{name}"], metrics[f"action_gap_{name}"] = compare(model, exact, rounded, spread)
        metrics[f"other_noise_{name}"], metrics[f"action_gap_other_noise_{name}"] = compare(
            model, exact, redrawn, spread
        )
    for name, value in metrics.items():
        print(f"{name:50} {value:10.4f}")
    if options.out is not None:
        write_result(
            options.out,
            name="precision",
            command="python " + shlex.join(sys.argv),
            device=device,
            seeds=[0],
            seconds=time.perf_counter() - started,
            metrics=metrics,
            details={"settings": {"context": options.context, "searches": options.searches}},
        )
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
