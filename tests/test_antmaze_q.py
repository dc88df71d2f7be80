"""How AntMaze is measured: distances in a maze, parts of episodes, how Q ranks them, and how far episodes lead."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajectory_transformer import train_baseline
from trajectory_transformer.data.episode import Dataset, Episode, save_npz

pytest.importorskip("gymnasium_robotics")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = runpy.run_path(str(BENCHMARKS / "antmaze_q.py"))
PROGRESS = runpy.run_path(str(BENCHMARKS / "antmaze_progress.py"))


@pytest.fixture(scope="module")
def maze() -> Any:
    return SCRIPT["AntMaze"]("AntMaze_UMaze-v5")


def walk(maze: Any, steps: int, rng: np.random.Generator) -> Episode:
    """From the start of the U maze to the goal, with random postures."""
    cells = [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]
    corners = np.array([maze.center(cell) for cell in cells])
    along = np.linspace(0.0, len(cells) - 1.0, steps + 1)
    states = rng.normal(size=(steps + 1, 29))
    for axis in range(2):
        states[:, axis] = np.interp(along, np.arange(len(cells)), corners[:, axis])
    actions = rng.uniform(-1, 1, size=(steps, 8)).astype(np.float32)
    return Episode(states.astype(np.float32), actions, np.zeros(steps, dtype=np.float32), terminated=True)


def test_path_lengths_are_those_of_the_corridor(maze: Any) -> None:
    places = [maze.center(cell) for cell in ((3, 1), (3, 2), (2, 3), (1, 1))]
    beside = maze.center((3, 1))[0] + 0.25 * maze.cell_width, maze.center((3, 1))[1]
    further = maze.center((3, 2))[0] + 0.25 * maze.cell_width, maze.center((3, 2))[1]
    found = SCRIPT["path_lengths"](maze, np.array([*places, beside, further, maze.center((2, 1))]))
    np.testing.assert_allclose(found, [0, 1, 3, 6, 0.25, 1.25, np.nan])


def test_parts_are_taken_from_the_steps_they_are_measured_at(maze: Any) -> None:
    episode = walk(maze, 60, np.random.default_rng(0))  # ten steps to a cell
    parts = SCRIPT["draw_parts"](Dataset((episode,)), maze, 5, 40, 0)
    progress = parts.before - parts.after
    assert progress.min() > 0 and np.median(progress) == pytest.approx(0.5), "corners are cut"
    with pytest.raises(ValueError, match="must have episodes of more than 60 steps"):
        SCRIPT["draw_parts"](Dataset((episode,)), maze, 60, 40, 0)
    for state, action, later, next_action in zip(*parts.first, *parts.last, strict=True):
        step = int(np.flatnonzero((episode.observations == state).all(axis=1))[0])
        np.testing.assert_array_equal(later, episode.observations[step + 5])
        np.testing.assert_array_equal((action, next_action), (episode.actions[step], episode.actions[step + 5]))


def test_bins_are_those_of_each_dimension(maze: Any) -> None:
    episode = walk(maze, 60, np.random.default_rng(0))
    states, actions = episode.observations[:-1], episode.actions
    config = SCRIPT["TokenConfig"](discretizer="uniform", num_bins=8)
    read = SCRIPT["from_bins"](SCRIPT["Tokenizer"].fit(Dataset((episode,)), config), states, actions)
    for exact, binned, everything in zip((states, actions), read, (episode.observations, actions), strict=True):
        error = np.abs(binned - exact) / (np.ptp(everything, axis=0) / 8)  # in bins
        assert binned.dtype == np.float32 and error.max() < 1.001 and (error.max(axis=0) > 0.3).all()
        assert all(len(np.unique(column)) <= 8 for column in binned.T)


def test_the_share_of_pairs_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    before, after, rise = rng.uniform(0, 4, 60), rng.uniform(0, 4, 60), rng.normal(size=60)
    nothing = (np.zeros((60, 1), dtype=np.float32),) * 2
    parts = SCRIPT["Parts"](nothing, nothing, before, after)
    here = (before >= 1) & (before < 3)
    towards, away = np.flatnonzero(here & (before - after > 0.05)), np.flatnonzero(here & (after - before > 0.05))
    expected = np.mean([rise[one] > rise[other] for one in towards for other in away])
    assert SCRIPT["ranked_right"](rise, parts, 1.0, 3.0) == pytest.approx(expected)
    assert SCRIPT["ranked_right"](before - after, parts, 1.0, 3.0) == 1.0
    assert np.isnan(SCRIPT["ranked_right"](rise, parts, 5.0, 6.0))


def test_q_is_ranked_by_the_distance_on_all_sides_of_the_goal(maze: Any) -> None:
    data = Dataset((walk(maze, 60, np.random.default_rng(0)),))
    goal = torch.tensor(maze.goal)
    asked = []

    def near(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        asked.append((states, actions))
        return -torch.hypot(states[:, 0] - goal[0], states[:, 1] - goal[1])

    def along_x(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return states[:, 0]

    assert SCRIPT["ranked_at_goal"](near, data, maze, 0) == pytest.approx([1.0] * len(asked), abs=0.01)
    offsets = asked[0][0][:, :2] - goal
    assert offsets.abs().max() == pytest.approx(1.2) and offsets.norm(dim=1).min() > 0.45
    states = {(tuple(state.tolist()), tuple(action.tolist())) for state, action in ((s[0, 2:], a[0]) for s, a in asked)}
    steps = data.episodes[0]
    known = {
        (tuple(s[2:].tolist()), tuple(a.tolist())) for s, a in zip(steps.observations, steps.actions, strict=False)
    }
    assert len(states) == len(asked) and states <= known
    assert np.mean(SCRIPT["ranked_at_goal"](along_x, data, maze, 0)) == pytest.approx(0.0, abs=0.05)
    assert SCRIPT["rank_correlation"](np.zeros(4), np.arange(4.0)) == 0.0
    assert SCRIPT["rank_correlation"](np.array([1.0, 1, 2, 3]), np.arange(4.0)) == pytest.approx(4.5 / 22.5**0.5)


def test_runs_are_measured_at_every_horizon(tmp_path: Path, maze: Any) -> None:
    rng = np.random.default_rng(0)
    there = [walk(maze, 60, rng) for _ in range(3)]
    back = [Episode(e.observations[::-1].copy(), e.actions, e.rewards, terminated=False) for e in there]
    dataset = Dataset((*there, *back), {"env": "AntMaze_UMaze-v5"})
    save_npz(dataset, tmp_path / "data.npz")
    settings = {"steps": 3, "hidden": [4, 4], "batch_size": 8}
    train_baseline(dataset, algorithm="iql-antmaze", settings=settings, seeds=(0,), out=tmp_path / "iql", device="cpu")
    words = [tmp_path / "iql", "--dataset", tmp_path / "data.npz", "--horizons", 2, 6, "--bounds", 0, 2, 6]
    assert SCRIPT["main"]([str(word) for word in (*words, "--parts", 300, "--out", tmp_path / "q.json")]) == 0
    metrics = json.loads((tmp_path / "q.json").read_text())["metrics"]
    at_goal = {"iql_at_goal", "iql_at_goal_stderr", "iql_at_goal_n"}
    assert set(metrics) == {f"iql_{horizon}_{cells}" for horizon in (2, 6) for cells in ("0-2", "2-6")} | at_goal
    coarse = (*words, "--parts", 300, "--discretizer", "quantile", "--num_bins", 2, "--out", tmp_path / "coarse.json")
    assert SCRIPT["main"]([str(word) for word in coarse]) == 0
    stored = json.loads((tmp_path / "coarse.json").read_text())
    assert stored["discretizer"] == "quantile" and stored["num_bins"] == 2
    assert set(stored["metrics"]) == set(metrics) and stored["metrics"] != metrics
    assert all(0.0 <= value <= 1.0 for name, value in metrics.items() if name not in at_goal)


def test_progress_is_the_way_towards_the_goal(tmp_path: Path, maze: Any, capsys: pytest.CaptureFixture[str]) -> None:
    there = walk(maze, 60, np.random.default_rng(0))
    there.observations[:, 4:6] = 0.0
    half = Episode(there.observations[:31], there.actions[:30], np.zeros(30, dtype=np.float32), terminated=False)
    half.observations[-1, 4] = 1.0  # on its back
    walled = Episode(half.observations[:3].copy(), half.actions[:2], np.zeros(2, dtype=np.float32), terminated=False)
    walled.observations[-1, :2] = maze.center((2, 1))
    dataset = Dataset((there, half, walled), {"env": "AntMaze_UMaze-v5"})
    nearer = Dataset(dataset.episodes, {**dataset.metadata, "env_options": '{"goal_cell": [3, 3]}'})
    for name, each in (("far", dataset), ("near", nearer)):
        (tmp_path / name).mkdir()
        save_npz(each, tmp_path / name / "tt.npz")
    files = [str(tmp_path / name / "tt.npz") for name in ("far", "near")]
    assert PROGRESS["main"]([*files, "--out", str(tmp_path / "progress.json")]) == 0
    metrics = json.loads((tmp_path / "progress.json").read_text())["metrics"]
    assert metrics["far_tt_progress"] == pytest.approx((6 + 3) / 2) and metrics["far_tt_progress_n"] == 2
    assert metrics["near_tt_progress"] == pytest.approx((2 + 3) / 2), "two cells past the goal, and a cell from it"
    assert metrics["far_tt_reached"] == pytest.approx(100 / 3) and metrics["far_tt_reached_n"] == 3
    assert metrics["far_tt_flipped"] == pytest.approx(100 / 3)
    assert "far_tt: 4.5 ± 1.5 cells, 33 % reached the goal, 33 % on their backs" in capsys.readouterr().out
    lost = Dataset((walled,), dataset.metadata)
    with pytest.raises(ValueError, match="lost must have episodes that begin and end outside of walls"):
        PROGRESS["measure"]("lost", lost)
