"""AntMaze as a task with a fixed goal: an ant in a maze, a reward of 1 at the goal and 0 elsewhere.

The observation [29] is the position x and y, the height and orientation (quaternion), eight joint angles, and the 14
velocities: the whole state of the simulator. The maze and the ant are those of Gymnasium-Robotics. Goal and start are
cells of the maze; the goal is the centre of its cell, the start is drawn around the centre of its cell.
"""

import io
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

try:
    # The package warns and prints about environments that are not used here.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import gymnasium_robotics
        import mujoco
except ImportError as error:
    raise ImportError("AntMaze environments need: pip install 'trajectory-transformer[mazes]'") from error

Cell = tuple[int, int]
"""Row and column of the maze's map; row 0 is at the top, where y is largest."""
Cells = Literal["task", "play", "random"]
Observation = NDArray[np.float32] | dict[str, NDArray[np.float32]]

GOAL_RADIUS = 0.45
"""The goal is reached within this distance, as in Gymnasium-Robotics."""
START_NOISE = 0.25
"""A start is uniform within this share of a cell's width around the centre, per axis, as in Gymnasium-Robotics."""

# Start and goal of D4RL's evaluations.
TASKS: dict[str, tuple[Cell, Cell]] = {
    "AntMaze_UMaze-v5": ((1, 1), (3, 1)),
    "AntMaze_Medium-v5": ((1, 1), (6, 6)),
    "AntMaze_Large-v5": ((1, 1), (7, 9)),
}
# Corners and dead ends that journeys of the `play` data start from and lead to: chosen by hand.
PLAY: dict[str, tuple[Cell, ...]] = {
    "AntMaze_UMaze-v5": ((1, 1), (2, 3), (3, 1)),
    "AntMaze_Medium-v5": ((1, 1), (1, 5), (2, 6), (4, 1), (4, 6), (6, 1), (6, 6)),
    "AntMaze_Large-v5": ((1, 1), (1, 6), (1, 10), (3, 5), (5, 2), (5, 4), (5, 10), (7, 1), (7, 4), (7, 9)),
}


class AntMaze(gymnasium.Env[Any, NDArray[np.float32]]):
    """An ant in a maze; an episode ends at the goal or at the step limit. It reports `success`."""

    def __init__(
        self,
        env_id: str,
        *,
        goal_cell: Sequence[int] | None = None,
        start_cell: Sequence[int] | None = None,
        cells: Cells = "task",
        observe_goal: bool = False,
        continuing: bool = False,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Make the maze of a Gymnasium-Robotics id, for example `AntMaze_Medium-v5`.

        Args:
            env_id: id of an AntMaze environment with sparse rewards.
            goal_cell: row and column of the goal; None: that of D4RL.
            start_cell: row and column of the start; None: that of D4RL.
            cells: where episodes start, and where a collecting policy walks to. `task`: from the start to the goal.
                `play`: cells chosen by hand. `random`: any free cell. The goal that is rewarded stays the same.
            observe_goal: also show x and y of the goal, as `desired_goal`.
            continuing: an episode goes on at the goal, and every step there is rewarded. Collected episodes are cut
                at these steps, so the data is that of tasks which end.
            max_episode_steps: steps after which an episode is truncated; None: 700 in the U maze, 1000 in the others.
            render_mode: as in Gymnasium.
        """
        if "Dense" in env_id:
            raise ValueError(
                f"environment {env_id}: AntMaze has a reward of 1 at the goal here, choose an id without Dense"
            )
        if cells not in get_args(Cells):
            raise ValueError(f"environment {env_id}: cells must be one of {', '.join(get_args(Cells))}, got {cells!r}")
        gymnasium.register_envs(gymnasium_robotics)
        made: Any = gymnasium.make(  # the classes of Gymnasium-Robotics have no types
            env_id,
            disable_env_checker=True,
            continuing_task=False,
            include_cfrc_ext_in_observation=False,
            render_mode=render_mode,
        )
        self._inner = made.unwrapped
        # The simulator has read the maze; Gymnasium-Robotics leaves this temporary file behind.
        Path(self._inner.tmp_xml_file_path).unlink(missing_ok=True)
        self._model, self._data = self._inner.ant_env.model, self._inner.ant_env.data
        self._frame_skip = int(self._inner.ant_env.frame_skip)
        self.metadata = self._inner.metadata
        self.render_mode = render_mode
        self._env_id = env_id
        self.max_episode_steps = int(made.spec.max_episode_steps if max_episode_steps is None else max_episode_steps)
        self.continuing = continuing
        """Whether an episode goes on at the goal."""
        self.steps = 0
        """Steps taken since the last reset."""

        rows = self._inner.maze.maze_map
        self.free: list[Cell] = [
            (row, column) for row, line in enumerate(rows) for column, kind in enumerate(line) if kind != 1
        ]
        self.cell_width = float(self._inner.maze.maze_size_scaling)
        self._left, self._top = -float(self._inner.maze.x_map_center), float(self._inner.maze.y_map_center)
        self._distances: dict[Cell, dict[Cell, int]] = {}
        known_start, known_goal = TASKS.get(env_id, (None, None))
        self.goal_cell = self._read_cell("goal_cell", goal_cell or known_goal)
        self.start_cell = self._read_cell("start_cell", start_cell or known_start)
        if self.start_cell == self.goal_cell:
            raise ValueError(
                f"environment {env_id}: start_cell and goal_cell must differ, got {self.start_cell} for both"
            )
        self.goal = self.center(self.goal_cell)
        self.starts, self.targets = self._choose_cells(cells)
        self._inner.goal = np.array(self.goal)
        self._inner.update_target_site_pos()

        box = spaces.Box(-np.inf, np.inf, (self._model.nq + self._model.nv,), np.float32)
        self._observe_goal = observe_goal
        self.action_space = self._inner.action_space
        shown = spaces.Dict({"observation": box, "desired_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
        self.observation_space = shown if observe_goal else box

    def _choose_cells(self, cells: Cells) -> tuple[list[Cell], list[Cell]]:
        """Cells to start in, and cells that a collecting policy walks to."""
        if cells == "task":
            return [self.start_cell], [self.goal_cell]
        chosen = self.free if cells == "random" else [*PLAY.get(self._env_id, ())]
        if not chosen:
            raise ValueError(f"environment {self._env_id}: has no cells chosen by hand; use cells random")
        if cells == "play":
            chosen = list(dict.fromkeys([self.start_cell, self.goal_cell, *chosen]))
        return [cell for cell in chosen if cell != self.goal_cell], chosen

    def _read_cell(self, name: str, cell: Sequence[int] | None) -> Cell:
        if cell is None:
            raise ValueError(f"environment {self._env_id}: D4RL has no task for it, so give {name} as [row, column]")
        found = tuple(cell)
        if found not in self.free:
            raise ValueError(
                f"environment {self._env_id}: {name} must be [row, column] of a free cell, got {list(cell)}"
            )
        return found[0], found[1]

    def center(self, cell: Cell) -> tuple[float, float]:
        """Position x, y of a cell's centre."""
        return self._left + (cell[1] + 0.5) * self.cell_width, self._top - (cell[0] + 0.5) * self.cell_width

    def cell_at(self, x: float, y: float) -> Cell:
        """The cell of a position."""
        return int((self._top - y) // self.cell_width), int((x - self._left) // self.cell_width)

    def neighbours(self, cell: Cell) -> list[Cell]:
        """Free cells that share an edge with a cell."""
        row, column = cell
        around = [(row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)]
        return [each for each in around if each in self.distances_to(cell)]

    def distances_to(self, target: Cell) -> dict[Cell, int]:
        """Number of steps between neighbouring cells from every cell to a target, by breadth-first search."""
        if target not in self._distances:
            free, found, queue = set(self.free), {target: 0}, deque([target])
            while queue:
                row, column = queue.popleft()
                for cell in ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)):
                    if cell in free and cell not in found:
                        found[cell] = found[row, column] + 1
                        queue.append(cell)
            self._distances[target] = found
        return self._distances[target]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode with the ant at rest in one of the start cells."""
        super().reset(seed=seed)
        del options
        start = self.starts[int(self.np_random.integers(len(self.starts)))]
        ant = self._inner.ant_env
        positions = ant.init_qpos.copy()
        noise = START_NOISE * self.cell_width * self.np_random.uniform(-1, 1, 2)
        positions[:2] = np.array(self.center(start)) + noise
        mujoco.mj_resetData(self._model, self._data)
        ant.set_state(positions, ant.init_qvel)
        self.steps = 0
        return self._observe(), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Act for five steps of the simulator.

        The environments inside also compute the ant's own reward and contact forces, which nothing here uses.
        """
        self._data.ctrl[:] = action
        mujoco.mj_step(self._model, self._data, nstep=self._frame_skip)
        self.steps += 1
        x, y = self._data.qpos[:2].tolist()
        success = (x - self.goal[0]) ** 2 + (y - self.goal[1]) ** 2 <= GOAL_RADIUS**2
        terminated = success and not self.continuing
        truncated = self.steps >= self.max_episode_steps and not terminated
        return self._observe(), float(success), terminated, truncated, {"success": success}

    def _observe(self) -> Observation:
        state = np.concatenate([self._data.qpos, self._data.qvel]).astype(np.float32)
        return {"observation": state, "desired_goal": np.array(self.goal, np.float32)} if self._observe_goal else state

    def render(self) -> Any:
        """The picture of the simulator's camera, as in Gymnasium."""
        return self._inner.render()

    def close(self) -> None:
        """Free the simulator."""
        self._inner.close()
