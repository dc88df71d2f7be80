"""The locomotion datasets of the paper, collected by their recipes, and what the policies in them score.

    python benchmarks/paper/locomotion_data.py --policies DIR --out DIR [TASK ...]

Writes DIR/<task>.npz, and DIR/<task>.json with the mean score of the data, of each policy in it, and of the best
policy: its episodes in the data, with its noise, and new ones without. Files that exist are kept. The episodes of a
medium-expert set are those of the medium and the expert set, so they are not collected again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from trajectory_transformer.cli import main as tt
from trajectory_transformer.collect import collect
from trajectory_transformer.data.episode import Dataset, Metadata, load_npz, save_npz
from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.files import write_atomically
from trajectory_transformer.recipes import read_recipe
from trajectory_transformer.results import summarize

T = TypeVar("T")
ENVIRONMENTS = ("hopper", "walker2d", "halfcheetah")
TASKS = tuple(f"{env}-{kind}" for env in ENVIRONMENTS for kind in ("medium-replay", "medium", "medium-expert"))
POLICY_SEED = 8_000_000  # of the episodes without noise; the data has seed 0


def parts_of(task: str) -> list[str]:
    """Datasets that a dataset consists of."""
    env, _, kind = task.partition("-")
    return [f"{env}-medium", f"{env}-expert"] if kind == "medium-expert" else [task]


def make_dataset(task: str, folder: Path, policies: Path | None, *, scale: float = 1.0) -> Path:
    """Collect a dataset if it is missing; `scale` is the share of the recipe's steps."""
    path = folder / f"{task}.npz"
    if path.exists():
        return path
    parts = parts_of(task)
    if len(parts) > 1:
        save_npz(joined([load_npz(make_dataset(part, folder, policies, scale=scale)) for part in parts]), path)
        return path
    if policies is None:
        raise SystemExit(f"{path} does not exist; give --policies to collect it")
    words = ["collect", "--recipe", task, "--policies", policies, "--seed", "0", "--out", path]
    words += [] if scale == 1 else ["--steps", round(read_recipe(task, policies).steps * scale)]
    if tt([str(word) for word in words]):
        raise SystemExit(2)
    return path


def joined(datasets: Sequence[Dataset]) -> Dataset:
    """The episodes of datasets of one policy each, one after the other, as a recipe of all of them gives them."""
    metadata = dict(datasets[0].metadata)
    metadata["policy"] = ", ".join(str(dataset.metadata["policy"]) for dataset in datasets)
    for number, dataset in enumerate(datasets):
        for name, value in dataset.metadata.items():
            if name.startswith("policy.0."):
                metadata[name.replace(".0.", f".{number}.", 1)] = value
    episodes = tuple(episode for dataset in datasets for episode in dataset)
    return replace(datasets[0], episodes=episodes, metadata=metadata)


def by_policy(values: Sequence[T], metadata: Metadata) -> dict[str, Sequence[T]]:
    """The values per episode of each policy of a collected dataset."""
    found: dict[str, Sequence[T]] = {}
    first = 0
    while f"policy.{len(found)}.policy" in metadata:
        number = len(found)
        last = first + int(metadata[f"policy.{number}.episodes"] or 0)
        found[str(metadata[f"policy.{number}.policy"])] = values[first:last]
        first = last
    return found


def make_facts(task: str, folder: Path, policies: Path, *, episodes: int, workers: int) -> Path:
    """Measure what is compared with: the data itself, and the best policy in it."""
    path = folder / f"{task}.json"
    if path.exists():
        return path
    dataset = load_npz(folder / f"{task}.npz")
    env = str(dataset.metadata["env"])
    references = references_of(env)
    assert references is not None, "benchmark tasks have reference scores"

    def scores(returns: Sequence[float]) -> list[float]:
        return [normalized_score(value, references) for value in returns]

    returns = [episode.total_reward for episode in dataset]
    recorded = by_policy(returns, dataset.metadata)
    best = max(recorded, key=lambda policy: float(np.mean(recorded[policy])))
    quiet = collect(
        env, f"{best.split()[0]} det", episodes=episodes, seed=POLICY_SEED, workers=workers, policies=policies
    )
    played = {"noisy": recorded[best], "noiseless": [episode.total_reward for episode in quiet]}
    facts = {
        "env": env,
        "data": summarize("score", scores(returns)),
        "policies": {policy: float(np.mean(scores(values))) for policy, values in recorded.items()},
        "best_policy": best,
        **{f"best_policy_{kind}": summarize("score", scores(values)) for kind, values in played.items()},
        **{f"best_policy_{kind}_return": float(np.mean(values)) for kind, values in played.items()},
    }
    write_atomically(path, (json.dumps(facts, indent=2) + "\n").encode())
    return path


def data_parser(description: str | None, tasks: Sequence[str]) -> argparse.ArgumentParser:
    """The flags of a script that collects datasets."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(tasks), help=f"default: {', '.join(tasks)}")
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, for a trial")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect what is missing."""
    parser = data_parser(__doc__, TASKS)
    parser.add_argument("--episodes", type=int, default=100, help="of the best policy without noise; 0: collect only")
    parser.add_argument("--workers", type=int, default=1, help="processes that play them")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        make_dataset(task, options.out, options.policies, scale=options.scale)
    for task in options.tasks if options.episodes else ():
        make_facts(task, options.out, options.policies, episodes=options.episodes, workers=options.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
