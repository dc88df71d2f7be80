"""Searches with a time limit: in time where times are known, narrower first, then shorter, unchanged if in time."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from trajectory_transformer.config import SearchConfig
from trajectory_transformer.evaluate import evaluate
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.search.deadline import Deadline

SEARCH = SearchConfig(beam_width=16, horizon=4, context=1)
OBSERVATION = np.zeros(3, np.float32)


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(deadline: Deadline, clock: Clock, width: int, count: int, seconds_each: float) -> list[int]:
    """Widths of the steps of a search in which every candidate takes the same time."""
    deadline.begin()
    taken = []
    for index in range(count):
        width = deadline.width(width, count - index)
        if not width:
            break
        taken.append(width)
        clock.now += width * seconds_each
    deadline.finish()
    return taken


def test_a_search_in_time_is_not_changed() -> None:
    clock = Clock()
    deadline = Deadline(1.0, clock)
    for _ in range(3):
        assert steps(deadline, clock, 16, 4, 0.001) == [16] * 4
        assert not deadline.shortened


@pytest.mark.parametrize("slowdown", [2, 5, 20, 100])
def test_a_known_search_is_never_late_when_the_machine_becomes_slower(slowdown: float) -> None:
    clock = Clock()
    deadline = Deadline(0.1, clock)
    steps(deadline, clock, 16, 4, 0.001)
    steps(deadline, clock, 1, 4, 0.001)
    steps(deadline, clock, 16, 4, 0.001 * slowdown)  # the first slow search can be late: nobody could know
    for _ in range(50):
        started = clock.now
        widths = steps(deadline, clock, 16, 4, 0.001 * slowdown)
        assert clock.now - started <= 0.1 + 1e-9
        if 0.001 * slowdown <= 0.1 / 1.25:
            assert widths and deadline.shortened


def test_the_beam_becomes_narrower_before_the_plan_becomes_shorter() -> None:
    clock = Clock()
    deadline = Deadline(0.1, clock)
    for width in (16, 8, 4, 2, 1):
        steps(deadline, clock, width, 4, 0.001)
    widths = steps(deadline, clock, 64, 4, 0.001)
    assert len(widths) == 4 and widths[0] < 64


@pytest.mark.parametrize("kind", ["return", "imitate"])
def test_a_generous_deadline_gives_the_same_actions(tiny_model: TrajectoryModel, kind: str) -> None:
    plain, limited = (
        Planner(tiny_model, kind=kind, search=SEARCH, deadline_ms=limit)  # type: ignore[arg-type]
        for limit in (None, 60_000.0)
    )
    for index in range(4):
        observation = OBSERVATION + 0.1 * index
        np.testing.assert_array_equal(plain.act(observation, reward=0.5), limited.act(observation, reward=0.5))


@pytest.mark.parametrize("kind", ["return", "imitate"])
def test_an_impossible_deadline_still_gives_an_action(tiny_model: TrajectoryModel, kind: str) -> None:
    planner = Planner(tiny_model, kind=kind, search=SEARCH, deadline_ms=0.001)  # type: ignore[arg-type]
    policy = planner.policy()
    planner._one = policy
    assert planner.act(OBSERVATION).shape == (2,)
    assert (policy.num_plans, policy.num_shortened, policy.num_late) == (1, 1, 1)


def test_wrong_deadlines_are_refused(tiny_model: TrajectoryModel) -> None:
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="deadline_ms must be above 0"):
            Planner(tiny_model, deadline_ms=value)


def _spin() -> None:
    while True:
        pass


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the cores busy."""
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for each in busy:
        each.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        for each in busy:
            each.kill()
            each.join()


def test_plans_are_in_time_under_load(tiny_model: TrajectoryModel) -> None:
    search = SearchConfig(beam_width=64, horizon=6, context=1)
    free = Planner(tiny_model, search=search)
    free.act(OBSERVATION)
    started = time.perf_counter()
    free.act(OBSERVATION, reward=0.0)
    full = time.perf_counter() - started
    planner = Planner(tiny_model, search=search, deadline_ms=1000 * full)
    policy = planner.policy()
    planner._one = policy
    with load(3):
        for index in range(40):
            planner.act(OBSERVATION + 0.01 * index, reward=0.0)
    assert policy.num_plans == 40
    # A core that is taken away in the middle of a step cannot be helped; without a deadline most plans were late.
    assert policy.num_late <= 8, sorted(policy.plan_seconds)
    assert policy.num_shortened >= 10


def test_evaluate_reports_shortened_plans() -> None:
    from trajectory_transformer.collect import collect
    from trajectory_transformer.config import ModelConfig, TokenConfig

    data = collect("CartPole-v1", episodes=3)
    model = TrajectoryModel.create(data, TokenConfig(num_bins=4), ModelConfig(window=2, num_layers=1, width=8), seed=0)
    for limit, share in ((0.001, 1.0), (60_000.0, 0.0)):
        found = evaluate(Planner(model, search=SEARCH, deadline_ms=limit), episodes=2, num_envs=2)
        assert found.metrics["shortened_plans"] == share
    assert "shortened_plans" not in evaluate(Planner(model, search=SEARCH), episodes=1).metrics
