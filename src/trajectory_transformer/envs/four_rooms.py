"""Reach a goal in four rooms joined by four doorways: the environment, its exact geometry, a demonstrator.

The unit square is cut by the cross x = 0.5, y = 0.5 into four rooms. Walls are segments of zero width, and each of
the four arms of the cross has one doorway. Free space is every point of the square at least `CLEARANCE` from every
wall, measured per axis: each wall is widened to a box that nothing enters, although its faces may be touched.

Why no path ever meets a wall: a motion ends where it first meets a box, and the result is rounded to float32. All
faces are multiples of 2^-6 in [0, 1], hence exact in float32, so rounding cannot carry a point through one; and it
moves the end of the path by at most 2^-25, far less than the 2^-6 that parts a box's face from its wall.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.floating]
Point = tuple[float, float]

CLEARANCE = 1 / 64
"""Half the agent's width: its centre stops this far from a wall, per axis."""


# Posts lie on multiples of 1/64 so that they are exact in float32; openings are 8/64, of which the agent leaves 6/64.
DOORWAYS: FloatArray = np.array(
    [
        [[0.5, 8 / 64], [0.5, 16 / 64]],  # south: joins the two lower rooms
        [[0.5, 44 / 64], [0.5, 52 / 64]],  # north: joins the two upper rooms
        [[6 / 64, 0.5], [14 / 64, 0.5]],  # west: joins the two left rooms
        [[40 / 64, 0.5], [48 / 64, 0.5]],  # east: joins the two right rooms
    ]
)
"""Openings as segments from post to post: [4, 2, 2], lower coordinate first."""

DOORWAY_CENTERS: FloatArray = DOORWAYS.mean(axis=1)
"""Middle of each opening: [4, 2]."""

WALLS: FloatArray = np.concatenate(
    [
        [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],  # bottom, top
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],  # left, right
        [[0.5, 0.0], *DOORWAYS[0], *DOORWAYS[1], [0.5, 1.0]],  # the upright of the cross
        [[0.0, 0.5], *DOORWAYS[2], *DOORWAYS[3], [1.0, 0.5]],  # its bar
    ]
).reshape(-1, 2, 2)
"""Wall segments, the outer four first: [10, 2, 2], lower coordinate first."""

for _array in (DOORWAYS, DOORWAY_CENTERS, WALLS):
    _array.flags.writeable = False

# Plain floats: on arrays this small NumPy's overhead per call would be most of the cost of a step.
_BOXES: list[tuple[float, float, float, float]] = [
    (low[0] - CLEARANCE, high[0] + CLEARANCE, low[1] - CLEARANCE, high[1] + CLEARANCE) for low, high in WALLS.tolist()
]  # left, right, bottom, top of each widened wall


def _is_free(x: float, y: float) -> bool:
    """Whether a point of the plane lies in free space; false for NaN."""
    if not (0.0 < x < 1.0 and 0.0 < y < 1.0):
        return False
    return not any(left < x < right and bottom < y < top for left, right, bottom, top in _BOXES)


def _pair(name: str, values: ArrayLike) -> Point:
    """Read two finite numbers from values [2]."""
    array = np.asarray(values)
    if array.shape != (2,):
        raise ValueError(f"{name} must hold two numbers, shape (2,), got shape {array.shape}")
    x, y = array.tolist()
    if not (math.isfinite(x) and math.isfinite(y)):
        raise ValueError(f"{name} must be finite, got ({x}, {y})")
    return x, y


def _free_point(name: str, values: ArrayLike) -> Point:
    """Read a point of free space from values [2]."""
    x, y = _pair(name, values)
    if not _is_free(x, y):
        raise ValueError(f"{name} must lie in the unit square, at least {CLEARANCE} from every wall, got ({x}, {y})")
    return x, y


def _round(x: float, y: float) -> Point:
    """Return the nearest point that is exact in float32; it is free if this one is."""
    return float(np.float32(x)), float(np.float32(y))


def _first_contact(x: float, y: float, dx: float, dy: float) -> tuple[float, int, float]:
    """Follow a displacement from a free point to the first box it would enter.

    Returns the fraction travelled, the axis of the face met (-1 for none, with fraction 1) and that face's place.
    """
    fraction, axis, face = 1.0, -1, 0.0
    end_x, end_y = x + dx, y + dy
    for left, right, bottom, top in _BOXES:
        # Most boxes are ruled out here; what remains has its exit ahead of the start on both axes.
        if (x <= left and end_x <= left) or (x >= right and end_x >= right):
            continue
        if (y <= bottom and end_y <= bottom) or (y >= top and end_y >= top):
            continue
        near_x, far_x = (left, right) if dx > 0 else (right, left)
        near_y, far_y = (bottom, top) if dy > 0 else (top, bottom)
        enter_x, exit_x = ((near_x - x) / dx, (far_x - x) / dx) if dx else (-math.inf, math.inf)
        enter_y, exit_y = ((near_y - y) / dy, (far_y - y) / dy) if dy else (-math.inf, math.inf)
        enter = max(enter_x, enter_y)
        if enter < fraction and enter < min(exit_x, exit_y):
            fraction, axis, face = (enter, 0, near_x) if enter_x >= enter_y else (enter, 1, near_y)
    return fraction, axis, face


def _advance(x: float, y: float, dx: float, dy: float) -> tuple[Point, int]:
    """Move on plain floats (see `move`): the point come to, and the axis on which a wall stopped it or -1."""
    fraction, axis, face = _first_contact(x, y, dx, dy)
    end_x = face if axis == 0 else x + fraction * dx
    end_y = face if axis == 1 else y + fraction * dy
    return _round(end_x, end_y), axis


def _slide(x: float, y: float, dx: float, dy: float) -> list[Point]:
    """Move, and where a wall stops the motion spend what is left along that wall: the one or two points come to."""
    contact, axis = _advance(x, y, dx, dy)
    if axis < 0:
        return [contact]
    along = (0.0, y + dy - contact[1]) if axis == 0 else (x + dx - contact[0], 0.0)
    return [contact, _advance(*contact, *along)[0]]


def _sees(start: Point, end: Point) -> bool:
    """Whether the straight line between two free points stays in free space."""
    return _first_contact(start[0], start[1], end[0] - start[0], end[1] - start[1])[1] < 0


def move(position: ArrayLike, displacement: ArrayLike) -> FloatArray:
    """Move a free position [2] by any displacement [2], stopping where it first comes within `CLEARANCE` of a wall.

    The part of the motion along the wall is lost as well; the environment spends it in a second move. The result [2]
    is free, and each coordinate is exact in float32.
    """
    return np.array(_advance(*_free_point("position", position), *_pair("displacement", displacement))[0])


class _Roadmap:
    """Shortest paths whose turns are taken from a fixed set of points."""

    def __init__(self, nodes: Sequence[Point]) -> None:
        self._nodes = list(nodes)
        self._edges: list[list[tuple[int, float]]] = [
            [(j, math.dist(a, b)) for j, b in enumerate(self._nodes) if j != i and _sees(a, b)]
            for i, a in enumerate(self._nodes)
        ]

    def path(self, start: Point, goal: Point) -> list[Point]:
        """Return the waypoints from start to goal, both included, by Dijkstra's method from the goal outwards."""
        if _sees(start, goal):
            return [start, goal]
        costs = [math.inf] * len(self._nodes)  # length from a node to the goal
        following = list(range(len(self._nodes)))  # the node after this one; the last before the goal names itself
        queue = [(math.dist(node, goal), i, i) for i, node in enumerate(self._nodes) if _sees(node, goal)]
        heapq.heapify(queue)
        best, first = math.inf, -1
        while queue:
            cost, i, after = heapq.heappop(queue)
            # Every node still waiting is as far from the goal as the start is by the path found, or farther. This ends
            # at a node that is the start itself, so a walker never stands on the first waypoint already.
            if cost >= best:
                break
            if cost >= costs[i]:
                continue
            costs[i], following[i] = cost, after
            through = cost + math.dist(start, self._nodes[i])
            if through < best and _sees(start, self._nodes[i]):
                best, first = through, i
            for j, length in self._edges[i]:
                if cost + length < costs[j]:
                    heapq.heappush(queue, (cost + length, j, i))
        assert first >= 0, "rooms are convex, so each point sees the nodes of its room"
        waypoints = [start, self._nodes[first]]
        while following[first] != first:
            first = following[first]
            waypoints.append(self._nodes[first])
        return [*waypoints, goal]


def _beside_doorways(depth: float, inset: float) -> list[Point]:
    """Four points per doorway, on either side of the wall by `depth` and inside either post by `inset`."""
    nodes: list[Point] = []
    for (low_x, low_y), (high_x, high_y) in DOORWAYS.tolist():
        if low_x == high_x:
            nodes += [(low_x + side, y) for side in (-depth, depth) for y in (low_y + inset, high_y - inset)]
        else:
            nodes += [(x, low_y + side) for side in (-depth, depth) for x in (low_x + inset, high_x - inset)]
    return nodes


# Every bend of a shortest path is at a corner of a box, and only those at the doorways stand out into free space.
_POSTS = _Roadmap(_beside_doorways(CLEARANCE, CLEARANCE))


def shortest_path(start: ArrayLike, goal: ArrayLike) -> FloatArray:
    """Waypoints [N, 2] of the shortest path in free space from start [2] to goal [2], both included.

    Posts are passed at `CLEARANCE`. Between neighbouring rooms the way round through three doorways may be shorter
    than the way through one.
    """
    return np.array(_POSTS.path(_free_point("start", start), _free_point("goal", goal)))


def shortest_path_length(start: ArrayLike, goal: ArrayLike) -> float:
    """Length of the shortest path in free space from start [2] to goal [2]."""
    path = shortest_path(start, goal)
    return float(np.hypot(*np.diff(path, axis=0).T).sum())


class Demonstrator:
    """Walks to the goal by nearly the shortest path, with noise; it keeps no state.

    Gaussian noise blurs every step. Wandering replaces a step now and then by a random one: it leads to places off the
    shortest paths, and the steps that lead back, without changing what the agent most often does in any place.
    """

    # Away from the posts by about two standard deviations of the default noise, and exact in float32: the agent can
    # stand on a waypoint, and then sees whatever the waypoint sees.
    _WAYPOINTS = _Roadmap(_beside_doorways(depth=5 / 128, inset=5 / 128))

    def __init__(self, noise: float = 0.2, max_step: float = 0.05, wander: float = 0.0) -> None:
        """Set the noise's standard deviation in units of `max_step`, the longest step, and the share of random ones."""
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
        """Displacement [2] from observation [2] towards goal [2]: noise is added, then each component is clipped."""
        if self.wander and rng.random() < self.wander:
            return rng.uniform(-self.max_step, self.max_step, 2).astype(np.float32)
        start = _free_point("observation", observation)
        target = self._WAYPOINTS.path(start, _free_point("goal", goal))[1]
        distance = math.dist(start, target)
        # Shorter than a full step when the target is nearer than that, so that it is not overshot.
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
    """Image [RENDER_SIZE, RENDER_SIZE, 3] of the rooms, y upwards; the agent is at the trail's end."""
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
    """Walk from a random start to a random goal; reward 1 on the step that comes within `success_radius` of it.

    Observations are a dict of `observation` and `achieved_goal` (both the position) and `desired_goal`, each [2] in
    float32. Actions are displacements [2]; components beyond `max_step` are clipped to it. Walls stop the agent (see
    `move`), and what is left of a step is spent along them. The episode terminates on success, which is Euclidean
    distance <= `success_radius` and nothing else: a wall in between does not matter.

    `info` holds `success` and `path_ratio` = (length travelled + straight distance left to the goal) / (length of the
    shortest path from start to goal). A perfect run that succeeds ends at 1. Before success the ratio is a lower
    bound, below 1 while walls hide the goal, and so it is when success comes through a wall.
    """

    # The base class declares it as an instance variable.
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, max_step: float = 0.05, success_radius: float = 0.05, render_mode: str | None = None) -> None:
        """Set the limit of each action component, the distance that counts as reached, and the render mode."""
        if not 0.0 < max_step <= 1.0:
            raise ValueError(f"max_step must lie in (0, 1], got {max_step}")
        # A larger disc could cover free space, and there would be no start outside it to draw.
        if not 0.0 < success_radius <= 0.5:
            raise ValueError(f"success_radius must lie in (0, 0.5], got {success_radius}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be None or one of {self.metadata['render_modes']}, got {render_mode!r}")
        self.success_radius = success_radius
        self.render_mode = render_mode
        self.action_space = spaces.Box(-max_step, max_step, (2,), np.float32)
        self.max_step = float(self.action_space.high[0])  # as rounded there, so that the extreme actions are kept
        self.observation_space = spaces.Dict(  # type: ignore[assignment]  # declared as a space of dicts of spaces
            {key: spaces.Box(0.0, 1.0, (2,), np.float32) for key in ("observation", "achieved_goal", "desired_goal")}
        )
        self._trail: list[Point] = []  # every position of the episode, the start included
        self._goal: Point = (math.nan, math.nan)
        self._travelled, self._shortest = 0.0, math.nan

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, FloatArray], dict[str, Any]]:
        """Start an episode; options "start" and "goal", each [2], replace the uniform draws from free space."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"start", "goal"}:
            raise ValueError(f"reset options are 'start' and 'goal', got {sorted(unknown)}")
        given = {name: _round(*_free_point(name, values)) for name, values in options.items()}
        while True:
            start = given["start"] if "start" in given else self._draw_free_point()
            goal = given["goal"] if "goal" in given else self._draw_free_point()
            if math.dist(start, goal) > self.success_radius:
                break
            if len(given) == 2:
                raise ValueError(
                    f"start and goal must lie more than the success radius {self.success_radius} apart, "
                    f"got {start} and {goal}"
                )
        self._trail, self._goal, self._travelled = [start], goal, 0.0
        self._shortest = shortest_path_length(start, goal)
        return self._view()

    def step(self, action: ArrayLike) -> tuple[dict[str, FloatArray], float, bool, bool, dict[str, Any]]:
        """Move by action [2], clipped per component to `max_step`; the time limit is left to the wrapper."""
        if not self._trail:
            raise gymnasium.error.ResetNeeded("step needs an episode: call reset first")
        dx, dy = _pair("action", action)
        limit = self.max_step
        for position in _slide(*self._trail[-1], max(-limit, min(limit, dx)), max(-limit, min(limit, dy))):
            self._travelled += math.dist(self._trail[-1], position)
            self._trail.append(position)
        observation, info = self._view()
        return observation, float(info["success"]), info["success"], False, info

    @property
    def trail(self) -> FloatArray:
        """Points visited in this episode [N, 2], where walls bent the way included."""
        return np.array(self._trail)

    def render(self) -> NDArray[np.uint8] | None:
        """Image [RENDER_SIZE, RENDER_SIZE, 3] of walls, goal, trail and agent."""
        if self.render_mode is None:
            gymnasium.logger.warn("render draws nothing: the environment was made with render_mode=None")
            return None
        if not self._trail:
            raise gymnasium.error.ResetNeeded("render needs an episode: call reset first")
        return _draw(self._trail, self._goal, self.success_radius)

    def _draw_free_point(self) -> Point:
        """Uniform over the float32 points of free space."""
        while True:  # the walls' boxes take about 0.01 % of the square
            x, y = self.np_random.random(2, dtype=np.float32).tolist()
            if _is_free(x, y):
                return x, y

    def _view(self) -> tuple[dict[str, FloatArray], dict[str, Any]]:
        """Observation and info of the present position, in new arrays each time."""
        position = self._trail[-1]
        distance = math.dist(position, self._goal)
        observation: dict[str, FloatArray] = {
            "observation": np.array(position, dtype=np.float32),
            "achieved_goal": np.array(position, dtype=np.float32),
            "desired_goal": np.array(self._goal, dtype=np.float32),
        }
        path_ratio = (self._travelled + distance) / self._shortest
        return observation, {"success": distance <= self.success_radius, "path_ratio": path_ratio}
