"""Exact geometry of four rooms with four doorways: walls, motion, shortest paths.

The lines x = 0.5 and y = 0.5 divide the unit square into four rooms. Walls are segments of zero width, and each of the
four inner walls has one doorway. Free space is every point with a distance of at least `CLEARANCE` per axis from every
wall: each wall is widened to a box that the agent may touch but not enter.

No path ever crosses a wall: a motion ends where it first meets a box, and the result is rounded to float32. All faces
are multiples of 2^-6 in [0, 1], which float32 represents exactly, so rounding cannot move a point across a face. It
moves the end of the path by at most 2^-25, far less than the distance of 2^-6 between a face and its wall.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.floating]
Point = tuple[float, float]

CLEARANCE = 1 / 64
"""Half the width of the agent: its centre stops at this distance from a wall, per axis."""


# Posts are at multiples of 1/64, which are exact in float32. Doorways are 8/64 wide; the agent's centre can use 6/64.
DOORWAYS: FloatArray = np.array(
    [
        [[0.5, 8 / 64], [0.5, 16 / 64]],  # south: joins the two lower rooms
        [[0.5, 44 / 64], [0.5, 52 / 64]],  # north: joins the two upper rooms
        [[6 / 64, 0.5], [14 / 64, 0.5]],  # west: joins the two left rooms
        [[40 / 64, 0.5], [48 / 64, 0.5]],  # east: joins the two right rooms
    ]
)
"""Doorways as segments from post to post: [4, 2, 2], lower coordinate first."""

DOORWAY_CENTERS: FloatArray = DOORWAYS.mean(axis=1)
"""Centre of each doorway: [4, 2]."""

WALLS: FloatArray = np.concatenate(
    [
        [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],  # bottom, top
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],  # left, right
        [[0.5, 0.0], *DOORWAYS[0], *DOORWAYS[1], [0.5, 1.0]],  # the vertical inner wall
        [[0.0, 0.5], *DOORWAYS[2], *DOORWAYS[3], [1.0, 0.5]],  # the horizontal inner wall
    ]
).reshape(-1, 2, 2)
"""Wall segments, the four outer walls first: [10, 2, 2], lower coordinate first."""

for _array in (DOORWAYS, DOORWAY_CENTERS, WALLS):
    _array.flags.writeable = False

# Plain floats: for arrays this small, the overhead of NumPy calls would dominate the cost of a step.
_BOXES: list[tuple[float, float, float, float]] = [
    (low[0] - CLEARANCE, high[0] + CLEARANCE, low[1] - CLEARANCE, high[1] + CLEARANCE) for low, high in WALLS.tolist()
]  # left, right, bottom, top of each widened wall


def is_free(x: float, y: float) -> bool:
    """Whether a point is in free space; false for NaN."""
    if not (0.0 < x < 1.0 and 0.0 < y < 1.0):
        return False
    return not any(left < x < right and bottom < y < top for left, right, bottom, top in _BOXES)


def doors_between(start: ArrayLike, goal: ArrayLike) -> int:
    """Doors on the shortest way between two points [2]: none in one room, two between opposite rooms."""
    return sum((here < 0.5) != (there < 0.5) for here, there in zip(np.asarray(start), np.asarray(goal), strict=True))


def read_pair(name: str, values: ArrayLike) -> Point:
    """Read two finite numbers from values [2]."""
    array = np.asarray(values)
    if array.shape != (2,):
        raise ValueError(f"{name} must have shape (2,), got shape {array.shape}")
    x, y = array.tolist()
    if not (math.isfinite(x) and math.isfinite(y)):
        raise ValueError(f"{name} must be finite, got ({x}, {y})")
    return x, y


def read_free_point(name: str, values: ArrayLike) -> Point:
    """Read a point in free space from values [2]."""
    x, y = read_pair(name, values)
    if not is_free(x, y):
        raise ValueError(f"{name} must lie in the unit square and at least {CLEARANCE} from every wall, got ({x}, {y})")
    return x, y


def round_point(x: float, y: float) -> Point:
    """Round a point to float32; a free point stays free."""
    return float(np.float32(x)), float(np.float32(y))


def _first_contact(x: float, y: float, dx: float, dy: float) -> tuple[float, int, float]:
    """Follow a displacement from a free point to the first box it would enter.

    Returns the fraction travelled, the axis of the face (-1 and fraction 1 without contact) and its coordinate.
    """
    fraction, axis, face = 1.0, -1, 0.0
    end_x, end_y = x + dx, y + dy
    for left, right, bottom, top in _BOXES:
        # Skip boxes outside the bounding box of the motion; the exits of the others lie ahead on both axes.
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
    """`move` on plain floats: the end point, and the axis on which a wall stopped the motion, or -1."""
    fraction, axis, face = _first_contact(x, y, dx, dy)
    end_x = face if axis == 0 else x + fraction * dx
    end_y = face if axis == 1 else y + fraction * dy
    return round_point(end_x, end_y), axis


def slide(x: float, y: float, dx: float, dy: float) -> list[Point]:
    """Move, and slide along a wall that stops the motion: the end points of the one or two motions."""
    contact, axis = _advance(x, y, dx, dy)
    if axis < 0:
        return [contact]
    along = (0.0, y + dy - contact[1]) if axis == 0 else (x + dx - contact[0], 0.0)
    return [contact, _advance(*contact, *along)[0]]


def _is_visible(start: Point, end: Point) -> bool:
    """Whether the line segment between two free points stays in free space."""
    return _first_contact(start[0], start[1], end[0] - start[0], end[1] - start[1])[1] < 0


def move(position: ArrayLike, displacement: ArrayLike) -> FloatArray:
    """Move a free position [2] by a displacement [2], and stop at the first wall, at distance `CLEARANCE`.

    The motion does not slide along the wall; see `slide`. The result [2] is free and exact in float32.
    """
    return np.array(_advance(*read_free_point("position", position), *read_pair("displacement", displacement))[0])


class Roadmap:
    """Shortest paths over a visibility graph of fixed points."""

    def __init__(self, nodes: Sequence[Point]) -> None:
        """Connect all pairs of points that are visible from each other."""
        self._nodes = list(nodes)
        self._edges: list[list[tuple[int, float]]] = [
            [(j, math.dist(a, b)) for j, b in enumerate(self._nodes) if j != i and _is_visible(a, b)]
            for i, a in enumerate(self._nodes)
        ]

    def path(self, start: Point, goal: Point) -> list[Point]:
        """Waypoints from start to goal, both included, by Dijkstra's algorithm from the goal."""
        if _is_visible(start, goal):
            return [start, goal]
        costs = [math.inf] * len(self._nodes)  # length from a node to the goal
        following = list(range(len(self._nodes)))  # the next node towards the goal; the last node points to itself
        queue = [(math.dist(node, goal), i, i) for i, node in enumerate(self._nodes) if _is_visible(node, goal)]
        heapq.heapify(queue)
        best, first = math.inf, -1
        while queue:
            cost, i, after = heapq.heappop(queue)
            # No remaining node can give a shorter path. With >=, a node at the start itself ends the search too, so the
            # first waypoint always differs from the start.
            if cost >= best:
                break
            if cost >= costs[i]:
                continue
            costs[i], following[i] = cost, after
            through = cost + math.dist(start, self._nodes[i])
            if through < best and _is_visible(start, self._nodes[i]):
                best, first = through, i
            for j, length in self._edges[i]:
                if cost + length < costs[j]:
                    heapq.heappush(queue, (cost + length, j, i))
        assert first >= 0, "rooms are convex, so the nodes of a room are visible from every point in it"
        waypoints = [start, self._nodes[first]]
        while following[first] != first:
            first = following[first]
            waypoints.append(self._nodes[first])
        return [*waypoints, goal]


def doorway_points(depth: float, inset: float) -> list[Point]:
    """Four points per doorway: `depth` from the wall on both sides, `inset` from both posts."""
    nodes: list[Point] = []
    for (low_x, low_y), (high_x, high_y) in DOORWAYS.tolist():
        if low_x == high_x:
            nodes += [(low_x + side, y) for side in (-depth, depth) for y in (low_y + inset, high_y - inset)]
        else:
            nodes += [(x, low_y + side) for side in (-depth, depth) for x in (low_x + inset, high_x - inset)]
    return nodes


# A shortest path bends only at convex corners of boxes, and those are at the doorways.
_POSTS = Roadmap(doorway_points(CLEARANCE, CLEARANCE))


def shortest_path(start: ArrayLike, goal: ArrayLike) -> FloatArray:
    """Waypoints [N, 2] of the shortest path in free space from start [2] to goal [2], both included.

    Paths pass doorposts at `CLEARANCE`. Between neighbouring rooms, a path through three doorways can be shorter than
    the path through one.
    """
    return np.array(_POSTS.path(read_free_point("start", start), read_free_point("goal", goal)))


def shortest_path_length(start: ArrayLike, goal: ArrayLike) -> float:
    """Length of the shortest path in free space from start [2] to goal [2]."""
    path = shortest_path(start, goal)
    return float(np.hypot(*np.diff(path, axis=0).T).sum())
