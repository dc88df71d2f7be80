"""A goal-reaching ant: a network that walks to a point, and a policy that walks through a maze with it.

The ant has four equal legs, a quarter turn apart. The network therefore sees the ant in a frame that is turned by a
multiple of 90 degrees such that the point lies ahead, with legs numbered from that direction. The frame is kept until
the point is far from straight ahead, so that the gait does not change at every step.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trajectory_transformer.envs.ant_maze import GOAL_RADIUS, AntMaze, Cell

FloatArray = NDArray[np.floating]

_INPUTS, _ACTIONS = 37, 8
_QUARTER = math.pi / 2
_KEEP_FRAME = math.radians(60)  # the point may lie this far from straight ahead
_FAR = 5.0  # larger distances look alike to the network
_CLIP = 10.0  # of normalised inputs
_EPSILON = 1e-8  # added to the variance of inputs
_REACHED = 0.7  # a waypoint is reached within this distance
_SPREAD = 0.125  # of a cell's width: how far waypoints are from its centre, per axis; they are as far apart as in D4RL
_ASIDE = 2.0  # how far from the ant a point lies to which it strays, per axis
_ASIDE_STEPS = 20  # after which it goes on, at the latest
_TO_GOAL = 0.25  # probability that a target is the goal of the task; else any target is drawn, which may be it too
# Joints and actions of the network are hip and ankle of each leg, with ankles that bend down as they increase.
_SIGNS = np.array([[1, 1], [1, -1], [1, -1], [1, 1]], np.float64)
_TURNED = (np.arange(4)[:, None] + np.arange(4)) % 4  # [frame, place] -> leg
_MOTORS = np.array([3, 0, 1, 2])  # legs in the order of the simulator's motors


class AntWalker:
    """Walks an ant to a point. It remembers its frame and its last action; `reset` forgets them."""

    def __init__(self, path: str | Path) -> None:
        """Read a walker file: a network with 37 inputs, ELU layers and 8 outputs, and statistics of its inputs."""
        try:
            with safe_open(str(path), "np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._mean, self._std = tensors["obs.mean"], np.sqrt(tensors["obs.var"] + _EPSILON)
            numbers = sorted(int(name.split(".")[1]) for name in tensors if name.endswith("weight"))
            self._layers = [(tensors[f"actor.{i}.weight"], tensors[f"actor.{i}.bias"]) for i in numbers]
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"policy {path}: not a complete walker file ({error})") from error
        sizes = (self._mean.size, self._layers[0][0].shape[1], len(self._layers[-1][0]))
        if sizes != (_INPUTS, _INPUTS, _ACTIONS):
            raise ValueError(f"policy {path}: a walker must have {_INPUTS} inputs and {_ACTIONS} outputs, got {sizes}")
        self._frame = 0
        self._legs = np.zeros((4, 2))  # the last action, by leg

    def reset(self) -> None:
        """Forget the past: an episode begins."""
        self._frame = 0
        self._legs = np.zeros((4, 2))

    def act(
        self, state: FloatArray, target: tuple[float, float], noise: float, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Torques [8] in [-1, 1] for a state [29]; `noise` is the standard deviation added before clipping."""
        x = self._inputs(state, target)
        for weight, bias in self._layers[:-1]:
            # Not BLAS: its order of summation depends on the number of threads, and an episode only on its seed.
            x = np.einsum("oi,i->o", weight, x) + bias
            x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
        weight, bias = self._layers[-1]
        action = np.einsum("oi,i->o", weight, x) + bias
        if noise:
            action = action + noise * rng.standard_normal(_ACTIONS)
        self._legs[_TURNED[self._frame]] = np.minimum(np.maximum(action, -1), 1).reshape(4, 2)
        return np.asarray((self._legs * _SIGNS)[_MOTORS].reshape(_ACTIONS), np.float32)

    def _inputs(self, state: FloatArray, target: tuple[float, float]) -> FloatArray:
        """What the network sees [37], normalised; chooses the frame."""
        # Plain floats: for arrays this small, the overhead of NumPy calls would dominate.
        px, py, height, w, x, y, z = state[:7].tolist()
        vx, vy, vz, rx, ry, rz = state[15:21].tolist()
        dx, dy = target[0] - px, target[1] - py
        distance = math.hypot(dx, dy)
        yaw = 2 * math.atan2(
            z, w
        )  # the twist about the vertical axis, which a quarter turn changes by exactly 90 degrees
        bearing = math.atan2(dy, dx) - yaw
        off = (bearing - self._frame * _QUARTER + math.pi) % (2 * math.pi) - math.pi
        if abs(off) > _KEEP_FRAME:
            self._frame = round(bearing / _QUARTER) % 4
        turn = self._frame * _QUARTER
        # The vertical axis in the body's frame, and angular velocities (those of the body) in the world's.
        up_x, up_y, up_z = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)
        spin_x = (1 - 2 * (y * y + z * z)) * rx + 2 * (x * y - w * z) * ry + 2 * (x * z + w * y) * rz
        spin_y = 2 * (x * y + w * z) * rx + (1 - 2 * (x * x + z * z)) * ry + 2 * (y * z - w * x) * rz
        spin_z = up_x * rx + up_y * ry + up_z * rz
        cos, sin = math.cos(turn), math.sin(turn)
        ahead, left = math.cos(yaw + turn), math.sin(yaw + turn)
        near = 1 / max(distance, 1e-6)
        legs = _TURNED[self._frame]
        body = [height, cos * up_x + sin * up_y, cos * up_y - sin * up_x, up_z]
        motion = [ahead * vx + left * vy, ahead * vy - left * vx, vz]
        motion += [ahead * spin_x + left * spin_y, ahead * spin_y - left * spin_x, spin_z]
        goal = [(ahead * dx + left * dy) * near, (ahead * dy - left * dx) * near, min(distance, _FAR) / _FAR]
        angles = (state[7:15].reshape(4, 2) * _SIGNS)[legs].ravel()
        speeds = (state[21:].reshape(4, 2) * _SIGNS)[legs].ravel()
        seen = np.concatenate([body, angles, motion, speeds, goal, self._legs[legs].ravel()]).astype(np.float32)
        scaled = (seen - self._mean) / self._std
        return np.asarray(np.minimum(np.maximum(scaled, -_CLIP), _CLIP), np.float32)


class Wanderer:
    """Walks through a maze from one target cell to the next, cell by cell, and takes wrong turns.

    A quarter of the targets are the goal of the task, the others are drawn from the targets of the environment. At
    every cell it turns to a random neighbour with probability `wander`, else it continues on a shortest path. Waypoints
    are random points around the centres of cells. Where an episode ends at the goal, this holds in its cell too, so
    that the data shows the goal from all sides and what happens to those that miss it. Where an episode goes on, the
    way to the goal ends at the goal itself, and the next one leads through what lies around it.

    In every step the ant strays with probability `stray`: it walks to a random point nearby for a short time. So the
    data shows what happens to an ant that slows down or turns, anywhere in the maze.
    """

    def __init__(self, maze: AntMaze, walker: AntWalker, *, noise: float, wander: float, stray: float = 0.0) -> None:
        """Walk in a maze; `noise` is the standard deviation of the noise added to actions."""
        self._maze, self._walker = maze, walker
        self._noise, self._wander, self._stray = noise, wander, stray
        self._aside, self._steps_aside = (0.0, 0.0), 0  # where the ant strays to, and for how many more steps
        self._target: Cell = maze.goal_cell
        self._next: Cell = maze.start_cell
        self._waypoint = maze.center(self._next)

    def act(self, observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> NDArray[np.float32]:
        """Action [8] for an observation [29]."""
        del goal
        maze = self._maze
        x, y = observation[:2].tolist()
        cell = maze.cell_at(x, y)
        if maze.steps == 0:
            self._walker.reset()
            self._steps_aside = 0
            self._target = self._draw_target(cell, rng)
            self._next, self._waypoint = cell, (x, y)
        # A shortest path is defined from free cells; an ant that leans over a wall keeps its waypoint.
        if cell in maze.distances_to(self._target):
            strayed = cell != self._next and cell not in maze.neighbours(self._next)
            near = GOAL_RADIUS if self._waypoint == maze.goal else _REACHED
            if strayed or math.dist((x, y), self._waypoint) < near:
                if cell == self._target and (maze.continuing or cell != maze.goal_cell):
                    self._target = self._draw_target(cell, rng)
                self._next = self._turn(cell, rng)
                self._waypoint = self._draw_waypoint(rng)
        return self._walker.act(observation, self._heading((x, y), rng), self._noise, rng)

    def _heading(self, place: tuple[float, float], rng: np.random.Generator) -> tuple[float, float]:
        """The waypoint, or the point that the ant strays to."""
        if self._steps_aside:
            self._steps_aside -= 1
        elif self._stray and rng.random() < self._stray:
            dx, dy = rng.uniform(-_ASIDE, _ASIDE, 2).tolist()
            self._aside = place[0] + dx, place[1] + dy
            self._steps_aside = _ASIDE_STEPS if self._maze.cell_at(*self._aside) in self._maze.free else 0
        if math.dist(place, self._aside) < GOAL_RADIUS:
            self._steps_aside = 0
        return self._aside if self._steps_aside else self._waypoint

    def _draw_waypoint(self, rng: np.random.Generator) -> tuple[float, float]:
        x, y = self._maze.center(self._next)
        if self._maze.continuing and self._next == self._target == self._maze.goal_cell:
            return x, y
        dx, dy = (_SPREAD * self._maze.cell_width * rng.uniform(-1, 1, 2)).tolist()
        return x + dx, y + dy

    def _draw_target(self, cell: Cell, rng: np.random.Generator) -> Cell:
        if rng.random() < _TO_GOAL:
            return self._maze.goal_cell
        others = [each for each in self._maze.targets if each != cell] or self._maze.targets
        return others[int(rng.integers(len(others)))]

    def _turn(self, cell: Cell, rng: np.random.Generator) -> Cell:
        """The next cell to walk to: in the cell of the target that cell."""
        if cell == self._target:
            return cell
        around = self._maze.neighbours(cell)
        if rng.random() < self._wander:
            return around[int(rng.integers(len(around)))]
        distances = self._maze.distances_to(self._target)
        return min(around, key=lambda each: distances[each])
