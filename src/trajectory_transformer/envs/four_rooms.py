"""The four-rooms environment, and a demonstrator that walks to the goal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from trajectory_transformer.envs.rooms import (
    WALLS,
    FloatArray,
    Point,
    Roadmap,
    doorway_points,
    is_free,
    read_free_point,
    read_pair,
    round_point,
    shortest_path_length,
    slide,
)


class Demonstrator:
    """Walks to the goal by nearly the shortest path, with noise; stateless.

    Gaussian noise is added to every step. With probability `wander`, a step is random instead. This visits positions
    off the shortest paths and records how to return from them, while the most frequent action at any position is still
    the one towards the goal.
    """

    # About two standard deviations of the default noise away from the doorposts, and exact in float32: an agent that
    # stands on a waypoint has the same free lines of sight as the waypoint.
    _WAYPOINTS = Roadmap(doorway_points(depth=5 / 128, inset=5 / 128))

    def __init__(self, noise: float = 0.2, max_step: float = 0.05, wander: float = 0.0) -> None:
        """Set the standard deviation of the noise in units of `max_step`, and the probability of a random step."""
        if not 0.0 <= noise < math.inf:
            raise ValueError(f"noise must be finite and at least 0, got {noise}")
        if not 0.0 < max_step <= 1.0:
            raise ValueError(f"max_step must lie in (0, 1], got {max_step}")
        if not 0.0 <= wander < 1.0:
            raise ValueError(f"wander must lie in [0, 1), got {wander}")
        self.noise = noise
        self.max_step = max_step
        self.wander = wander

    def act(self, observation: ArrayLike, goal: ArrayLike, rng: np.random.Generator) -> FloatArray:
        """Displacement [2] from observation [2] towards goal [2], with noise, clipped per component."""
        if self.wander and rng.random() < self.wander:
            return rng.uniform(-self.max_step, self.max_step, 2).astype(np.float32)
        start = read_free_point("observation", observation)
        target = self._WAYPOINTS.path(start, read_free_point("goal", goal))[1]
        distance = math.dist(start, target)
        # A shorter step if the target is near, so that the agent does not overshoot it.
        scale = min(1.0, self.max_step / distance) if distance else 0.0
        spread = self.noise * self.max_step
        noise_x, noise_y = rng.standard_normal(2).tolist()
        dx = (target[0] - start[0]) * scale + noise_x * spread
        dy = (target[1] - start[1]) * scale + noise_y * spread
        limit = self.max_step
        return np.array([max(-limit, min(limit, dx)), max(-limit, min(limit, dy))], dtype=np.float32)


RENDER_SIZE = 256
BACKGROUND, WALL, TRAIL, AGENT = (255, 255, 255), (40, 40, 40), (150, 180, 230), (30, 80, 200)
GOAL, GOAL_REGION = (20, 140, 60), (200, 235, 205)


def _draw(trail: Sequence[Point], goal: Point, success_radius: float) -> NDArray[np.uint8]:
    """Image [RENDER_SIZE, RENDER_SIZE, 3] of the rooms, y upwards; the agent is at the end of the trail."""
    pixel = 1.0 / RENDER_SIZE
    x = (np.arange(RENDER_SIZE) + 0.5) * pixel  # [W], pixel centres
    y = x[::-1, None]  # [H, 1]
    image = np.full((RENDER_SIZE, RENDER_SIZE, 3), BACKGROUND, dtype=np.uint8)
    image[np.hypot(x - goal[0], y - goal[1]) <= success_radius] = GOAL_REGION
    image[np.hypot(x - goal[0], y - goal[1]) <= 4 * pixel] = GOAL
    stops = np.array(trail)  # [T + 1, 2]
    travelled = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(stops, axis=0).T))])  # [T + 1]
    along = np.linspace(0.0, travelled[-1], 1 + math.ceil(2 * travelled[-1] / pixel))  # half a pixel apart
    columns = (np.interp(along, travelled, stops[:, 0]) / pixel).astype(np.intp)
    rows = RENDER_SIZE - 1 - (np.interp(along, travelled, stops[:, 1]) / pixel).astype(np.intp)
    image[rows, columns] = TRAIL
    for (low_x, low_y), (high_x, high_y) in WALLS.tolist():
        near_x = (x >= low_x - pixel) & (x <= high_x + pixel)
        image[near_x & (y >= low_y - pixel) & (y <= high_y + pixel)] = WALL
    image[np.hypot(x - stops[-1, 0], y - stops[-1, 1]) <= 4 * pixel] = AGENT
    return image


class FourRooms(gymnasium.Env[dict[str, FloatArray], FloatArray]):
    """Walk from a random start to a random goal; reward 1 on the step that comes within `success_radius` of the goal.

    Observations are a dict of `observation` and `achieved_goal` (both the position) and `desired_goal`, each [2] in
    float32. Actions are displacements [2]; components are clipped to `max_step`. An agent that hits a wall slides along
    it for the rest of the step. The episode terminates on success: Euclidean distance to the goal <= `success_radius`,
    even through a wall.

    `info` holds `success` and `path_ratio` = (distance travelled + straight-line distance to the goal) / (length of the
    shortest path from start to goal). The ratio of a shortest path is 1. Before success, and for success through a
    wall, the ratio is a lower bound that can be below 1.
    """

    # The base class declares it as an instance attribute.
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        max_step: float = 0.05,
        success_radius: float = 0.05,
        goal: ArrayLike | None = None,
        step_reward: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        """Set the limit of each action component and the distance at which the goal is reached.

        `goal` [2] fixes the goal of all episodes. `step_reward` is added to the reward of every step; a negative value
        rewards short paths.
        """
        if not 0.0 < max_step <= 1.0:
            raise ValueError(f"max_step must lie in (0, 1], got {max_step}")
        # With a larger radius there may be no start outside it.
        if not 0.0 < success_radius <= 0.5:
            raise ValueError(f"success_radius must lie in (0, 0.5], got {success_radius}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be None or one of {self.metadata['render_modes']}, got {render_mode!r}")
        if not math.isfinite(step_reward):
            raise ValueError(f"step_reward must be finite, got {step_reward}")
        self.success_radius = success_radius
        self.step_reward = step_reward
        self._fixed = {} if goal is None else {"goal": round_point(*read_free_point("goal", goal))}
        self.render_mode = render_mode
        self.action_space = spaces.Box(-max_step, max_step, (2,), np.float32)
        self.max_step = float(
            self.action_space.high[0]
        )  # rounded as in the space, so that extreme actions are not clipped
        self.observation_space = spaces.Dict(  # type: ignore[assignment]  # the base class declares a space of dicts of spaces
            {key: spaces.Box(0.0, 1.0, (2,), np.float32) for key in ("observation", "achieved_goal", "desired_goal")}
        )
        self._trail: list[Point] = []  # every position of the episode, the start included
        self._goal: Point = (math.nan, math.nan)
        self._travelled, self._shortest = 0.0, math.nan

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, FloatArray], dict[str, Any]]:
        """Start an episode; options "start" and "goal", each [2], replace uniform samples from free space."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"start", "goal"}:
            raise ValueError(f"reset options are 'start' and 'goal', got {sorted(unknown)}")
        given = self._fixed | {name: round_point(*read_free_point(name, values)) for name, values in options.items()}
        while True:
            start = given["start"] if "start" in given else self._draw_free_point()
            goal = given["goal"] if "goal" in given else self._draw_free_point()
            if math.dist(start, goal) > self.success_radius:
                break
            if len(given) == 2:
                raise ValueError(
                    f"start and goal must be more than the success radius {self.success_radius} apart, "
                    f"got {start} and {goal}"
                )
        self._trail, self._goal, self._travelled = [start], goal, 0.0
        self._shortest = shortest_path_length(start, goal)
        return self._view()

    def step(self, action: ArrayLike) -> tuple[dict[str, FloatArray], float, bool, bool, dict[str, Any]]:
        """Move by action [2], clipped per component to `max_step`; a wrapper enforces the time limit."""
        if not self._trail:
            raise gymnasium.error.ResetNeeded("call reset before step")
        dx, dy = read_pair("action", action)
        limit = self.max_step
        for position in slide(*self._trail[-1], max(-limit, min(limit, dx)), max(-limit, min(limit, dy))):
            self._travelled += math.dist(self._trail[-1], position)
            self._trail.append(position)
        observation, info = self._view()
        return observation, self.step_reward + float(info["success"]), info["success"], False, info

    @property
    def trail(self) -> FloatArray:
        """Points visited in this episode [N, 2], including the contacts with walls."""
        return np.array(self._trail)

    def render(self) -> NDArray[np.uint8] | None:
        """Image [RENDER_SIZE, RENDER_SIZE, 3] of walls, goal, trail and agent."""
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render returns None because render_mode is None; make the environment with render_mode='rgb_array'"
            )
            return None
        if not self._trail:
            raise gymnasium.error.ResetNeeded("call reset before render")
        return _draw(self._trail, self._goal, self.success_radius)

    def _draw_free_point(self) -> Point:
        """A uniform sample from free space, exact in float32."""
        while True:  # walls take 7/64 of the square
            x, y = self.np_random.random(2, dtype=np.float32).tolist()
            if is_free(x, y):
                return x, y

    def _view(self) -> tuple[dict[str, FloatArray], dict[str, Any]]:
        """Observation and info of the current position, in new arrays."""
        position = self._trail[-1]
        distance = math.dist(position, self._goal)
        observation: dict[str, FloatArray] = {
            "observation": np.array(position, dtype=np.float32),
            "achieved_goal": np.array(position, dtype=np.float32),
            "desired_goal": np.array(self._goal, dtype=np.float32),
        }
        path_ratio = (self._travelled + distance) / self._shortest
        return observation, {"success": distance <= self.success_radius, "path_ratio": path_ratio}
