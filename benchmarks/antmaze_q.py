"""How well Q functions tell the way to the goal from other ways, by the distance to the goal and the steps ahead.

    python benchmarks/antmaze_q.py RUN [RUN ...] --dataset data/antmaze-large-diverse.npz [--horizons 1 5 10 20]

A search compares candidates by Q some steps ahead. Here parts of recorded episodes take the place of candidates: of
two that begin about equally far from the goal, one that leads towards it and one that leads away, Q should rise more in
the first. The share of such pairs for which it does is 0.5 by chance, and 1 is best. RUN is a folder of `tt baseline`;
the distance is that of the shortest path, in cells. With `--discretizer`, Q reads the last state and action from their
bins, as it does in a search.

At the goal Q should fall with the distance on all sides, else plans pass the goal: `<run>_at_goal` is the rank
correlation between Q and nearness over places in the goal's cell, in the mean over recorded states that are moved
there. 1 is best; places at the goal do not count. Writes <out>.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from trajectory_transformer import Baseline
from trajectory_transformer.config import TokenConfig, require
from trajectory_transformer.data.episode import Dataset, DoubleArray, FloatArray, load_npz
from trajectory_transformer.envs.ant_maze import GOAL_RADIUS, AntMaze
from trajectory_transformer.results import summarize, write_result
from trajectory_transformer.search.objectives import QFunction
from trajectory_transformer.tokens.tokenizer import Tokenizer

MIN_PROGRESS = 0.05  # cells; parts of episodes that hardly move are left out
AROUND = 0.3  # how far from the goal places lie, per axis, as a share of a cell's width: away from walls
STATES_AT_GOAL = 300  # that are moved to all places


@dataclass(frozen=True)
class Parts:
    """N parts of episodes: first and last state and action, and the distance to the goal at both, in cells."""

    first: tuple[FloatArray, FloatArray]  # states [N, O], actions [N, A]
    last: tuple[FloatArray, FloatArray]
    before: DoubleArray  # [N]
    after: DoubleArray


def path_lengths(maze: AntMaze, places: FloatArray) -> DoubleArray:
    """Cells from places [N, 2] to the goal, by way of the centres of the cells in between; NaN inside of walls."""
    distances = maze.distances_to(maze.goal_cell)
    found = np.full(len(places), np.nan)
    for row, (x, y) in enumerate(places.tolist()):
        cell = maze.cell_at(x, y)
        if cell in distances:
            near = [each for each in maze.neighbours(cell) if distances[each] < distances[cell]]
            heading = min(near, key=lambda each: distances[each], default=cell)
            found[row] = distances[heading] + np.hypot(*np.subtract((x, y), maze.center(heading))) / maze.cell_width
    return found


def draw_parts(dataset: Dataset, maze: AntMaze, horizon: int, count: int, seed: int) -> Parts:
    """Parts of `horizon` steps at random places of random episodes that are long enough."""
    rng = np.random.default_rng(seed)
    episodes = [episode for episode in dataset if len(episode) > horizon]
    require(len(episodes) > 0, f"the dataset must have episodes of more than {horizon} steps", "none")
    chosen = [episodes[index] for index in rng.integers(len(episodes), size=count)]
    steps = [int(rng.integers(len(episode) - horizon)) for episode in chosen]
    ends = []
    for ahead in (0, horizon):
        pairs = [(e.observations[step + ahead], e.actions[step + ahead]) for e, step in zip(chosen, steps, strict=True)]
        ends.append((np.stack([state for state, _ in pairs]), np.stack([action for _, action in pairs])))
    before, after = (path_lengths(maze, states[:, :2]) for states, _ in ends)
    return Parts(ends[0], ends[1], before, after)


def from_bins(tokenizer: Tokenizer, states: FloatArray, actions: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The values of the bins that states [N, O] and actions [N, A] lie in."""
    layout, bins = tokenizer.layout, tokenizer.discretizer
    pairs = ((states, layout.observation), (actions, layout.action))
    read = [bins.decode(bins.encode(values, dims), dims).astype(np.float32) for values, dims in pairs]
    return read[0], read[1]


def ranked_right(rise: DoubleArray, parts: Parts, near: float, far: float) -> float:
    """Share of pairs in which Q rises more towards the goal, for parts that begin in [near, far) cells from it."""
    progress = parts.before - parts.after
    here = (parts.before >= near) & (parts.before < far)
    towards, away = rise[here & (progress > MIN_PROGRESS)], rise[here & (progress < -MIN_PROGRESS)]
    if not (len(towards) and len(away)):
        return float("nan")
    below = np.searchsorted(np.sort(away), towards)
    return float(below.sum() / (len(towards) * len(away)))


def ranked_at_goal(q: QFunction, dataset: Dataset, maze: AntMaze, seed: int) -> list[float]:
    """Rank correlation between Q and nearness to the goal over places around it, for recorded states moved there.

    The states are random ones from the goal's cell, with the actions that followed them.
    """
    here = [
        (state, action)
        for episode in dataset
        for state, action in zip(episode.observations, episode.actions, strict=False)
        if maze.cell_at(*state[:2].tolist()) == maze.goal_cell
    ]
    require(len(here) > 0, "the dataset must have states in the cell of the goal", "none")
    chosen = np.random.default_rng(seed).choice(len(here), min(STATES_AT_GOAL, len(here)), replace=False)
    steps = np.linspace(-AROUND, AROUND, 11) * maze.cell_width
    offsets = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    offsets = offsets[np.hypot(*offsets.T) > GOAL_RADIUS]
    found = []
    for index in chosen:
        state, action = here[index]
        states, actions = (np.repeat(each[None], len(offsets), axis=0) for each in (state, action))
        states[:, :2] = offsets + maze.goal
        values = q(torch.from_numpy(states), torch.from_numpy(actions)).numpy()
        found.append(rank_correlation(values, -np.hypot(*offsets.T)))
    return found


def rank_correlation(one: FloatArray, other: FloatArray) -> float:
    """Spearman's correlation; equal values share their mean rank."""
    ranks = []
    for values in (one, other):
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[group])
    return 0.0 if min(np.ptp(each) for each in ranks) == 0 else float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of tt baseline")
    parser.add_argument("--dataset", type=Path, required=True, help="an AntMaze dataset")
    parser.add_argument("--horizons", nargs="+", type=int, default=[1, 5, 10, 20], help="steps ahead")
    parser.add_argument("--bounds", nargs="+", type=float, default=[0, 3, 6, 9, 12, 16], help="distances, in cells")
    parser.add_argument("--parts", type=int, default=20_000, help="parts of episodes")
    parser.add_argument("--discretizer", choices=("quantile", "uniform"), help="of the bins; default: exact values")
    parser.add_argument("--num_bins", type=int, default=100, help="bins of each dimension")
    parser.add_argument("--training_seed", type=int, default=None, help="of each run; default: its first")
    parser.add_argument("--out", type=Path, default=Path("results/antmaze/q.json"), help="result file")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    dataset = load_npz(options.dataset)
    maze = AntMaze(str(dataset.metadata["env"]))
    ranges = list(zip(options.bounds[:-1], options.bounds[1:], strict=True))
    functions = {
        run.name: Baseline.load(run, torch.device("cpu")).q_function(options.training_seed) for run in options.runs
    }
    tokenizer = None
    if options.discretizer:
        config = TokenConfig(discretizer=options.discretizer, num_bins=options.num_bins)
        tokenizer = Tokenizer.fit(dataset, config)
    metrics: dict[str, float] = {}
    for horizon in options.horizons:
        parts = draw_parts(dataset, maze, horizon, options.parts, seed=0)
        read = parts.last if tokenizer is None else from_bins(tokenizer, *parts.last)
        for name, q in functions.items():
            first, last = (q(*map(torch.from_numpy, each)).numpy().astype(np.float64) for each in (parts.first, read))
            found = {
                f"{name}_{horizon}_{low:g}-{high:g}": ranked_right(last - first, parts, low, high)
                for low, high in ranges
            }
            print(f"{name}, {horizon} steps: " + " ".join(f"{value:.3f}" for value in found.values()), flush=True)
            metrics |= {key: value for key, value in found.items() if not np.isnan(value)}
    for name, q in functions.items():
        metrics |= summarize(f"{name}_at_goal", ranked_at_goal(q, dataset, maze, seed=0))
        print(f"{name}, at the goal: {metrics[f'{name}_at_goal']:.2f}", flush=True)
    write_result(
        options.out,
        name="antmaze q",
        command="python " + shlex.join(sys.argv),
        device=torch.device("cpu"),
        seeds=[0],
        seconds=time.monotonic() - began,
        metrics=metrics,
        details={
            "horizons": options.horizons,
            "bounds": options.bounds,
            "parts": options.parts,
            "discretizer": options.discretizer,
            "num_bins": options.num_bins if options.discretizer else None,
        },
    )
    print(f"wrote {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
