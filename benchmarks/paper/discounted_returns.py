"""Returns of the policies in the medium-expert datasets, with and without a discount.

    python benchmarks/paper/discounted_returns.py --policies DIR [--episodes 100] [--out results/baselines/X.json]

The baselines that learn values discount rewards by 0.99 per step: about the next hundred steps count. These numbers say
whether that is enough to tell the expert from the medium policy. Metrics are means over episodes with standard errors:
`<env>_<medium or expert>_return`, `_discounted_return` and `_steps`.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.paper.locomotion_data import ENVIRONMENTS, parts_of
from trajectory_transformer.collect import collect
from trajectory_transformer.recipes import find_recipe
from trajectory_transformer.results import summarize, write_result

SEED = 8_500_000  # of the episodes
DISCOUNT = 0.99


def discounted(rewards: np.ndarray, discount: float) -> float:
    """Sum of rewards, each multiplied by the discount for every step before it."""
    return float(np.sum(rewards * discount ** np.arange(len(rewards))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the policies and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files")
    parser.add_argument("--envs", nargs="+", default=list(ENVIRONMENTS))
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/baselines/discounted_returns.json"))
    options = parser.parse_args(arguments)
    metrics: dict[str, float] = {}
    started = time.monotonic()
    for env in options.envs:
        for part in parts_of(f"{env}-medium-expert"):
            recipe = yaml.safe_load(find_recipe(part).read_text(encoding="utf-8"))
            (policy,) = (each["policy"] for each in recipe["parts"])
            played = collect(
                recipe["env"],
                policy,
                episodes=options.episodes,
                seed=SEED,
                workers=options.workers,
                policies=options.policies,
            )
            name = part.replace("-", "_")
            metrics |= summarize(f"{name}_return", [episode.total_reward for episode in played])
            values = [discounted(np.asarray(episode.rewards), DISCOUNT) for episode in played]
            metrics |= summarize(f"{name}_discounted_return", values)
            metrics |= summarize(f"{name}_steps", [len(episode) for episode in played])
            print(f"{policy}: return {metrics[f'{name}_return']:.0f}, discounted {np.mean(values):.1f}", flush=True)
    write_result(
        options.out,
        name="discounted returns",
        command="python " + shlex.join(sys.argv),
        device=torch.device("cpu"),
        seeds=[SEED + index for index in range(options.episodes)],
        seconds=time.monotonic() - started,
        metrics=metrics,
        details={"settings": {"discount": DISCOUNT}},
    )


if __name__ == "__main__":
    main()
