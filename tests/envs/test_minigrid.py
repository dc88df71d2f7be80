"""MiniGrid on maps: observations, shortest paths against breadth-first search, held-out maps."""

import sys
from collections import deque

import numpy as np
import pytest
from minigrid.minigrid_env import MiniGridEnv

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.collect import Job, episode_stream, play_episodes
from trajectory_transformer.envs import MULTI_ROOM_ID, make_env
from trajectory_transformer.envs.minigrid import DOOR, WALL, GoalOnMap
from trajectory_transformer.rollout import make_envs, map_shape, space_dims

AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]
LEFT, RIGHT, FORWARD, TOGGLE = 0, 1, 2, 5


def make(env_id: str = MULTI_ROOM_ID, **options: int) -> GoalOnMap:
    env = make_env(env_id, **options)
    assert isinstance(env, GoalOnMap)
    return env


def grid_of(env: GoalOnMap) -> MiniGridEnv:
    grid = env.unwrapped
    assert isinstance(grid, MiniGridEnv)
    return grid


def fewest_actions(env: GoalOnMap) -> int:
    """Length of a shortest path to the goal by breadth-first search over position, direction and open doors."""
    grid = grid_of(env)
    cells = {(x, y): grid.grid.get(x, y) for x in range(grid.width) for y in range(grid.height)}
    kinds = {cell: "floor" if found is None else found.type for cell, found in cells.items()}
    opened = frozenset(cell for cell, found in cells.items() if found is not None and getattr(found, "is_open", False))
    start = (int(grid.agent_pos[0]), int(grid.agent_pos[1]), int(grid.agent_dir), opened)
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        (x, y, facing, doors), cost = queue.popleft()
        if kinds[x, y] == "goal":
            return cost
        ahead = (x + AHEAD[facing][0], y + AHEAD[facing][1])
        following = [(x, y, (facing + 3) % 4, doors), (x, y, (facing + 1) % 4, doors)]
        if kinds[ahead] != "wall" and (kinds[ahead] != "door" or ahead in doors):
            following.append((*ahead, facing, doors))
        if kinds[ahead] == "door":
            following.append((x, y, facing, doors ^ {ahead}))
        for state in following:
            if state not in seen:
                seen.add(state)
                queue.append((state, cost + 1))
    raise AssertionError("no path")


def test_state_goal_and_map_are_read_from_the_environment() -> None:
    env = make()
    seen, info = env.reset(seed=3)
    grid = grid_of(env)
    assert env.observation_space.contains(seen)
    assert seen["observation"].tolist() == [*grid.agent_pos, grid.agent_dir]
    assert info["success"] is False
    walls, doors = seen["map"][WALL], seen["map"][DOOR]
    for x in range(25):
        for y in range(25):
            cell = grid.grid.get(x, y)
            kind = "floor" if cell is None else cell.type
            assert (walls[y, x], doors[y, x]) == (kind == "wall", kind == "door")
            assert (kind == "goal") == ([x, y] == seen["desired_goal"].tolist())


def test_the_map_shows_neither_agent_nor_goal_nor_open_doors() -> None:
    env = make()
    seen, _ = env.reset(seed=4)
    first = seen["map"].copy()
    (x, y), (agent_x, agent_y, _) = seen["desired_goal"], seen["observation"]
    assert not first[:, y, x].any() and not first[:, agent_y, agent_x].any()
    ended = False
    while not ended:
        seen, _, ended, _, info = env.step(env.expert_action())
        np.testing.assert_array_equal(seen["map"], first)
    assert info["success"] is True
    assert sum(grid_of(env).grid.get(x, y).is_open for y, x in np.argwhere(first[DOOR])) == 5  # type: ignore[union-attr]


def test_sizes_are_known_before_the_first_reset() -> None:
    envs = make_envs(MULTI_ROOM_ID, 2)
    assert space_dims(envs) == (3, 2, 1)
    assert map_shape(envs) == (2, 25, 25)
    assert map_shape(make_envs("tt/FourRooms-v0", 1)) == ()
    envs.close()


@pytest.mark.parametrize(
    ("env_id", "doors", "limit"),
    [(MULTI_ROOM_ID, 5, 120), ("MiniGrid-MultiRoom-N4-S5-v1", 3, 80), ("MiniGrid-MultiRoom-N6-v0", 5, 120)],
)
def test_rooms_and_step_limit_are_those_of_the_environment(env_id: str, doors: int, limit: int) -> None:
    env = make(env_id)
    seen, _ = env.reset(seed=0)
    assert seen["map"][DOOR].sum() == doors
    for step in range(1, limit + 1):
        _, _, terminated, truncated, info = env.step(LEFT)
        assert not terminated and truncated == (step == limit)
    assert info["success"] is False


@pytest.mark.parametrize(
    "env_id", [MULTI_ROOM_ID, "MiniGrid-MultiRoom-N2-S4-v0", "MiniGrid-SimpleCrossingS9N2-v0", "MiniGrid-FourRooms-v0"]
)
def test_the_expert_takes_a_shortest_path_from_any_state(env_id: str) -> None:
    env = make(env_id)
    rng = np.random.default_rng(0)
    for seed in range(6):
        env.reset(seed=seed)
        for _ in range(int(rng.integers(0, 25))):  # this may leave doors open
            _, _, over, _, _ = env.step(int(rng.choice([env.expert_action(), LEFT, RIGHT, FORWARD, TOGGLE])))
            if over:
                env.reset(seed=seed)
        left = fewest_actions(env)
        for _ in range(left):
            _, _, over, _, info = env.step(env.expert_action())
        assert over and info["success"], f"seed {seed}: goal not reached after {left} actions"


def test_path_ratio_of_a_shortest_path_is_one() -> None:
    env = make()
    env.reset(seed=1)
    over = False
    while not over:
        _, _, over, _, info = env.step(env.expert_action())
    assert info["path_ratio"] == 1.0


def test_collected_episodes_have_their_map_and_follow_the_expert() -> None:
    job = Job(MULTI_ROOM_ID, parse_actor("expert"), seed=0)
    batch = play_episodes(job, range(3))
    env = make()
    for episode, seed in zip(batch.episodes, batch.seeds, strict=True):
        seen, _ = env.reset(seed=seed)
        assert episode.map is not None and episode.goal is not None
        np.testing.assert_array_equal(episode.map, seen["map"])
        np.testing.assert_array_equal(episode.goal, seen["desired_goal"])
        for action, observation in zip(episode.actions[:, 0], episode.observations[1:], strict=True):
            assert int(action) == env.expert_action()
            seen, *_ = env.step(int(action))
            np.testing.assert_array_equal(observation, seen["observation"])
        assert episode.terminated and episode.observations[-1, :2].tolist() == episode.goal.tolist()


HELD_OUT = range(1_000_000, 1_000_500)  # the seeds of `tt evaluate --episodes 500`


def training_maps(actor: str, count: int) -> set[bytes]:
    """Maps of the episodes that `tt collect --seed 0` plays with a policy, as bytes."""
    env, job = make(), Job(MULTI_ROOM_ID, parse_actor(actor), seed=0)
    return {env.reset(seed=episode_stream(job, index)[0])[0]["map"].tobytes() for index in range(count)}


def overlap(counts: dict[str, int]) -> tuple[int, int]:
    env = make()
    held_out = {env.reset(seed=seed)[0]["map"].tobytes() for seed in HELD_OUT}
    trained = set[bytes]().union(*(training_maps(actor, count) for actor, count in counts.items()))
    return len(held_out & trained), len(trained)


def test_no_held_out_map_occurs_in_training() -> None:
    shared, trained = overlap({"expert": 900, "expert eps=0.2": 900, "random": 200})
    assert shared == 0
    assert trained > 1990, "few maps repeat"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_held_out_map_occurs_in_the_full_training_data() -> None:
    shared, trained = overlap({"expert": 27_000, "expert eps=0.2": 27_000, "random": 6_000})
    assert shared == 0
    assert trained > 59_000


def test_maps_with_other_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="a map may contain only walls, unlocked doors and one goal, got a"):
        make("MiniGrid-DoorKey-5x5-v0").reset(seed=0)


def test_a_missing_package_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid.core.actions", None)
    monkeypatch.delitem(sys.modules, "trajectory_transformer.envs.minigrid")
    with pytest.raises(ImportError, match=r"pip install \'trajectory-transformer\[minigrid\]\'"):
        make_env(MULTI_ROOM_ID)


def test_a_start_and_a_goal_can_be_chosen_among_the_cells_of_the_rooms() -> None:
    env = make_env("MiniGrid-MultiRoom-N4-S5-v0")
    observation, _ = env.reset(seed=3)
    rooms = observation["map"]
    free = [(6, 18), (12, 20), (20, 14)]
    chosen, _ = env.reset(seed=3, options={"start": free[1], "goal": free[2]})
    assert chosen["observation"][:2].tolist() == [12, 20] and chosen["desired_goal"].tolist() == [20, 14]
    np.testing.assert_array_equal(chosen["map"], rooms)
    assert isinstance(env, GoalOnMap)
    steps, over = 0, False
    while not over:
        _, _, over, _, info = env.step(env.expert_action())
        steps += 1
    assert info["success"] and info["path_ratio"] == 1.0
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(again["observation"], observation["observation"])


@pytest.mark.parametrize("cell", [(0, 0), (4, 18), (7, 19), (10, 24), (-1, 3), (100, 3)])
def test_a_goal_outside_the_rooms_is_refused(cell: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="goal must be a free cell of a room"):
        make_env("MiniGrid-MultiRoom-N4-S5-v0").reset(seed=3, options={"goal": cell})


def test_start_and_goal_must_differ() -> None:
    with pytest.raises(ValueError, match="must be different cells"):
        make_env("MiniGrid-MultiRoom-N4-S5-v0").reset(seed=3, options={"start": (6, 18), "goal": (6, 18)})
