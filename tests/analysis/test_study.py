"""The study: splits and starts, and curves against a random walk whose likelihood is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.analysis.test_predictors import constant_policy
from tests.pets.test_ensemble import drifting
from trajectory_transformer.analysis.likelihood import Futures
from trajectory_transformer.analysis.predictors import EnsemblePredictor, Past
from trajectory_transformer.analysis.study import (
    FLOOR,
    Curves,
    StudyConfig,
    find_starts,
    held_out_masks,
    one_step_log_prob,
    oracle_of,
    run_study,
)
from trajectory_transformer.analysis.summary import curve_of, joined_curves, metric_steps, study_metrics
from trajectory_transformer.cli.study import CompareStudy
from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode, FloatArray
from trajectory_transformer.data.split import split_episodes
from trajectory_transformer.report.prediction import Panel, likelihood_figure

STD = 0.5
HORIZON = 8


def walk(rng: np.random.Generator, start: FloatArray, steps: int, *, terminated: bool = False) -> Episode:
    """A random walk with steps of STD from given states [T, 1] on; actions are zero."""
    after = start[-1] + STD * rng.normal(size=(steps, 1)).cumsum(axis=0)
    states = np.concatenate([start, after]).astype(np.float32)
    return Episode(states, np.zeros((len(states) - 1, 1), dtype=np.float32), None, terminated)


def walks(rng: np.random.Generator, *, groups: int = 3, visits: int = 300, common: int = 4) -> list[Episode]:
    """Groups of episodes that are equal up to step `common`."""
    found = []
    for group in range(groups):
        start = (group + rng.normal(size=(common + 1, 1))).astype(np.float32)
        found += [walk(rng, start, HORIZON + 3) for _ in range(visits)]
    return found


def test_a_split_is_a_function_of_its_seed_and_loses_nothing(tiny_dataset: Dataset) -> None:
    train, held_out = split_episodes(tiny_dataset, 0.3, seed=1)
    assert (len(train), len(held_out)) == (4, 2)
    again = split_episodes(tiny_dataset, 0.3, seed=1)
    assert [len(episode) for episode in again[1]] == [len(episode) for episode in held_out]
    lengths = sorted(len(episode) for part in (train, held_out) for episode in part)
    assert lengths == sorted(len(episode) for episode in tiny_dataset)
    others = {tuple(len(episode) for episode in split_episodes(tiny_dataset, 0.3, seed=seed)[1]) for seed in range(9)}
    assert len(others) > 1
    assert len(split_episodes(tiny_dataset, 0.01, seed=1)[1]) == 1
    with pytest.raises(ValueError, match=r"\(0, 1\), got 1"):
        split_episodes(tiny_dataset, 1.0, seed=1)


def test_episodes_with_a_common_beginning_share_a_start(rng: np.random.Generator) -> None:
    episodes = walks(rng, groups=2, visits=5)
    short = replace(episodes[2], observations=episodes[2].observations[:9], actions=episodes[2].actions[:8])
    episodes[2] = short
    starts = find_starts(episodes, count=9, horizon=HORIZON, context=3, seed=0)
    assert sorted((start.episode, start.step) for start in starts) == [(0, 4), (5, 4)]
    first = next(start for start in starts if start.episode == 0)
    np.testing.assert_array_equal(first.state, episodes[1].observations[4])
    np.testing.assert_array_equal(first.past_states, episodes[0].observations[1:4])
    assert first.past_actions.shape == (3, 1) and first.actions.shape == (HORIZON, 1)
    np.testing.assert_array_equal(first.visited[1], episodes[1].observations[5 : 5 + HORIZON])
    assert np.isnan(first.visited[4, 4:]).all() and not np.isnan(first.visited[4, :4]).any()


def test_single_episodes_start_at_seeded_steps_with_past_and_future(rng: np.random.Generator) -> None:
    episodes = [walk(rng, rng.normal(size=(1, 1)).astype(np.float32), steps) for steps in (30, 40, HORIZON, 3)]
    starts = find_starts(episodes, count=9, horizon=HORIZON, context=3, seed=0)
    assert {start.episode for start in starts} == {0, 1, 2}
    for start in starts:
        assert start.visited.shape == (1, HORIZON, 1) and not np.isnan(start.visited).any()
        assert len(start.past_states) == (0 if start.episode == 2 else 3)
    assert len(find_starts(episodes, count=1, horizon=HORIZON, context=3, seed=0)) == 1
    masks = held_out_masks(episodes, 0.5, 0)
    assert masks is not None and held_out_masks(episodes, 0.0, 0) is None
    hidden = find_starts(episodes, count=9, horizon=HORIZON, context=3, seed=0, masks=masks)
    assert [start.step for start in hidden] == [start.step for start in starts]
    shown = np.concatenate([np.append(start.past_states, start.state) for start in hidden])
    assert np.isnan(shown).any() and not np.isnan(np.concatenate([start.visited for start in hidden])).any()
    with pytest.raises(ValueError, match="no held-out episode has 100 steps after a start, the longest has 40"):
        find_starts(episodes, count=1, horizon=100, context=0, seed=0)


def test_a_start_needs_one_long_visit_and_one_without_is_reported(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    starts = rng.normal(size=(2, 3, 1)).astype(np.float32)
    fallen = [walk(rng, starts[0], steps, terminated=True) for steps in (HORIZON - 1, 2, 3)]
    mixed = [walk(rng, starts[1], steps, terminated=True) for steps in (3, HORIZON, 2)]
    found = find_starts([*fallen, *mixed], count=9, horizon=HORIZON, context=2, seed=0)
    assert [start.episode for start in found] == [4], "its longest visit is the first"
    assert np.isnan(found[0].visited).any(axis=2).sum(axis=1).tolist() == [0, HORIZON - 3, HORIZON - 2]
    np.testing.assert_array_equal(found[0].actions, mixed[1].actions[2:])
    assert f"1 of the starts left out: all visits from them are shorter than {HORIZON} steps" in caplog.text


def test_the_likelihood_of_a_random_walk_is_the_known_one(rng: np.random.Generator) -> None:
    starts = find_starts(walks(rng), count=3, horizon=HORIZON, context=2, seed=0)
    edges = [np.linspace(-12.0, 14.0, 261)]
    config = StudyConfig(horizon=HORIZON, samples=20_000, floor=1e-6)
    predictors = {
        "right": EnsemblePredictor(drifting(0.0, std=STD), constant_policy(0.0)),
        "wide": EnsemblePredictor(drifting(0.0, std=2 * STD), constant_policy(0.0)),
        "drifting": EnsemblePredictor(drifting(STD, std=STD), constant_policy(0.0)),
    }
    found = run_study(predictors, starts, edges, np.array([2.0]), config)
    steps = np.arange(1, HORIZON + 1)
    entropy = 0.5 * np.log(2 * math.pi * math.e * steps * STD**2)
    wide = 0.5 * np.log(2 * math.pi * 4 * steps * STD**2) + 0.5 / 4
    # Errors of a mean over 900 visits are about 0.024; histograms add their own noise.
    for name, expected in (("right", -entropy), ("wide", -wide), ("drifting", -entropy - 0.5 * steps)):
        gaussian = found[name].gaussian
        assert gaussian is not None
        np.testing.assert_allclose(gaussian.mean(axis=0), expected, atol=0.2 if name == "drifting" else 0.08)
        if name != "drifting":  # whose histogram is empty where the walks go
            np.testing.assert_allclose(found[name].log_prob.mean(axis=0), expected, atol=0.12)
    np.testing.assert_allclose(found["right"].squared_error.mean(axis=0), steps * (STD / 2.0) ** 2, rtol=0.2)
    np.testing.assert_allclose(
        found["drifting"].squared_error.mean(axis=0), (steps + steps**2) * (STD / 2.0) ** 2, rtol=0.2
    )
    assert (found["right"].ended == 0).all()


class Replay:
    """Predicts exactly what was recorded, if it is given the actions; else far away."""

    def __init__(self, starts: dict[float, DoubleArray]) -> None:
        self.starts = starts
        self.asked: list[int] = []

    def predict(
        self, state: FloatArray, past: Past, actions: FloatArray | None, steps: int, samples: int, *, seed: int = 0
    ) -> Futures:
        self.asked.append(past.states.shape[1])
        shift = 0.0 if actions is not None else 100.0
        states = np.stack([np.repeat(self.starts[float(row[0])][:1] + shift, samples, axis=0) for row in state])
        return Futures(states, np.zeros(states.shape[:3], dtype=np.bool_))

    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        assert past.states.shape[1] == 3
        return np.asarray((next_state - state).sum(axis=1), dtype=np.float64)


def test_a_perfect_prediction_reaches_the_oracle_and_pasts_of_unequal_length_are_apart(
    rng: np.random.Generator,
) -> None:
    episodes = [walk(rng, rng.normal(size=(1, 1)).astype(np.float32), steps) for steps in (30, HORIZON, 25)]
    starts = find_starts(episodes, count=3, horizon=HORIZON, context=3, seed=0)
    replay = Replay({float(start.state[0]): start.visited for start in starts})
    edges = [np.linspace(-20.0, 20.0, 101)]
    config = StudyConfig(horizon=HORIZON, samples=10)
    given = run_study({"x": replay}, starts, edges, np.ones(1), config, actions="recorded")["x"]
    np.testing.assert_allclose(given.log_prob, oracle_of(edges, starts))
    assert oracle_of(edges, starts) == pytest.approx(math.log(100 / 40))
    np.testing.assert_allclose(given.squared_error, 0.0, atol=1e-9)
    assert replay.asked == [0, 3]
    free = run_study({"x": replay}, starts, edges, np.ones(1), config)["x"]
    np.testing.assert_allclose(free.log_prob, math.log(config.floor * 100 / 40))
    assert (free.zeros == 1).all() and free.gaussian is None
    uneven = [np.array([-20.0, 0.0, 1.0, 20.0])]
    visited = np.concatenate([start.visited.ravel() for start in starts])
    widths = np.where(visited < 0, 20.0, np.where(visited < 1, 1.0, 19.0))
    assert oracle_of(uneven, starts) == pytest.approx(float(-np.log(widths).mean()))


def test_recorded_actions_are_scored_on_the_visit_that_they_come_from(rng: np.random.Generator) -> None:
    starts = find_starts(walks(rng, groups=2, visits=5), count=2, horizon=HORIZON, context=2, seed=0)
    replay = Replay({float(start.state[0]): start.visited for start in starts})
    edges = [np.linspace(-20.0, 20.0, 401)]
    config = StudyConfig(horizon=HORIZON, samples=10)
    found = run_study({"x": replay}, starts, edges, np.ones(1), config, actions="recorded")["x"]
    np.testing.assert_allclose(found.log_prob, oracle_of(edges, starts))


def test_curves_have_the_order_of_the_starts(rng: np.random.Generator) -> None:
    episodes = [walk(rng, rng.normal(size=(1, 1)).astype(np.float32), steps) for steps in (30, HORIZON, 25)]
    starts = find_starts(episodes, count=3, horizon=HORIZON, context=3, seed=0)
    starts.sort(key=lambda start: -len(start.past_states))  # studied in another order
    shifted = {float(start.state[0]): start.visited + index for index, start in enumerate(starts)}
    config = StudyConfig(horizon=HORIZON, samples=4)
    found = run_study({"x": Replay(shifted)}, starts, [np.array([-9.0, 9.0])], np.ones(1), config, actions="recorded")
    np.testing.assert_allclose(found["x"].squared_error, np.repeat([[0.0], [1.0], [4.0]], HORIZON, axis=1), atol=1e-5)


def test_one_step_densities_are_of_the_same_transitions_for_all(rng: np.random.Generator) -> None:
    episodes = [walk(rng, rng.normal(size=(1, 1)).astype(np.float32), steps) for steps in (30, 3, 25)]
    found = one_step_log_prob({"a": Replay({}), "b": Replay({})}, episodes, context=3, seed=0)
    changes = np.concatenate([np.diff(episode.observations[3:, 0]) for episode in episodes])
    np.testing.assert_allclose(np.sort(found["a"]), np.sort(changes), atol=1e-6)
    np.testing.assert_array_equal(found["a"], found["b"])


def test_metrics_curves_and_figures_of_a_study() -> None:
    log_prob = np.array([[1.0, 2.0, np.nan], [3.0, 2.0, np.nan]])
    curves = Curves(log_prob, log_prob, log_prob + 1, log_prob, log_prob - 1, 0.1)
    metrics = study_metrics({"pets": curves}, suffix="_masked")
    assert metrics["pets_logp_1_masked"] == 2.0 and metrics["pets_logp_1_masked_stderr"] == 1.0
    assert metrics["pets_mse_1_masked"] == 3.0 and metrics["pets_gaussian_logp_1_masked"] == 1.0
    assert "pets_logp_3_masked" not in metrics, "nothing was visited there"
    assert metric_steps(100) == [1, 10, 25, 50, 100] and metric_steps(15) == [1, 10, 15]
    curve = curve_of(curves)
    assert curve["log_prob"] == [2.0, 2.0, None] and curve["log_prob_stderr"] == [1.0, 0.0, None]
    joined = joined_curves([curve, {**curve, "log_prob": [4.0, 2.0, None]}])
    assert joined["log_prob"] == [3.0, 2.0, None] and joined["log_prob_stderr"] == [1.0, 0.0, None]
    figure = likelihood_figure(Panel("one", {"tt": curve}, 5.0), Panel("two", {"mine": curve}, 5.0))
    upper = figure.axes[0]
    np.testing.assert_array_equal(np.asarray(upper.lines[0].get_ydata()), [2.0, 2.0, np.nan])
    np.testing.assert_array_equal(np.asarray(upper.lines[1].get_ydata()), [5.0, 5.0])
    assert all(tick == round(tick) for axes in figure.axes for tick in axes.get_xticks()), "steps are whole numbers"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Trajectory Transformer", "discrete oracle"]


def test_the_command_has_the_floor_of_the_study() -> None:
    assert CompareStudy().floor == FLOOR == StudyConfig().floor
