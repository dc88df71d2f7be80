"""Routes in a maze (data, IQL, planning by Q) and the candidates of one plan, coloured by their value.

    python benchmarks/antmaze_figure.py --data antmaze-large-play.npz --iql IQL.npz --tt_q TTQ.npz --trace PLANS.npz

IQL.npz and TTQ.npz are the episodes that `tt evaluate` writes beside its result, PLANS.npz is what its `--trace`
writes. Candidates are those of the plan made in environment 0 at `--step`. With the most likely states all of them
walk along the same line, because a bin is wider than a step. To see what Q chooses from, write PLANS.npz with sampled
states and without a selection on the way:

    --search.horizon 15 --search.replan_every 15 --search.beam_width 128 --search.expansion 1
    --search.action.middle 0.9 --search.observation.top_k null --search.observation.nucleus 0.6
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from trajectory_transformer.data.episode import Dataset, Episode, load_npz
from trajectory_transformer.envs.ant_maze import AntMaze
from trajectory_transformer.report.plots import save_figure

COLORS = {True: "tab:green", False: "tab:red"}  # of routes that reach the goal or not

Array = npt.NDArray[np.float64]


def draw_maze(axes: Axes, maze: AntMaze) -> None:
    """Walls in grey, and the goal as a star."""
    rows, columns = (max(cell[axis] for cell in maze.free) + 2 for axis in (0, 1))
    width = maze.cell_width
    for row in range(rows):
        for column in range(columns):
            if (row, column) not in maze.free:
                x, y = maze.center((row, column))
                axes.add_patch(Rectangle((x - width / 2, y - width / 2), width, width, color="0.8", linewidth=0))
    axes.plot(*maze.goal, marker="*", markersize=13, color="gold", markeredgecolor="black", linestyle="none", zorder=4)
    (left, bottom), (right, top) = maze.center((rows - 1, 0)), maze.center((0, columns - 1))
    axes.set(xlim=(left - width / 2, right + width / 2), ylim=(bottom - width / 2, top + width / 2))
    axes.set(aspect="equal", xticks=[], yticks=[])


def draw_routes(axes: Axes, episodes: Sequence[Episode], colors: Sequence[str], alpha: float) -> None:
    """Where the ant was in every episode, with its starts."""
    routes = [np.asarray(episode.observations[:, :2], np.float64) for episode in episodes]
    axes.add_collection(LineCollection(routes, colors=list(colors), linewidths=0.9, alpha=alpha))
    starts = np.array([route[0] for route in routes])
    axes.plot(*starts.T, marker=".", markersize=4, color="black", linestyle="none", zorder=3)


def candidates_of(trace: Path, step: int) -> tuple[Array, Array]:
    """Positions [K, H, 2] of the candidates of a plan, the current one first, and their values [K]."""
    with np.load(trace, allow_pickle=False) as stored:
        found = np.flatnonzero((stored["env"] == 0) & (stored["step"] == step))
        if not len(found):
            last = stored["step"][stored["env"] == 0].max(initial=-1)
            raise SystemExit(f"{trace}: no plan of environment 0 at step {step}; its last plan is at step {last}")
        plan = found[0]
        states, values, now = stored["states"][plan], stored["scores"][plan], stored["state"][plan]
    known = np.isfinite(values)
    first = np.repeat(now[None, None, :2], known.sum(), axis=0)
    return np.concatenate([first, states[known, :, :2]], axis=1), values[known]


def draw_candidates(figure: Figure, axes: Axes, paths: Array, values: Array) -> None:
    """Candidates coloured by value, the best one last, in a square around all of them."""
    order = np.argsort(values)
    lines = LineCollection(list(paths[order]), array=values[order], cmap="viridis", linewidths=1.5)
    axes.add_collection(lines)
    axes.plot(*paths[order[-1]].T, color="crimson", linewidth=2.0)
    axes.plot(*paths[0, 0], "o", markersize=6, color="white", markeredgecolor="black", zorder=3)
    low, high = paths.min(axis=(0, 1)), paths.max(axis=(0, 1))
    (x, y), around = (low + high) / 2, max(0.6 * float((high - low).max()), 0.2)
    axes.set(xlim=(x - around, x + around), ylim=(y - around, y + around))
    beside = axes.inset_axes((1.03, 0.0, 0.04, 1.0))
    figure.colorbar(lines, cax=beside, label="value of the plan")


def draw(data: Dataset, played: dict[str, Dataset], paths: Array, values: Array, *, routes: int) -> Figure:
    """Four panels: routes of the data, of two methods, and candidates."""
    maze = AntMaze(str(data.metadata["env"]))
    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for panel in panels:
        draw_maze(panel, maze)
    chosen = [data.episodes[index] for index in np.linspace(0, len(data) - 1, min(routes, len(data))).astype(int)]
    draw_routes(panels[0], chosen, ["tab:blue"] * len(chosen), 0.4)
    panels[0].set_title(f"data: {len(chosen)} of {len(data):,} episodes")
    for panel, (name, dataset) in zip(panels[1:3], played.items(), strict=True):
        draw_routes(panel, dataset.episodes, [COLORS[episode.terminated] for episode in dataset], 0.5)
        reached = sum(episode.terminated for episode in dataset)
        panel.set_title(f"{name}: {reached} of {len(dataset)} reach the goal")
    draw_candidates(figure, panels[3], paths, values)
    panels[3].set_title(f"TT + Q: {len(paths)} candidates, {paths.shape[1] - 1} steps ahead")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the dataset")
    parser.add_argument("--iql", type=Path, required=True, help="episodes of IQL")
    parser.add_argument("--tt_q", type=Path, required=True, help="episodes of planning by Q")
    parser.add_argument("--trace", type=Path, required=True, help="plans of planning by Q")
    parser.add_argument("--step", type=int, default=50, help="whose candidates are drawn")
    parser.add_argument("--routes", type=int, default=60, help="episodes of the data to draw")
    parser.add_argument("--out", type=Path, default=Path("docs/images/antmaze.png"))
    options = parser.parse_args(arguments)
    for path in (options.data, options.iql, options.tt_q, options.trace):
        if not path.is_file():
            parser.error(f"{path} does not exist")
    played = {"IQL": load_npz(options.iql), "TT + Q": load_npz(options.tt_q)}
    paths, values = candidates_of(options.trace, options.step)
    save_figure(draw(load_npz(options.data), played, paths, values, routes=options.routes), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
