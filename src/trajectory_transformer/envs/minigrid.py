"""MiniGrid as a task of goals on maps: tokens for where the agent is, a map of each episode, and an expert.

The agent's state is its cell and direction, the goal a cell. The map is an array of the whole episode: where walls are
and where doors, all of which are closed at the start. Which of them stand open later is not shown: whoever acts knows
what they did.
"""

import heapq
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

try:
    from minigrid.core.actions import Actions
    from minigrid.core.constants import DIR_TO_VEC
    from minigrid.minigrid_env import MiniGridEnv
except ImportError as error:
    raise ImportError("MiniGrid environments need: pip install 'trajectory-transformer[minigrid]'") from error

WALL, DOOR = 0, 1
"""Planes of a map."""

Observation = dict[str, NDArray[Any]]
Cell = tuple[int, int]
State = tuple[int, int, int]
"""Cell x, y and direction: 0 right, 1 down, 2 left, 3 up."""

_AHEAD: list[Cell] = [(int(x), int(y)) for x, y in DIR_TO_VEC]


class GoalOnMap(gymnasium.Wrapper[Observation, int, Any, int]):
    """Shows x, y and direction, the goal's x and y, and the map [2, height, width]: walls and doors as 0 and 1."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap one of MiniGrid's environments that has a goal to step on."""
        super().__init__(env)
        grid = env.unwrapped
        if not isinstance(grid, MiniGridEnv):
            raise ValueError(f"GoalOnMap needs one of MiniGrid's environments, got {grid}")
        self._grid = grid
        # The agent's own view is most of the cost of a step, and nobody looks at it here.
        grid.gen_obs = dict  # type: ignore[method-assign]
        cells = [grid.width, grid.height]
        self.observation_space = spaces.Dict(  # type: ignore[assignment]  # declared as a space of dicts of arrays
            {
                "observation": spaces.MultiDiscrete([*cells, 4]),
                "desired_goal": spaces.MultiDiscrete(cells),
                "map": spaces.Box(0, 1, (2, grid.height, grid.width), np.uint8),
            }
        )
        self._goal = np.zeros(2, np.int64)
        self._map = np.zeros((2, grid.height, grid.width), np.uint8)
        self._doors: list[Cell] = []
        self._ways: dict[tuple[bool, ...], tuple[list[list[int]], dict[State, int]]] = {}  # by which doors are open
        self._shortest = 0  # actions of the shortest way from the start

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode on a new map."""
        self.env.reset(seed=seed, options=None if options is None else dict(options))
        self._goal, self._map = read_map(self._grid)
        self._doors = [(x, y) for y, x in np.argwhere(self._map[DOOR]).tolist()]
        self._ways.clear()
        self._shortest = self._ways_now()[1].get(self._state(), 0)
        return self._view(), {"success": False, "path_ratio": 0.0}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Act; the episode ends on the goal, or at the environment's own step limit."""
        _, reward, terminated, truncated, _ = self.env.step(action)
        success = bool(terminated) and tuple(self._grid.agent_pos) == tuple(self._goal)
        info = {"success": success, "path_ratio": self._grid.step_count / max(self._shortest, 1)}
        return self._view(), float(reward), bool(terminated), bool(truncated), info

    def expert_action(self) -> int:
        """The first action of a shortest way to the goal: straight on if one leads there, then left, then right."""
        state = self._state()
        costs, ways = self._ways_now()
        if state not in ways:
            raise ValueError(f"no way leads from {state} to the goal at {self._goal.tolist()}")
        x, y, facing = state
        ahead = (x + _AHEAD[facing][0], y + _AHEAD[facing][1])
        cost = costs[ahead[1]][ahead[0]]
        if cost and ways[*ahead, facing] == ways[state] - cost:
            return int(Actions.forward if cost == 1 else Actions.toggle)
        return int(Actions.left if ways[x, y, (facing + 3) % 4] < ways[state] else Actions.right)

    def _ways_now(self) -> tuple[list[list[int]], dict[State, int]]:
        """What it costs to enter each cell, and how far each state is from the goal: both change only with a door."""
        doors = tuple(_is_open(self._grid, door) for door in self._doors)
        if doors not in self._ways:
            costs = entry_costs(self._grid, self._map)
            self._ways[doors] = costs, ways_to((int(self._goal[0]), int(self._goal[1])), costs)
        return self._ways[doors]

    def _state(self) -> State:
        x, y = self._grid.agent_pos
        return int(x), int(y), int(self._grid.agent_dir)

    def _view(self) -> Observation:
        return {"observation": np.array(self._state()), "desired_goal": self._goal, "map": self._map}


def read_map(grid: MiniGridEnv) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The goal's cell [2] and the map [2, height, width] of an environment, without agent and goal."""
    goals = []
    planes = np.zeros((2, grid.height, grid.width), dtype=np.uint8)
    for x in range(grid.width):
        for y in range(grid.height):
            cell = grid.grid.get(x, y)
            if cell is None:
                continue
            if cell.type == "goal":
                goals.append((x, y))
            elif cell.type == "wall":
                planes[WALL, y, x] = 1
            elif cell.type == "door" and not getattr(cell, "is_locked", False):
                planes[DOOR, y, x] = 1
            else:
                raise ValueError(f"maps are made of walls, unlocked doors and one goal, this one has a {cell.type}")
    if len(goals) != 1:
        raise ValueError(f"maps are made of walls, unlocked doors and one goal, this one has {len(goals)} goals")
    return np.array(goals[0], dtype=np.int64), planes


def entry_costs(grid: MiniGridEnv, planes: NDArray[np.uint8]) -> list[list[int]]:
    """Actions it takes to step into each cell [height][width] from one beside it: 2 with a closed door; 0: no way."""
    costs = 1 - planes[WALL].astype(int)
    for y, x in np.argwhere(planes[DOOR]).tolist():
        costs[y, x] = 1 if _is_open(grid, (x, y)) else 2
    rows: list[list[int]] = costs.tolist()
    return rows


def _is_open(grid: MiniGridEnv, door: Cell) -> bool:
    cell = grid.grid.get(*door)
    return cell is not None and cell.can_overlap()


def ways_to(goal: Cell, costs: list[list[int]]) -> dict[State, int]:
    """Actions that each state is away from a cell, doors as they stand: turns, steps, and a toggle at a closed door.

    Doors need no place in a state: a shortest way passes each at most once, so one that is closed now costs one toggle.
    """
    ways: dict[State, int] = {}
    queue: list[tuple[int, State]] = [(0, (*goal, facing)) for facing in range(4)]
    while queue:
        so_far, state = heapq.heappop(queue)
        if state in ways:
            continue
        ways[state] = so_far
        x, y, facing = state
        if (x, y) != goal:  # an episode ends there, so nobody turns on it
            for earlier in ((x, y, (facing + 1) % 4), (x, y, (facing + 3) % 4)):
                if earlier not in ways:
                    heapq.heappush(queue, (so_far + 1, earlier))
        dx, dy = _AHEAD[facing]
        if costs[y - dy][x - dx] and (x - dx, y - dy, facing) not in ways:
            heapq.heappush(queue, (so_far + costs[y][x], (x - dx, y - dy, facing)))
    return ways
