"""Every algorithm learns a small task in seconds."""

import numpy as np
import pytest

from tests.baselines.conftest import SMALL
from trajectory_transformer.baselines import Baseline, train_baseline
from trajectory_transformer.data.episode import Dataset, Episode, FloatArray
from trajectory_transformer.rollout import Step

CQL = {
    "steps": 500,
    "learning_rate": 3e-3,
    "actor_learning_rate": 3e-3,
    "clone_steps": 50,
    "conservative_weight": 1.0,
    "num_actions": 4,
}


def play(baseline: Baseline, seed: int, goals: FloatArray | None = None) -> float:
    """Mean distance of 50 points to 0 (or to their goals) after ten steps."""
    policy = baseline.policy(seed)
    positions = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]
    target = np.zeros((50, 0), np.float32) if goals is None else goals
    no = np.zeros(50, np.bool_)
    for _ in range(10):
        step = Step(positions, np.zeros(50, np.float32), no, target, ~no)
        positions = np.clip(positions + 0.4 * policy.act(step), -2, 2).astype(np.float32)
    assert len(policy.plan_seconds) == 10
    return float(np.abs(positions - (0 if goals is None else goals)).mean())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("td3bc", {"steps": 600, "learning_rate": 3e-3}),
        ("iql", {"steps": 600, "learning_rate": 3e-3, "temperature": 10.0, "discount": 0.8}),
        ("cql", CQL),
        ("cql", {**CQL, "bfloat16": True}),
    ],
)
def test_algorithms_with_rewards_improve_on_random_actions(
    points: Dataset, name: str, settings: dict[str, object]
) -> None:
    baseline = train_baseline(points, algorithm=name, settings={**SMALL, **settings}, seeds=[1], device="cpu")
    assert play(baseline, 1) < 0.15


def demonstrations(count: int, *, goals: bool) -> Dataset:
    """Points that move to 0, or to a goal of their own, with noise; no rewards."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(count):
        goal = rng.uniform(-1, 1) if goals else 0.0
        positions, actions = [rng.uniform(-1, 1)], []
        for _ in range(20):
            actions.append(np.clip((goal - positions[-1]) / 0.4 + 0.1 * rng.normal(), -1, 1))
            positions.append(positions[-1] + 0.4 * actions[-1])
        arrays = [np.array(part, np.float32)[:, None] for part in (positions, actions)]
        given = np.array([goal], np.float32) if goals else None
        episodes.append(Episode(arrays[0], arrays[1], None, terminated=False, goal=given))
    return Dataset(tuple(episodes))


def test_behaviour_cloning_follows_demonstrations_without_rewards() -> None:
    baseline = train_baseline(
        demonstrations(40, goals=False),
        algorithm="bc",
        settings={**SMALL, "steps": 400, "learning_rate": 3e-3},
        device="cpu",
    )
    assert play(baseline, 0) < 0.1


def test_goals_are_part_of_what_a_policy_sees() -> None:
    data = demonstrations(80, goals=True)
    settings = {**SMALL, "steps": 600, "learning_rate": 3e-3}
    baseline = train_baseline(data, algorithm="bc", settings=settings, device="cpu")
    assert baseline.dims == (1, 1, 1)
    goals = np.linspace(0.8, -0.8, 50, dtype=np.float32)[:, None]
    assert play(baseline, 0, goals) < 0.15
    assert play(baseline, 0, -goals) < 0.15
