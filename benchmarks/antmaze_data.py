"""The AntMaze datasets, collected by their recipes, and what the behaviour in them achieves.

    python benchmarks/antmaze_data.py --policies DIR --out DIR [TASK ...]

Writes DIR/antmaze-<task>.npz, and DIR/<task>.json with the share of runs that reach the goal of the task
(`success_rate`), of those that begin at the start of the task and reach it (`whole_task_rate`: without stitching, only
these can be imitated), and of those that end with the ant on its back (`flipped_rate`). A run is all that happens
between two resets: one episode, or several where it goes on at the goal. `arrivals` is how often the goal was reached
from outside. Files that exist are kept.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.paper.locomotion_data import by_policy, data_parser, make_dataset
from trajectory_transformer.data.episode import Episode, load_npz
from trajectory_transformer.envs.ant_maze import AntMaze
from trajectory_transformer.files import write_atomically
from trajectory_transformer.results import summarize

TASKS = ("umaze", "medium-play", "medium-diverse", "large-play", "large-diverse")


def is_flipped(episode: Episode) -> bool:
    """Whether the ant's vertical axis points down in the last state."""
    x, y = episode.observations[-1, 4:6]
    return bool(1 - 2 * (x * x + y * y) < 0)


def runs_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by run: one that begins where the last one ended belongs to the same run."""
    found: list[list[Episode]] = []
    for episode in episodes:
        if found and np.array_equal(found[-1][-1].observations[-1], episode.observations[0]):
            found[-1].append(episode)
        else:
            found.append([episode])
    return found


def is_reached(run: Sequence[Episode]) -> bool:
    """Whether a run comes to the goal."""
    return any(episode.terminated for episode in run)


def make_facts(task: str, folder: Path) -> Path:
    """Measure a dataset."""
    path = folder / f"{task}.json"
    if path.exists():
        return path
    dataset = load_npz(folder / f"antmaze-{task}.npz")
    maze = AntMaze(str(dataset.metadata["env"]))
    runs = runs_of(dataset.episodes)
    starts = [maze.cell_at(*map(float, run[0].observations[0, :2])) == maze.start_cell for run in runs]
    reached = [is_reached(run) for run in runs]
    facts: dict[str, object] = {"env": dataset.metadata["env"], "steps": dataset.num_steps, "runs": len(runs)}
    facts["arrivals"] = sum(episode.terminated and len(episode) > 1 for episode in dataset)
    facts |= summarize("success_rate", [float(each) for each in reached])
    facts |= summarize("whole_task_rate", [float(a and b) for a, b in zip(starts, reached, strict=True)])
    facts |= summarize("flipped_rate", [float(is_flipped(run[-1])) for run in runs])
    facts["success_rate_by_policy"] = {
        policy: float(np.mean([is_reached(run) for run in runs_of(episodes)]))
        for policy, episodes in by_policy(dataset.episodes, dataset.metadata).items()
    }
    write_atomically(path, (json.dumps(facts, indent=2) + "\n").encode())
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect what is missing."""
    options = data_parser(__doc__, TASKS).parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        make_dataset(f"antmaze-{task}", options.out, options.policies, scale=options.scale)
        print(make_facts(task, options.out).read_text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
