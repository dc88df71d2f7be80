"""How far AntMaze episodes lead towards the goal, which tells methods apart where few of them reach it.

    python benchmarks/antmaze_progress.py EPISODES.npz [EPISODES.npz ...] [--out results/antmaze/progress.json]

EPISODES.npz is what `tt evaluate --out` writes beside its result. For each file, named by its folder and itself,
`<name>_progress` is the mean distance gained towards the goal, in cells along the shortest path, between the first and
the last position. `<name>_reached` is the percentage of episodes that end at the goal, `<name>_flipped` that of those
that end with the ant on its back. Episodes that begin or end inside of a wall have no progress.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.antmaze_data import is_flipped
from benchmarks.antmaze_q import path_lengths
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.envs.ant_maze import AntMaze
from trajectory_transformer.results import summarize, with_error, write_result


def measure(name: str, dataset: Dataset) -> dict[str, float]:
    """Metrics of the episodes of one file."""
    maze = AntMaze(str(dataset.metadata["env"]), **json.loads(str(dataset.metadata.get("env_options", "{}"))))
    ends = [path_lengths(maze, episode.observations[[0, -1], :2]) for episode in dataset]
    progress = [float(before - after) for before, after in ends if np.isfinite(before - after)]
    require(len(progress) > 0, f"{name} must have episodes that begin and end outside of walls", "none")
    found = summarize(f"{name}_progress", progress)
    found |= summarize(f"{name}_reached", [100.0 * episode.terminated for episode in dataset])
    return found | summarize(f"{name}_flipped", [100.0 * is_flipped(episode) for episode in dataset])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="episodes, written by tt evaluate")
    parser.add_argument("--out", type=Path, default=Path("results/antmaze/progress.json"), help="result file")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    metrics: dict[str, float] = {}
    for path in options.files:
        name = "_".join(part for part in (path.parent.name, path.stem) if part)
        own = measure(name, load_npz(path))
        metrics |= own
        print(
            f"{name}: {with_error(own, f'{name}_progress')} cells, "
            f"{own[f'{name}_reached']:.0f} % reached the goal, {own[f'{name}_flipped']:.0f} % on their backs",
            flush=True,
        )
    write_result(
        options.out,
        name="antmaze progress",
        command="python " + shlex.join(sys.argv),
        device=torch.device("cpu"),
        seeds=[],
        seconds=time.monotonic() - began,
        metrics=metrics,
    )
    print(f"wrote {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
