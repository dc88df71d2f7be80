"""AntMaze: the task, and the walker that collects its data."""

import math
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

pytest.importorskip("gymnasium_robotics", reason="needs pip install 'trajectory-transformer[mazes]'")

from tests.envs.walker import write_walker
from trajectory_transformer.actors import make_script, parse_actor
from trajectory_transformer.collect import Part, WorkerPool, play_parts
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.envs import make_env
from trajectory_transformer.envs.ant_maze import PLAY, TASKS, AntMaze
from trajectory_transformer.envs.ant_walker import AntWalker, Wanderer
from trajectory_transformer.rollout import make_envs, space_dims

SIGNS = np.array([[1, 1], [1, -1], [1, -1], [1, 1]])  # of hip and ankle of each leg


def maze(name: str = "UMaze", **options: Any) -> AntMaze:
    made = make_env(f"AntMaze_{name}-v5", **options)
    assert isinstance(made, AntMaze)
    return made


@pytest.fixture
def walker(tmp_path: Path) -> Path:
    return write_walker(tmp_path / "walker.safetensors")


def test_the_ant_moves_as_in_gymnasium_robotics() -> None:
    ours = maze("Medium")
    options = {"continuing_task": False, "include_cfrc_ext_in_observation": False, "disable_env_checker": True}
    theirs: Any = gymnasium.make("AntMaze_Medium-v5", **options).unwrapped
    first, _ = ours.reset(seed=4)
    theirs.reset(seed=0)
    assert isinstance(first, np.ndarray) and first.shape == (29,)
    theirs.ant_env.set_state(ours._data.qpos.copy(), ours._data.qvel.copy())
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-1, 1, 8).astype(np.float32)
        observation, reward, terminated, truncated, info = ours.step(action)
        expected, *_ = theirs.step(action)
        whole = np.concatenate([expected["achieved_goal"], expected["observation"]])
        assert isinstance(observation, np.ndarray)
        np.testing.assert_allclose(observation, whole, atol=1e-6)
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
    assert ours.center((3, 2)) == pytest.approx(theirs.maze.cell_rowcol_to_xy(np.array([3, 2])))
    assert ours.cell_at(*ours.center((3, 2))) == (3, 2)


def test_an_episode_ends_at_the_goal_with_a_reward_of_one() -> None:
    env = maze()
    env.reset(seed=0)
    assert env.goal == (-4.0, -4.0)  # the centre of row 3, column 1
    env._data.qpos[:2] = np.add(env.goal, 0.3)  # within 0.45
    _, reward, terminated, truncated, info = env.step(np.zeros(8, np.float32))
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    env.reset(seed=0)
    env._data.qpos[:2] = np.add(env.goal, 0.35)  # 0.49 away
    assert env.step(np.zeros(8, np.float32))[1:3] == (0.0, False)


def test_an_episode_that_goes_on_at_the_goal_ends_at_its_limit() -> None:
    env = maze(continuing=True, max_episode_steps=2)
    env.reset(seed=0)
    env._data.qpos[:2] = np.add(env.goal, 0.2)
    for truncated in (False, True):
        assert env.step(np.zeros(8, np.float32))[1:] == (1.0, False, truncated, {"success": True})


def test_an_episode_is_truncated_at_its_limit() -> None:
    env = maze(max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step(np.zeros(8, np.float32))[3] for _ in range(3)] == [False, False, True]
    assert [maze(name).max_episode_steps for name in ("UMaze", "Medium", "Large")] == [700, 1000, 1000]


def test_distances_are_those_of_shortest_paths() -> None:
    assert maze().distances_to((3, 1)) == {(3, 1): 0, (3, 2): 1, (3, 3): 2, (2, 3): 3, (1, 3): 4, (1, 2): 5, (1, 1): 6}
    assert maze().neighbours((3, 3)) == [(2, 3), (3, 2)]
    assert [maze(name).distances_to(TASKS[f"AntMaze_{name}-v5"][1])[1, 1] for name in ("Medium", "Large")] == [10, 14]


def test_tasks_start_and_end_in_the_cells_of_d4rl_and_other_cells_can_be_given() -> None:
    for name in ("UMaze", "Medium", "Large"):
        env = maze(name)
        assert (env.starts, env.targets) == ([TASKS[f"AntMaze_{name}-v5"][0]], [TASKS[f"AntMaze_{name}-v5"][1]])
        offsets = [np.abs(start_of(env, seed) - env.center(env.start_cell)).max() for seed in range(50)]
        assert 0.8 < max(offsets) <= 1.0
    env = maze(goal_cell=[1, 3], start_cell=[3, 3])
    assert env.goal == env.center((1, 3)) and env.cell_at(*start_of(env, 0)) == (3, 3)


def start_of(env: AntMaze, seed: int) -> FloatArray:
    observation, _ = env.reset(seed=seed)
    assert isinstance(observation, np.ndarray)
    return observation[:2]


@pytest.mark.parametrize("name", ["Medium", "Large"])
def test_collected_episodes_start_in_chosen_or_random_cells_but_not_at_the_goal(name: str) -> None:
    play, free = maze(name, cells="play"), maze(name, cells="random")
    assert play.goal_cell not in play.starts and free.goal_cell not in free.starts
    assert {play.cell_at(*start_of(play, seed)) for seed in range(150)} == set(play.starts)
    assert {*play.starts, play.goal_cell} == set(play.targets) == set(PLAY[f"AntMaze_{name}-v5"])
    assert {free.cell_at(*start_of(free, seed)) for seed in range(400)} == set(free.starts)
    assert {*free.starts, free.goal_cell} == set(free.free)


def test_the_goal_can_be_shown() -> None:
    envs = make_envs("AntMaze_UMaze-v5", 1, {"observe_goal": True})
    assert space_dims(envs) == (29, 2, 8)
    observation, _ = envs.reset(seed=0)
    assert observation["desired_goal"].tolist() == [[-4.0, -4.0]]
    assert space_dims(make_envs("AntMaze_UMaze-v5", 1)) == (29, 0, 8)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("UMaze", {"goal_cell": [2, 1]}, r"goal_cell must be \[row, column\] of a free cell, got \[2, 1\]"),
        ("UMaze", {"start_cell": [9, 9, 9]}, r"start_cell must be \[row, column\] of a free cell"),
        ("UMaze", {"start_cell": [3, 1]}, r"start_cell and goal_cell must differ, got \(3, 1\) for both"),
        ("UMaze", {"cells": "all"}, "cells must be one of task, play, random, got 'all'"),
        ("Open", {}, r"AntMaze_Open-v5: D4RL has no task for it, so give goal_cell as \[row, column\]"),
        (
            "Open",
            {"goal_cell": [1, 1], "start_cell": [3, 5], "cells": "play"},
            "no cells chosen by hand; use cells ran",
        ),
        ("UMazeDense", {}, "AntMaze_UMazeDense-v5: .* choose an id without Dense"),
    ],
)
def test_tasks_that_do_not_exist_are_refused(name: str, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        maze(name, **options)


def turned(state: NDArray[np.floating], about: str) -> NDArray[np.floating]:
    """The state after a quarter turn of the world about its origin, or of the body with its legs renamed."""
    x, y, _, w, i, j, k = state[:7]
    half = np.sqrt(0.5)
    made = state.copy()
    if about == "world":
        made[:2] = -y, x
        made[3:7] = half * np.array([w - k, i - j, j + i, k + w])  # a turn from the left
        made[15:17] = -state[16], state[15]
        return made
    made[3:7] = half * np.array([w - k, i + j, j - i, k + w])  # a turn from the right
    made[18:20] = state[19], -state[18]
    for part in (slice(7, 15), slice(21, 29)):
        legs = state[part].reshape(4, 2) * SIGNS
        made[part] = (np.roll(legs, -1, axis=0) * SIGNS).ravel()
    return made


def test_the_walker_acts_the_same_in_every_quarter(walker: Path) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        state = rng.normal(size=29)
        state[3:7] = [1.0, 0.05, -0.1, rng.normal()]
        state[3:7] /= np.linalg.norm(state[3:7])
        target = rng.normal(size=2) * 3
        action = AntWalker(walker).act(state, (target[0], target[1]), 0.0, rng)
        world = AntWalker(walker).act(turned(state, "world"), (-target[1], target[0]), 0.0, rng)
        np.testing.assert_allclose(world, action, atol=1e-4)


def test_the_walker_does_not_tell_its_legs_apart(walker: Path) -> None:
    rng = np.random.default_rng(2)
    state = rng.normal(size=29)
    state[3:7] = [1.0, 0.05, -0.1, 0.0]
    state[3:7] /= np.linalg.norm(state[3:7])
    ahead = (state[0] + 3.0, state[1] + 0.5)
    action = AntWalker(walker).act(state, ahead, 0.0, rng)
    renamed = AntWalker(walker).act(turned(state, "body"), ahead, 0.0, rng)
    motors = [1, 2, 3, 0]  # of legs 1 to 4
    legs, new = (values.reshape(4, 2)[motors] * SIGNS for values in (action, renamed))
    np.testing.assert_allclose(new, np.roll(legs, -1, axis=0), atol=1e-4)
    assert np.abs(new - legs).max() > 0.1


def test_noise_is_added_before_clipping(walker: Path) -> None:
    state = np.zeros(29)
    state[3] = 1.0
    rng = np.random.default_rng(0)
    quiet = AntWalker(walker).act(state, (3.0, 0.0), 0.0, rng)
    noisy = np.array([AntWalker(walker).act(state, (3.0, 0.0), 0.1, rng) for _ in range(300)])
    inside = np.abs(quiet) < 0.6
    assert inside.any() and noisy.min() >= -1 and noisy.max() <= 1
    np.testing.assert_allclose(noisy.mean(axis=0)[inside], quiet[inside], atol=0.03)
    np.testing.assert_allclose(noisy.std(axis=0)[inside], 0.1, rtol=0.2)


def test_the_walker_of_the_recipes_follows_the_shortest_path_to_the_goal(ant_policies: Path) -> None:
    env, rng = maze(), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(ant_policies / "antgoal.safetensors"), noise=0.1, wander=0.0)
    observation, _ = env.reset(seed=0)
    visited, over = [env.start_cell], False
    while not over:
        assert isinstance(observation, np.ndarray)
        cell = env.cell_at(*observation[:2])
        visited += [cell] if cell != visited[-1] else []
        observation, _, terminated, truncated, _ = env.step(policy.act(observation, np.zeros(0), rng))
        over = terminated or truncated
    assert terminated and env.steps < 600
    assert visited == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]


def test_waypoints_lie_all_around_the_centres_of_cells_and_change_in_the_cell_of_the_goal(walker: Path) -> None:
    env, rng = maze(), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0)
    policy._next = (2, 3)
    offsets = np.array([policy._draw_waypoint(rng) for _ in range(500)]) - env.center((2, 3))
    assert np.abs(offsets).max() <= 0.125 * env.cell_width and (np.abs(offsets.mean(axis=0)) < 0.08).all()
    np.testing.assert_allclose(offsets.std(axis=0), 0.125 * env.cell_width / np.sqrt(3), rtol=0.1)
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, np.ndarray)
    policy.act(observation, np.zeros(0), rng)
    env.steps = 5
    seen = set()
    for _ in range(20):  # as often as the ant reaches the waypoint in the cell of the goal
        policy._next = env.goal_cell
        observation[:2] = policy._waypoint = policy._draw_waypoint(rng)
        policy.act(observation, np.zeros(0), rng)
        assert policy._next == env.goal_cell
        seen.add(policy._waypoint)
    assert len(seen) == 20


def test_where_episodes_go_on_a_way_to_the_goal_ends_at_the_goal_and_another_begins(walker: Path) -> None:
    env, rng = maze("Medium", cells="play", continuing=True), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0)
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, np.ndarray)
    policy.act(observation, np.zeros(0), rng)
    env.steps = 5
    policy._target = policy._next = env.goal_cell
    assert policy._draw_waypoint(rng) == env.goal
    policy._waypoint = env.goal
    observation[:2] = env.goal[0] + 0.6, env.goal[1]  # near a waypoint, but not at the goal
    policy.act(observation, np.zeros(0), rng)
    assert policy._target == env.goal_cell and policy._waypoint == env.goal
    observation[:2] = env.goal
    left = set()
    for _ in range(20):
        policy._target, policy._waypoint = env.goal_cell, env.goal
        policy.act(observation, np.zeros(0), rng)
        left.add(policy._target)
    assert len(left) > 2
    # A way to another cell leads through the cell of the goal, not through the goal.
    policy._target, policy._next = (1, 1), env.goal_cell
    assert policy._draw_waypoint(rng) != env.goal


def test_a_quarter_of_the_journeys_lead_to_the_goal_and_the_others_to_all_targets(walker: Path) -> None:
    env, rng = maze("Medium", cells="play"), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0)
    drawn = [policy._draw_target((1, 1), rng) for _ in range(3000)]
    others = [cell for cell in env.targets if cell != (1, 1)]
    shares = {cell: drawn.count(cell) / len(drawn) for cell in others}
    expected = {cell: 0.75 / len(others) + 0.25 * (cell == env.goal_cell) for cell in others}
    assert len(others) == 6 and sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx(expected, abs=0.03)


def test_wrong_turns_are_as_frequent_as_asked(walker: Path) -> None:
    env, rng = maze("Large", cells="random"), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.5)
    policy._target = (7, 9)
    distances = env.distances_to((7, 9))
    crossing = (3, 4)  # three free neighbours, one of them on the shortest path
    towards = [distances[policy._turn(crossing, rng)] < distances[crossing] for _ in range(600)]
    assert len(env.neighbours(crossing)) == 3
    assert np.mean(towards) == pytest.approx(0.5 + 0.5 / 3, abs=0.06)


def test_an_ant_strays_to_points_nearby_and_goes_on(walker: Path) -> None:
    env, rng = maze("Large", cells="random"), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0, stray=0.05)
    x, y = env.center((1, 1))
    place = (x - 1.0, y + 1.0)  # one metre from the outer walls
    policy._waypoint = env.center((7, 9))
    headings = [policy._heading(place, rng) for _ in range(20_000)]
    aside = [heading for heading in headings if heading != policy._waypoint]
    points = np.array(sorted(set(aside)))
    assert len(points) > 100 and all(env.cell_at(*point) in env.free for point in points.tolist())
    offsets = np.abs(points - place)
    assert 1.8 < offsets.max() <= 2.0 and np.hypot(*offsets.T).min() >= 0.45  # farther than where it stops straying
    # It goes to one point for 20 steps at most, fewer if it arrives, then on to the waypoint.
    longest = max(sum(1 for _ in same) for heading, same in groupby(headings) if heading != policy._waypoint)
    assert longest == 20
    begun = len(aside) / 20
    assert begun / (len(headings) - len(aside)) == pytest.approx(0.05 * free_share(env, place), rel=0.15)
    policy._steps_aside, policy._aside = 5, (place[0] + 0.4, place[1])
    assert policy._heading(place, rng) == policy._waypoint and policy._steps_aside == 0


def free_share(env: AntMaze, place: tuple[float, float]) -> float:
    """The share of points up to 2 m from a place, per axis, that are free and not reached already."""
    points = np.random.default_rng(1).uniform(-2, 2, (4000, 2)) + place
    free = [env.cell_at(*point) in env.free and math.dist(point, place) >= 0.45 for point in points.tolist()]
    return float(np.mean(free))


def test_an_ant_that_does_not_stray_draws_the_same_numbers_as_before(walker: Path) -> None:
    env, rng = maze("Large", cells="random"), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0)
    assert policy._heading((0.0, 0.0), rng) == policy._waypoint
    assert rng.random() == np.random.default_rng(0).random()


def test_an_episode_does_not_begin_with_where_the_last_one_strayed(walker: Path) -> None:
    env, rng = maze("Large", cells="random"), np.random.default_rng(0)
    policy = Wanderer(env, AntWalker(walker), noise=0.0, wander=0.0, stray=1e-9)
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, np.ndarray)
    policy._aside, policy._steps_aside = (observation[0] + 1.0, observation[1]), 5
    policy.act(observation, np.zeros(0), rng)
    assert policy._steps_aside == 0


def test_walkers_are_refused_in_other_environments_and_broken_files_named(walker: Path) -> None:
    leaf = action_leaf(gymnasium.make("Pendulum-v1").action_space)
    with pytest.raises(ValueError, match=r"walker\.safetensors: an ant that walks through mazes, got environment Pen"):
        make_script(parse_actor(str(walker)), "Pendulum-v1", leaf, 3)
    save_file({"obs.mean": np.zeros(3), "obs.var": np.zeros(3), "actor.0.weight": np.zeros((8, 3))}, walker)
    with pytest.raises(ValueError, match=r"walker\.safetensors: not a complete walker file \('actor\.0\.bias'\)"):
        AntWalker(walker)
    tensors = {"obs.mean": np.zeros(3), "obs.var": np.zeros(3), "actor.0.weight": np.zeros((8, 3))}
    save_file(tensors | {"actor.0.bias": np.zeros(8)}, walker)
    with pytest.raises(ValueError, match=r"a walker must have 37 inputs and 8 outputs, got \(3, 3, 8\)"):
        AntWalker(walker)


def test_labels_and_so_the_episodes_differ_between_noises(walker: Path) -> None:
    options = ("", " noise=0.3", " wander=0.5 noise=0.1", " stray=0.02")
    labels = [parse_actor(f"{walker}{words}").label for words in options]
    assert labels == ["walker det", "walker det noise=0.3", "walker det wander=0.5", "walker det stray=0.02"]


def test_datasets_do_not_depend_on_the_number_of_processes(walker: Path) -> None:
    parts = [Part(parse_actor(f"{walker} noise=0.3 wander=0.5"), steps=130)]
    found = []
    for workers in (1, 2):
        with WorkerPool(workers) as pool:
            options = {"max_episode_steps": 25}
            played = play_parts(
                "AntMaze_Medium-v5", parts, seed=0, pool=pool, env_options=options, collect_options={"cells": "play"}
            )
            found.append([each.episode for each in played])
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first.observations, second.observations)
        np.testing.assert_array_equal(first.actions, second.actions)
    assert len({maze("Medium").cell_at(*episode.observations[0, :2]) for episode in found[0]}) > 1


def test_environments_leave_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = maze()
    made.reset(seed=0)
    made.step(np.zeros(8, np.float32))
    assert not list(tmp_path.iterdir())
