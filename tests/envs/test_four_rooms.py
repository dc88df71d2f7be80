"""Four rooms: exact motion, shortest paths against brute force, the Gymnasium API, the demonstrator."""

import importlib
import itertools
import math
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trajectory_transformer import envs
from trajectory_transformer.envs import four_rooms
from trajectory_transformer.envs.four_rooms import Demonstrator, FourRooms
from trajectory_transformer.envs.rooms import (
    CLEARANCE,
    DOORWAY_CENTERS,
    DOORWAYS,
    WALLS,
    FloatArray,
    move,
    shortest_path,
    shortest_path_length,
)

Pair = tuple[float, float]
ExactPoint = tuple[Fraction, Fraction]


def exact(point: Pair | FloatArray) -> ExactPoint:
    """The point [2] as exact rationals."""
    x, y = (float(value) for value in point)
    return Fraction(x), Fraction(y)


EXACT_WALLS = [(exact(low), exact(high)) for low, high in WALLS]


def turn(a: ExactPoint, b: ExactPoint, c: ExactPoint) -> Fraction:
    """Twice the signed area of a triangle."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def segments_touch(a: ExactPoint, b: ExactPoint, c: ExactPoint, d: ExactPoint) -> bool:
    """Whether the closed segments ab and cd share a point, ends and overlaps included."""
    for axis in (0, 1):
        if max(a[axis], b[axis]) < min(c[axis], d[axis]) or max(c[axis], d[axis]) < min(a[axis], b[axis]):
            return False
    return turn(a, b, c) * turn(a, b, d) <= 0 and turn(c, d, a) * turn(c, d, b) <= 0


def touches_wall(start: Pair | FloatArray, end: Pair | FloatArray) -> bool:
    """Whether the straight path between two points meets any wall, decided exactly."""
    a, b = exact(start), exact(end)
    return any(segments_touch(a, b, low, high) for low, high in EXACT_WALLS)


def gap(point: Pair | FloatArray) -> Fraction:
    """Exact distance to the nearest wall, the larger of its components."""
    x, y = exact(point)
    return min(max(low[0] - x, x - high[0], low[1] - y, y - high[1]) for low, high in EXACT_WALLS)


def is_free(point: Pair | FloatArray) -> bool:
    """Whether a point is inside the square and clear of every wall, decided exactly."""
    return 0 < point[0] < 1 and 0 < point[1] < 1 and gap(point) >= Fraction(CLEARANCE)


# Coordinates of wall ends and box faces, where rounding errors would show.
SPECIAL = sorted({float(v) + side for v in WALLS.ravel() for side in (-CLEARANCE, 0.0, CLEARANCE)})
coordinates = st.one_of(
    st.floats(0.0, 1.0), st.floats(0.0, 1.0, width=32), st.sampled_from(SPECIAL), st.sampled_from([0.25, 0.1875, 0.75])
)
free_points = st.tuples(coordinates, coordinates).filter(is_free)
in_doorways = st.builds(
    lambda door, along, across: (
        (0.5 + across * CLEARANCE, DOORWAYS[door, 0, 1] + along * 8 / 64)
        if door < 2
        else (DOORWAYS[door, 0, 0] + along * 8 / 64, 0.5 + across * CLEARANCE)
    ),
    st.integers(0, 3),
    st.floats(0.0, 1.0),
    st.floats(-2.0, 2.0),
).filter(is_free)
positions = st.one_of(free_points, in_doorways)
lengths = st.one_of(
    st.floats(-5.0, 5.0), st.sampled_from([0.0, CLEARANCE, -CLEARANCE, 5e-324, -1e-12, 0.5, -0.5, 1e300, -1e300])
)


def test_segments_touch_detects_crossing_touching_overlap_and_miss() -> None:
    def touch(*points: Pair) -> bool:
        a, b, c, d = map(exact, points)
        return segments_touch(a, b, c, d)

    assert touch((0, 0), (1, 1), (0, 1), (1, 0))
    assert touch((0, 0), (1, 0), (1, 0), (1, 1))
    assert touch((0, 0), (2, 0), (1, 0), (3, 0))
    assert not touch((0, 0), (1, 0), (2, 0), (3, 0))
    assert not touch((0, 0), (1, 1), (1, 0), (2, 0.5))


@settings(max_examples=600, deadline=None)
@given(position=positions, displacement=st.tuples(lengths, lengths))
def test_no_motion_crosses_a_wall(position: Pair, displacement: Pair) -> None:
    end = move(position, displacement)
    assert is_free(end)
    assert not touches_wall(position, end)
    np.testing.assert_array_equal(end, end.astype(np.float32))


@settings(max_examples=600, deadline=None)
@given(
    position=positions,
    target=st.tuples(st.sampled_from(SPECIAL), st.sampled_from(SPECIAL)),
    stretch=st.sampled_from([0.5, 1.0, 1.0 + 1e-15, 1.5, 20.0]),
)
def test_motion_towards_corners_and_posts_never_crosses_a_wall(position: Pair, target: Pair, stretch: float) -> None:
    end = move(position, [(t - p) * stretch for t, p in zip(target, position, strict=True)])
    assert is_free(end)
    assert not touches_wall(position, end)


@settings(max_examples=300, deadline=None)
@given(position=positions, displacement=st.tuples(lengths, lengths))
def test_a_stopped_motion_ends_on_its_line_exactly_at_the_clearance(position: Pair, displacement: Pair) -> None:
    end = move(position, displacement)
    (x, y), (dx, dy), (end_x, end_y) = exact(position), exact(displacement), exact(end)
    rounding = Fraction(1, 2**25)
    if max(abs(x + dx - end_x), abs(y + dy - end_y)) > rounding:
        assert gap(end) == Fraction(CLEARANCE)
        off_line = dx * (end_y - y) - dy * (end_x - x)  # distance from the line times length of the displacement
        assert off_line**2 <= 2 * rounding**2 * (dx**2 + dy**2)


@pytest.mark.parametrize(
    ("position", "displacement", "expected"),
    [
        ((0.25, 0.375), (0.125, 0.0625), (0.375, 0.4375)),  # no obstacle
        ((0.25, 0.375), (1.0, 0.0), (0.5 - CLEARANCE, 0.375)),  # perpendicular to a wall
        ((0.25, 0.375), (-9.0, 0.0), (CLEARANCE, 0.375)),  # the outer wall
        ((0.25, 0.375), (0.5, 0.125), (0.5 - CLEARANCE, 0.4375 - CLEARANCE / 4)),  # oblique: stops, does not slide
        ((0.25, 0.1875), (0.5, 0.0), (0.75, 0.1875)),  # through the south doorway
        ((0.5, 0.1875), (0.0, 1.0), (0.5, 16 / 64 - CLEARANCE)),  # in the doorway, along the wall, against the post
        ((0.25, 16 / 64), (0.5, 0.0), (0.5 - CLEARANCE, 16 / 64)),  # straight at a post
        ((0.25, 31 / 128), (0.5, 0.0), (0.5 - CLEARANCE, 31 / 128)),  # within the clearance of a post
        ((0.25, 16 / 64 - CLEARANCE), (0.5, 0.0), (0.75, 16 / 64 - CLEARANCE)),  # past a post, touching the face
        (
            (0.375 - CLEARANCE, 24 / 64 - CLEARANCE),
            (0.25, -0.25),
            (0.625 - CLEARANCE, 8 / 64 - CLEARANCE),
        ),  # past a corner
        ((0.5 - CLEARANCE, 0.375), (0.0, -0.25), (0.5 - CLEARANCE, 0.125)),  # along a face
        ((0.5 - CLEARANCE, 0.375), (1e-9, -0.25), (0.5 - CLEARANCE, 0.375)),  # into a face that it touches
        ((0.75, 0.75), (0.5, 0.5), (1 - CLEARANCE, 1 - CLEARANCE)),  # into a corner
        ((0.25, 0.25), (0.5, 0.5), (0.5 - CLEARANCE, 0.5 - CLEARANCE)),  # into the corner at the centre
    ],
)
def test_motion_stops_at_the_computed_contact(position: Pair, displacement: Pair, expected: Pair) -> None:
    np.testing.assert_allclose(move(position, displacement), expected, rtol=0, atol=2.0**-25)


def test_trails_never_touch_a_wall_and_contain_every_observation() -> None:
    env = FourRooms(max_step=1.0)
    env.action_space.seed(0)
    for seed in range(5):
        seen = [env.reset(seed=seed)[0]["observation"]]
        seen += [env.step(env.action_space.sample())[0]["observation"] for _ in range(100)]
        assert not any(touches_wall(a, b) for a, b in itertools.pairwise(env.trail))
        visited = set(map(tuple, env.trail.tolist()))
        assert all(tuple(position.tolist()) in visited for position in seen)


def test_lines_between_observations_touch_no_wall() -> None:
    env = FourRooms()
    env.action_space.seed(0)
    for seed in range(5):
        seen = [env.reset(seed=seed)[0]["observation"]]
        seen += [env.step(env.action_space.sample())[0]["observation"] for _ in range(300)]
        assert not any(touches_wall(a, b) for a, b in itertools.pairwise(seen))


def test_a_step_into_a_wall_slides_along_it() -> None:
    env = FourRooms(max_step=0.0625)
    env.reset(options={"start": [0.46875, 0.375], "goal": [0.25, 0.125]})
    # The face is 1/64 away, a quarter of the step; the rest of the step goes upwards.
    observation = env.step([0.0625, 0.03125])[0]["observation"]
    np.testing.assert_array_equal(observation, [0.5 - CLEARANCE, 0.40625])
    np.testing.assert_array_equal(env.trail, [[0.46875, 0.375], [0.484375, 0.3828125], [0.484375, 0.40625]])
    # In a corner the agent cannot slide.
    for _ in range(3):
        observation = env.step([0.0625, 0.0625])[0]["observation"]
    np.testing.assert_array_equal(observation, [0.5 - CLEARANCE, 0.5 - CLEARANCE])


@settings(max_examples=300, deadline=None)
@given(start=positions, goal=positions)
@example(start=(0.5, 0.1875), goal=(0.5 + CLEARANCE, 2 / 64))
@example(start=(0.5 - CLEARANCE, 0.5 - CLEARANCE), goal=(0.5 + CLEARANCE, 0.5 + CLEARANCE))
def test_walking_the_shortest_path_reaches_the_goal(start: Pair, goal: Pair) -> None:
    path = shortest_path(start, goal)
    np.testing.assert_array_equal(path[[0, -1]], [start, goal])
    position = np.array(start)
    for waypoint in path[1:]:
        position = move(position, waypoint - position)
    np.testing.assert_allclose(position, goal, rtol=0, atol=2.0**-25)


# Free space is a ring of eight convex cells around the centre: the lower left room, the south passage, the lower right
# room, the east passage, the upper right room, the north passage, the upper left room, the west passage. Neighbouring
# cells share a gate, a segment at the end of a passage: both ends of each gate, in 64ths.
GATES = (
    np.array(
        [
            [[31, 9], [31, 15]],  # lower left | south
            [[33, 9], [33, 15]],  # south | lower right
            [[41, 31], [47, 31]],  # lower right | east
            [[41, 33], [47, 33]],  # east | upper right
            [[33, 45], [33, 51]],  # upper right | north
            [[31, 45], [31, 51]],  # north | upper left
            [[7, 33], [13, 33]],  # upper left | west
            [[7, 31], [13, 31]],  # west | lower left
        ]
    )
    / 64.0
)


def cell(point: Pair) -> int:
    """Index of the cell that contains a free point."""
    x, y = point
    if 31 / 64 < x < 33 / 64:
        return 1 if y < 0.5 else 5
    if 31 / 64 < y < 33 / 64:
        return 7 if x < 0.5 else 3
    return (0 if x < 0.5 else 2) if y < 0.5 else (6 if x < 0.5 else 4)


def sampled_length(start: Pair, goal: Pair) -> float:
    """Length of the shortest polyline through one of 121 points per gate, in both directions; cells are convex."""
    forward = (cell(goal) - cell(start)) % 8
    if forward == 0:
        return math.dist(start, goal)
    gates_forward = [(cell(start) + i) % 8 for i in range(forward)]
    gates_backward = [(cell(start) - 1 - i) % 8 for i in range(8 - forward)]
    lengths = []
    for gates in (gates_forward, gates_backward):
        points, costs = np.array([start]), np.zeros(1)
        for gate in gates:
            stops = np.linspace(GATES[gate, 0], GATES[gate, 1], 121)
            costs = (np.linalg.norm(stops[:, None] - points, axis=-1) + costs).min(axis=1)
            points = stops
        lengths.append(float((np.linalg.norm(points - np.array(goal), axis=-1) + costs).min()))
    return min(lengths)


def test_shortest_path_length_equals_brute_force_over_doorway_points() -> None:
    rng = np.random.default_rng(0)
    pairs = [pair for pair in rng.uniform(0.001, 0.999, (260, 2, 2)) if is_free(pair[0]) and is_free(pair[1])]
    # Uniform points are rarely in a passage, so some are added there.
    inside = rng.uniform([31, 9], [33, 15], (20, 2)) / 64
    pairs += [np.array([point, goal]) for point, (_, goal) in zip(inside, pairs, strict=False)]
    found = [shortest_path_length(start, goal) for start, goal in pairs]
    expected = [sampled_length((start[0], start[1]), (goal[0], goal[1])) for start, goal in pairs]
    assert len(pairs) > 215
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_paths_within_a_room_are_straight() -> None:
    np.testing.assert_array_equal(shortest_path((0.1, 0.1), (0.4, 0.4)), [[0.1, 0.1], [0.4, 0.4]])
    assert shortest_path_length((0.1, 0.1), (0.4, 0.4)) == pytest.approx(0.3 * math.sqrt(2))


def test_paths_through_a_doorway_in_line_are_straight() -> None:
    np.testing.assert_array_equal(shortest_path((0.25, 0.2), (0.75, 0.2)), [[0.25, 0.2], [0.75, 0.2]])


def test_paths_around_a_post_bend_at_its_two_faces() -> None:
    post = 16 / 64 - CLEARANCE
    path = shortest_path((0.25, 0.375), (0.75, 0.375))
    np.testing.assert_array_equal(
        path, [[0.25, 0.375], [0.5 - CLEARANCE, post], [0.5 + CLEARANCE, post], [0.75, 0.375]]
    )
    # In 64ths: 15 right and 9 down to the first face, 2 to the second, 15 right and 9 up.
    assert shortest_path_length((0.25, 0.375), (0.75, 0.375)) == pytest.approx((2 * math.hypot(15, 9) + 2) / 64)


def test_paths_from_a_post_do_not_repeat_their_start() -> None:
    post = 16 / 64 - CLEARANCE
    path = shortest_path((0.5 - CLEARANCE, post), (0.75, 0.375))
    np.testing.assert_array_equal(path, [[0.5 - CLEARANCE, post], [0.5 + CLEARANCE, post], [0.75, 0.375]])


def test_a_path_through_three_doorways_can_be_shorter_than_through_one() -> None:
    # From below the west doorway to below the east one, through the north instead of the south doorway. In 64ths from
    # (10, 31) to (44, 31); the path bends at (31, 45), (33, 45) or at (31, 15), (33, 15).
    start, goal = (10 / 64, 31 / 64), (44 / 64, 31 / 64)
    by_north = (math.hypot(21, 14) + 2 + math.hypot(11, 14)) / 64
    by_south = (math.hypot(21, 16) + 2 + math.hypot(11, 16)) / 64
    assert by_north < by_south
    assert shortest_path_length(start, goal) == pytest.approx(by_north)


def test_doorways_are_the_gaps_between_the_inner_walls() -> None:
    np.testing.assert_array_equal(DOORWAY_CENTERS, [[0.5, 0.1875], [0.5, 0.75], [0.15625, 0.5], [0.6875, 0.5]])
    lengths_of_inner_walls = np.abs(WALLS[4:, 1] - WALLS[4:, 0]).sum()
    assert lengths_of_inner_walls + 4 * 8 / 64 == 2.0
    with pytest.raises(ValueError, match="read-only"):
        WALLS[0, 0, 0] = 1.0


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_the_registered_environment_passes_the_gymnasium_checker(render_mode: str | None) -> None:
    env = gymnasium.make(envs.FOUR_ROOMS_ID, render_mode=render_mode)
    check_env(env.unwrapped)
    assert env.spec is not None and env.spec.max_episode_steps == 200


def test_reloading_the_module_does_not_register_twice() -> None:
    spec = gymnasium.spec("tt/FourRooms-v0")
    importlib.reload(envs)
    assert gymnasium.spec("tt/FourRooms-v0") is spec


def test_reward_and_termination_on_the_step_that_reaches_the_goal() -> None:
    env = FourRooms(max_step=0.0625, success_radius=0.0625)
    observation, info = env.reset(options={"start": [0.125, 0.125], "goal": [0.375, 0.125]})
    np.testing.assert_array_equal(observation["desired_goal"], np.array([0.375, 0.125], dtype=np.float32))
    assert info == {"success": False, "path_ratio": 1.0}
    for expected in (0.1875, 0.25):
        observation, reward, terminated, truncated, info = env.step([0.0625, 0.0])
        np.testing.assert_array_equal(observation["observation"], np.array([expected, 0.125], dtype=np.float32))
        np.testing.assert_array_equal(observation["achieved_goal"], observation["observation"])
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    _, reward, terminated, truncated, info = env.step([7.0, 0.0])  # clipped to 0.0625
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"success": True, "path_ratio": 1.0}


def test_path_ratio_includes_detours() -> None:
    env = FourRooms(max_step=0.0625, success_radius=0.0625)
    env.reset(options={"start": [0.25, 0.25], "goal": [0.25, 0.375]})
    infos = [env.step(action)[-1] for action in ([0.0625, 0.0], [-0.0625, 0.0], [0.0, 0.0625])]
    assert infos[-1] == {"success": True, "path_ratio": (3 * 0.0625 + 0.0625) / 0.125}


def test_path_ratio_counts_only_motion_that_walls_allow() -> None:
    env = FourRooms(max_step=0.0625)
    env.reset(options={"start": [0.0625, 0.375], "goal": [0.25, 0.375]})
    for _ in range(3):
        info = env.step([-0.0625, 0.0])[-1]
    assert info["path_ratio"] == ((0.0625 - CLEARANCE) + (0.25 - CLEARANCE)) / 0.1875


def test_success_depends_only_on_distance_even_through_a_wall() -> None:
    env = FourRooms()
    env.reset(options={"start": [0.46, 0.375], "goal": [0.53, 0.375]})
    assert env.step([0.03, 0.0])[1:3] == (1.0, True)


def test_episodes_are_reproducible_and_depend_on_the_seed() -> None:
    def episode(seed: int) -> FloatArray:
        env = FourRooms()
        env.action_space.seed(0)
        first = env.reset(seed=seed)[0]
        steps = [env.step(env.action_space.sample())[0]["observation"] for _ in range(20)]
        second = env.reset()[0]
        return np.array([first["desired_goal"], first["observation"], *steps, second["observation"]])

    np.testing.assert_array_equal(episode(3), episode(3))
    assert not np.any(episode(3) == episode(4))


def test_starts_and_goals_are_uniform_in_free_space_and_apart() -> None:
    env = FourRooms()
    env.reset(seed=0)
    drawn = [env.reset()[0] for _ in range(2000)]
    starts = np.array([observation["observation"] for observation in drawn])
    goals = np.array([observation["desired_goal"] for observation in drawn])
    assert np.linalg.norm(starts.astype(np.float64) - goals, axis=1).min() > 0.05
    # Free area of each of 4 x 4 squares, by column and row, in units of 1/64^2: 15 x 15 of a room plus a part of the
    # passages (2 x 6 each: south in row 0, north half in row 2 and half in row 3, west in column 0, east in column 2).
    area = np.full((4, 4), 225) + np.array([[0, 6, 6, 0], [6, 0, 3, 3], [6, 6, 9, 3], [0, 0, 0, 0]])
    assert area.sum() == 4 * 30 * 30 + 4 * 2 * 6
    expected = 2000 * area / area.sum()
    for points in (starts, goals):
        assert all(is_free(point) for point in points)
        counts = np.histogram2d(points[:, 0], points[:, 1], bins=4, range=[[0, 1], [0, 1]])[0]
        assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees of freedom, p = 0.001


def test_with_a_given_start_or_goal_the_other_is_random() -> None:
    env = FourRooms(success_radius=0.5)
    for seed in range(50):
        observation, _ = env.reset(seed=seed, options={"goal": [0.25, 0.25]})
        assert math.dist(observation["observation"], (0.25, 0.25)) > 0.5
        observation, _ = env.reset(options={"start": [0.25, 0.25]})
        assert math.dist(observation["desired_goal"], (0.25, 0.25)) > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"start": [0.5, 0.375]},
            r"start must lie in the unit square and at least .* from every wall, got \(0.5, 0.375\)",
        ),
        ({"goal": [1.5, 0.375]}, r"goal must lie in the unit square.*got \(1.5, 0.375\)"),
        ({"goal": [0.1]}, r"goal must have shape \(2,\), got shape \(1,\)"),
        ({"goal": [0.1, math.nan]}, r"goal must be finite, got \(0.1, nan\)"),
        ({"gaol": [0.1, 0.1]}, r"reset options are 'start' and 'goal', got \['gaol'\]"),
        ({"start": [0.25, 0.25], "goal": [0.25, 0.25]}, "more than the success radius 0.05 apart"),
    ],
)
def test_reset_refuses_invalid_options(options: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FourRooms().reset(seed=0, options=options)


def test_invalid_arguments_are_refused() -> None:
    env = FourRooms()
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset before step"):
        env.step([0.0, 0.0])
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action must be finite, got \(nan, 0.0\)"):
        env.step([math.nan, 0.0])
    with pytest.raises(ValueError, match=r"action must have shape \(2,\), got shape \(1, 2\)"):
        env.step([[0.0, 0.0]])
    with pytest.raises(ValueError, match="position must lie in the unit square"):
        move((0.5, 0.375), (0.1, 0.0))
    with pytest.raises(ValueError, match=r"max_step must lie in \(0, 1\], got 0"):
        FourRooms(max_step=0)
    with pytest.raises(ValueError, match=r"success_radius must lie in \(0, 0.5\], got 0.6"):
        FourRooms(success_radius=0.6)
    with pytest.raises(ValueError, match="render_mode must be None or one of .*, got 'human'"):
        FourRooms(render_mode="human")
    with pytest.raises(ValueError, match="noise must be finite and at least 0, got -1"):
        Demonstrator(noise=-1)
    with pytest.raises(ValueError, match=r"wander must lie in \[0, 1\), got 1"):
        Demonstrator(wander=1)


def demonstrate(env: FourRooms, demonstrator: Demonstrator, seed: int, options: dict[str, Pair] | None) -> float:
    """Path ratio of one demonstration; infinite if it takes more than 200 steps."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed, options=options)
    for _ in range(200):
        action = demonstrator.act(observation["observation"], observation["desired_goal"], rng)
        assert action in env.action_space
        observation, _, terminated, _, info = env.step(action)
        if terminated:
            return float(info["path_ratio"])
    return math.inf


def test_the_demonstrator_always_reaches_the_goal_on_short_paths() -> None:
    ratios = [demonstrate(FourRooms(), Demonstrator(), seed, None) for seed in range(500)]
    assert max(ratios) < math.inf
    assert np.mean(ratios) < 1.15


def test_wandering_replaces_a_share_of_the_steps_by_random_ones() -> None:
    rng = np.random.default_rng(0)
    observation, goal = (0.25, 0.25), (0.375, 0.25)
    steady = Demonstrator(noise=0.0).act(observation, goal, rng)
    np.testing.assert_array_equal(steady, np.array([0.05, 0.0], dtype=np.float32))
    actions = np.array([Demonstrator(noise=0.0, wander=0.25).act(observation, goal, rng) for _ in range(4000)])
    random = actions[(actions != steady).any(axis=1)]
    assert len(random) / 4000 == pytest.approx(0.25, abs=0.03)  # more than four standard deviations
    assert np.abs(random).max() <= 0.05
    np.testing.assert_allclose(random.mean(axis=0), 0.0, rtol=0, atol=0.004)
    np.testing.assert_allclose(random.std(axis=0), 0.05 / math.sqrt(3), rtol=0.05)


@settings(max_examples=200, deadline=None)
@given(start=positions, goal=positions)
@example(start=(0.5 - 5 / 128, 8 / 64 + 5 / 128), goal=(0.5 + CLEARANCE, CLEARANCE))  # starts on a waypoint
def test_without_noise_the_demonstrator_takes_nearly_the_shortest_path(start: Pair, goal: Pair) -> None:
    if math.dist(start, goal) > 0.051:
        ratio = demonstrate(FourRooms(), Demonstrator(noise=0.0), 0, {"start": start, "goal": goal})
        assert (ratio - 1.0) * shortest_path_length(start, goal) < 0.3  # waypoints keep a margin from the posts


def test_rendered_images_show_walls_doorways_trail_agent_and_goal() -> None:
    env = FourRooms(render_mode="rgb_array")
    env.reset(options={"start": [0.25, 0.25], "goal": [0.75, 0.25]})
    for _ in range(3):
        env.step([0.0, 0.05])
    image = env.render()
    assert image is not None and image.shape == (256, 256, 3) and image.dtype == np.uint8

    def color(x: float, y: float) -> tuple[int, ...]:
        return tuple(image[255 - int(y * 256), int(x * 256)].tolist())

    assert color(0.25, 0.4) == four_rooms.AGENT
    assert color(0.25, 0.3) == four_rooms.TRAIL
    assert color(0.75, 0.25) == four_rooms.GOAL
    assert color(0.75, 0.29) == four_rooms.GOAL_REGION
    assert color(0.5, 0.375) == color(0.999, 0.3) == color(0.3, 0.001) == four_rooms.WALL
    assert all(color(x, y) == four_rooms.BACKGROUND for x, y in DOORWAY_CENTERS)


def test_rendering_without_a_render_mode_warns() -> None:
    env = FourRooms()
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render returns None because render_mode is None"):
        assert env.render() is None


def test_the_race_has_a_fixed_goal_and_a_negative_reward_per_step() -> None:
    env = gymnasium.make("tt/FourRoomsRace-v0")
    for seed in range(3):
        seen, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(seen["desired_goal"], np.array([0.9, 0.9], np.float32))
    env.reset(options={"start": [0.9, 0.76]})
    assert [env.step(np.array([0.0, 0.05], np.float32))[1:3] for _ in range(2)] == [(-1.0, False), (0.0, True)]
    with pytest.raises(ValueError, match="goal must lie in the unit square"):
        FourRooms(goal=(0.5, 0.4))
    with pytest.raises(ValueError, match="step_reward must be finite, got nan"):
        FourRooms(step_reward=math.nan)
