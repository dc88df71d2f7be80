"""The exact geometry of four rooms joined by four doorways: walls, motion, shortest paths.

The unit square is cut by the cross x = 0.5, y = 0.5 into four rooms. Walls are segments of zero width, and each of
the four arms of the cross has one doorway. Free space is every point of the square at least `CLEARANCE` from every
wall, measured per axis: each wall is widened to a box that nothing enters, although its faces may be touched.

Why no path ever meets a wall: a motion ends where it first meets a box, and the result is rounded to float32. All
faces are multiples of 2^-6 in [0, 1], hence exact in float32, so rounding cannot carry a point through one; and it
moves the end of the path by at most 2^-25, far less than the 2^-6 that parts a box's face from its wall.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
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


def is_free(x: float, y: float) -> bool:
    """Whether a point of the plane lies in free space; false for NaN."""
    if not (0.0 < x < 1.0 and 0.0 < y < 1.0):
        return False
    return not any(left < x < right and bottom < y < top for left, right, bottom, top in _BOXES)


def read_pair(name: str, values: ArrayLike) -> Point:
    """Read two finite numbers from values [2]."""
    array = np.asarray(values)
    if array.shape != (2,):
        raise ValueError(f"{name} must hold two numbers, shape (2,), got shape {array.shape}")
    x, y = array.tolist()
    if not (math.isfinite(x) and math.isfinite(y)):
        raise ValueError(f"{name} must be finite, got ({x}, {y})")
    return x, y


def read_free_point(name: str, values: ArrayLike) -> Point:
    """Read a point of free space from values [2]."""
    x, y = read_pair(name, values)
    if not is_free(x, y):
        raise ValueError(f"{name} must lie in the unit square, at least {CLEARANCE} from every wall, got ({x}, {y})")
    return x, y


def round_point(x: float, y: float) -> Point:
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
    return round_point(end_x, end_y), axis


def slide(x: float, y: float, dx: float, dy: float) -> list[Point]:
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
    return np.array(_advance(*read_free_point("position", position), *read_pair("displacement", displacement))[0])


class Roadmap:
    """Shortest paths whose turns are taken from a fixed set of points."""

    def __init__(self, nodes: Sequence[Point]) -> None:
        """Join all points that see each other."""
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


def beside_doorways(depth: float, inset: float) -> list[Point]:
    """Four points per doorway, on either side of the wall by `depth` and inside either post by `inset`."""
    nodes: list[Point] = []
    for (low_x, low_y), (high_x, high_y) in DOORWAYS.tolist():
        if low_x == high_x:
            nodes += [(low_x + side, y) for side in (-depth, depth) for y in (low_y + inset, high_y - inset)]
        else:
            nodes += [(x, low_y + side) for side in (-depth, depth) for x in (low_x + inset, high_x - inset)]
    return nodes


# Every bend of a shortest path is at a corner of a box, and only those at the doorways stand out into free space.
_POSTS = Roadmap(beside_doorways(CLEARANCE, CLEARANCE))


def shortest_path(start: ArrayLike, goal: ArrayLike) -> FloatArray:
    """Waypoints [N, 2] of the shortest path in free space from start [2] to goal [2], both included.

    Posts are passed at `CLEARANCE`. Between neighbouring rooms the way round through three doorways may be shorter
    than the way through one.
    """
    return np.array(_POSTS.path(read_free_point("start", start), read_free_point("goal", goal)))


def shortest_path_length(start: ArrayLike, goal: ArrayLike) -> float:
    """Length of the shortest path in free space from start [2] to goal [2]."""
    path = shortest_path(start, goal)
    return float(np.hypot(*np.diff(path, axis=0).T).sum())
