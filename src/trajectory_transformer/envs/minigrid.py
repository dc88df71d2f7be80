"""MiniGrid as goal-reaching on maps: a wrapper that shows state, goal and map, and an expert.

The state is the agent's cell and direction, the goal is a cell. The map shows walls and doors and does not change
during an episode. All doors are closed at the start. The observation does not show which doors were opened since: a
policy knows that from its own actions.
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
    from minigrid.core.world_object import Goal
    from minigrid.minigrid_env import MiniGridEnv
except ImportError as error:
    raise ImportError("MiniGrid environments need: pip install 'trajectory-transformer[minigrid]'") from error

WALL, DOOR = 0, 1
"""Channels of a map."""

Observation = dict[str, NDArray[Any]]
Cell = tuple[int, int]
State = tuple[int, int, int]
"""Cell x, y and direction: 0 right, 1 down, 2 left, 3 up."""

_AHEAD: list[Cell] = [(int(x), int(y)) for x, y in DIR_TO_VEC]


class GoalOnMap(gymnasium.Wrapper[Observation, int, Any, int]):
    """Shows x, y and direction, the goal's x and y, and the map [2, height, width] of walls and doors (0 or 1)."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap a MiniGrid environment that has one goal cell."""
        super().__init__(env)
        grid = env.unwrapped
        if not isinstance(grid, MiniGridEnv):
            raise ValueError(f"GoalOnMap needs a MiniGrid environment, got {grid}")
        self._grid = grid
        # The agent's view takes most of the time of a step and is not used.
        grid.gen_obs = dict  # type: ignore[method-assign]
        cells = [grid.width, grid.height]
        self.observation_space = spaces.Dict(  # type: ignore[assignment]  # the base class declares a space of dicts of arrays
            {
                "observation": spaces.MultiDiscrete([*cells, 4]),
                "desired_goal": spaces.MultiDiscrete(cells),
                "map": spaces.Box(0, 1, (2, grid.height, grid.width), np.uint8),
            }
        )
        self._goal = np.zeros(2, np.int64)
        self._map = np.zeros((2, grid.height, grid.width), np.uint8)
        self._doors: list[Cell] = []
        self._distances: dict[tuple[bool, ...], tuple[list[list[int]], dict[State, int]]] = {}  # by the open doors
        self._shortest = 0  # number of actions of a shortest path from the start

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode on a new map; options "start" (x, y) and "goal" (x, y) move agent and goal to free cells."""
        placed = {name: cell for name, cell in (options or {}).items() if name in ("start", "goal")}
        others = {name: value for name, value in (options or {}).items() if name not in placed}
        self.env.reset(seed=seed, options=others or None)
        self._place(**placed)
        self._goal, self._map = read_map(self._grid)
        self._doors = [(x, y) for y, x in np.argwhere(self._map[DOOR]).tolist()]
        self._distances.clear()
        self._shortest = self._current_distances()[1].get(self._state(), 0)
        return self._view(), {"success": False, "path_ratio": 0.0}

    def _place(self, start: Cell | None = None, goal: Cell | None = None) -> None:
        """Move the agent and the goal to free cells."""
        grid = self._grid
        old, planes = read_map(grid)
        wanted = {"start": start or tuple(grid.agent_pos), "goal": goal or tuple(old.tolist())}
        rooms = distances_to((int(old[0]), int(old[1])), entry_costs(grid, planes))  # the cells that lead to the goal
        for name, (x, y) in wanted.items():
            if (x, y, 0) not in rooms or planes[DOOR, y, x]:
                raise ValueError(f"{name} must be a free cell of a room, got ({x}, {y})")
        if wanted["start"] == wanted["goal"]:
            raise ValueError(f"start and goal must be different cells, got {wanted['start']} twice")
        if goal is not None:
            grid.grid.set(int(old[0]), int(old[1]), None)
            grid.put_obj(Goal(), *goal)
        if start is not None:
            grid.agent_pos = start

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Act; the episode ends at the goal or at the step limit of the environment."""
        _, reward, terminated, truncated, _ = self.env.step(action)
        success = bool(terminated) and tuple(self._grid.agent_pos) == tuple(self._goal)
        info = {"success": success, "path_ratio": self._grid.step_count / max(self._shortest, 1)}
        return self._view(), float(reward), bool(terminated), bool(truncated), info

    def expert_action(self) -> int:
        """First action of a shortest path to the goal; of several, forward before left before right."""
        state = self._state()
        costs, distances = self._current_distances()
        if state not in distances:
            raise ValueError(f"no path leads from {state} to the goal at {self._goal.tolist()}")
        x, y, facing = state
        ahead = (x + _AHEAD[facing][0], y + _AHEAD[facing][1])
        cost = costs[ahead[1]][ahead[0]]
        if cost and distances[*ahead, facing] == distances[state] - cost:
            return int(Actions.forward if cost == 1 else Actions.toggle)
        return int(Actions.left if distances[x, y, (facing + 3) % 4] < distances[state] else Actions.right)

    def _current_distances(self) -> tuple[list[list[int]], dict[State, int]]:
        """Entry costs of all cells and distances of all states to the goal, cached by which doors are open."""
        doors = tuple(_is_open(self._grid, door) for door in self._doors)
        if doors not in self._distances:
            costs = entry_costs(self._grid, self._map)
            self._distances[doors] = costs, distances_to((int(self._goal[0]), int(self._goal[1])), costs)
        return self._distances[doors]

    def _state(self) -> State:
        x, y = self._grid.agent_pos
        return int(x), int(y), int(self._grid.agent_dir)

    def _view(self) -> Observation:
        return {"observation": np.array(self._state()), "desired_goal": self._goal, "map": self._map}


def read_map(grid: MiniGridEnv) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The goal cell [2] and the map [2, height, width] of an environment, without agent and goal."""
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
                raise ValueError(
                    f"a map may contain only walls, unlocked doors and one goal, got a {cell.type} at ({x}, {y})"
                )
    if len(goals) != 1:
        raise ValueError(f"a map must contain exactly one goal, got {len(goals)}")
    return np.array(goals[0], dtype=np.int64), planes


def entry_costs(grid: MiniGridEnv, planes: NDArray[np.uint8]) -> list[list[int]]:
    """Actions needed to enter each cell [height][width] from its neighbour: 1, 2 for a closed door, 0 for a wall."""
    costs = 1 - planes[WALL].astype(int)
    for y, x in np.argwhere(planes[DOOR]).tolist():
        costs[y, x] = 1 if _is_open(grid, (x, y)) else 2
    rows: list[list[int]] = costs.tolist()
    return rows


def _is_open(grid: MiniGridEnv, door: Cell) -> bool:
    cell = grid.grid.get(*door)
    return cell is not None and cell.can_overlap()


def distances_to(goal: Cell, costs: list[list[int]]) -> dict[State, int]:
    """Number of actions from every state to a cell, by Dijkstra's algorithm: turns, steps, and toggles of closed doors.

    The doors are not part of the state: a shortest path passes each door at most once, so a closed door costs one
    toggle.
    """
    distances: dict[State, int] = {}
    queue: list[tuple[int, State]] = [(0, (*goal, facing)) for facing in range(4)]
    while queue:
        distance, state = heapq.heappop(queue)
        if state in distances:
            continue
        distances[state] = distance
        x, y, facing = state
        if (x, y) != goal:  # an episode ends at the goal, so there are no turns on it
            for earlier in ((x, y, (facing + 1) % 4), (x, y, (facing + 3) % 4)):
                if earlier not in distances:
                    heapq.heappush(queue, (distance + 1, earlier))
        dx, dy = _AHEAD[facing]
        if costs[y - dy][x - dx] and (x - dx, y - dy, facing) not in distances:
            heapq.heappush(queue, (distance + costs[y][x], (x - dx, y - dy, facing)))
    return distances
