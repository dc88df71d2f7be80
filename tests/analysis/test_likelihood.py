"""Likelihoods by value: histograms and oracles by hand, Gaussian marginals against a system with a known answer."""

import itertools
import math

import numpy as np
import pytest

from trajectory_transformer.analysis.likelihood import (
    discrete_oracle,
    gaussian_log_prob,
    histogram_likelihood,
    oracle_log_prob,
    sample_moments,
    squared_error,
)
from trajectory_transformer.data.episode import DoubleArray

FLOOR = 1e-3
EDGES = [np.array([0.0, 1.0, 3.0]), np.array([-1.0, 0.0, 1.0, 2.0])]


def one_step(rows: list[list[float]]) -> DoubleArray:
    """Rows of states as [N, 1, O]."""
    return np.array(rows)[:, None]


def test_histogram_by_hand() -> None:
    samples = one_step([[0.5, -0.5], [0.6, -0.5], [2.0, 0.5], [0.1, 1.5]])
    alive = np.zeros((4, 1), dtype=bool)
    visited = one_step([[0.2, -0.1], [2.9, 1.0], [0.2, 5.0], [3.0, 2.0]])
    found = histogram_likelihood(samples, alive, visited, EDGES, floor=FLOOR)
    expected = [
        math.log(0.75 / 1) + math.log(0.5 / 1),
        math.log(0.25 / 2) + math.log(0.25 / 1),  # an edge belongs to the bin above it
        math.log(0.75 / 1) + math.log(FLOOR / 1),  # outside of all bins
        math.log(0.25 / 2) + math.log(0.25 / 1),  # the last edge belongs to the last bin
    ]
    np.testing.assert_allclose(found.log_prob[:, 0], expected)
    assert found.zeros[:, 0].tolist() == [0, 0, 1, 0]


def test_empty_bins_are_floored_and_densities_use_the_width_of_the_bin() -> None:
    samples, alive = one_step([[0.5, 0.5]] * 3), np.zeros((3, 1), dtype=bool)
    found = histogram_likelihood(samples, alive, one_step([[2.0, 0.5]]), EDGES, floor=FLOOR)
    assert found.log_prob.item() == pytest.approx(math.log(FLOOR / 2) + math.log(1.0))
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\), got 0"):
        histogram_likelihood(samples, alive, one_step([[2.0, 0.5]]), EDGES, floor=0.0)


def test_stray_samples_keep_their_mass_and_hidden_entries_do_not() -> None:
    samples = one_step([[0.5, np.nan], [0.5, 0.5], [9.0, np.nan], [0.5, 2.5]])
    alive = np.zeros((4, 1), dtype=bool)
    found = histogram_likelihood(samples, alive, one_step([[0.5, 0.5]]), EDGES, floor=FLOOR)
    # Dimension 0: three of four samples. Dimension 1: one of the two observed ones.
    assert found.log_prob.item() == pytest.approx(math.log(3 / 4) + math.log(1 / 2))


def test_the_end_of_samples_counts_once_whatever_the_number_of_dimensions() -> None:
    samples = one_step([[0.5, 0.5], [0.5, 1.5], [2.0, 0.5], [0.5, 0.5], [2.0, 1.5]])
    ended = np.array([[False], [False], [False], [True], [True]])
    found = histogram_likelihood(samples, ended, one_step([[0.5, 0.5]]), EDGES, floor=FLOOR)
    # Three of five samples go on. Of these, two are in the bin of each dimension.
    assert found.log_prob.item() == pytest.approx(math.log(3 / 5) + 2 * math.log(2 / 3))
    assert found.zeros.item() == 0
    found = histogram_likelihood(samples, np.ones((5, 1), dtype=bool), one_step([[0.5, 0.5]]), EDGES, floor=FLOOR)
    assert found.log_prob.item() == pytest.approx(3 * math.log(FLOOR))
    assert found.zeros.item() == 3


def test_constant_dimensions_are_left_out_and_unvisited_steps_are_nan() -> None:
    edges = [EDGES[0], np.array([7.0])]
    samples, alive = np.full((5, 2, 2), [0.5, 7.0]), np.zeros((5, 2), dtype=bool)
    visited = np.array([[[0.5, 7.0], [np.nan, np.nan]]])
    found = histogram_likelihood(samples, alive, visited, edges, floor=FLOOR)
    np.testing.assert_allclose(found.log_prob, [[0.0, np.nan]])
    np.testing.assert_allclose(found.zeros, [[0.0, np.nan]])
    assert discrete_oracle(edges) == pytest.approx(math.log(2 / 3))


def test_histograms_converge_to_the_mass_of_a_gaussian_in_every_bin(rng: np.random.Generator) -> None:
    edges = [np.linspace(-4, 4, 33)]
    samples = rng.normal(size=(200_000, 1, 1))
    visited = np.linspace(-1.9, 1.9, 20)[:, None, None]
    found = histogram_likelihood(samples, np.zeros((200_000, 1), dtype=bool), visited, edges, floor=1e-6)
    truth = -0.5 * visited[:, 0, 0] ** 2 - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(found.log_prob[:, 0], truth, atol=0.25)  # a bin is a quarter of a deviation wide
    gaussian = gaussian_log_prob(samples, np.zeros((200_000, 1), dtype=bool), visited, edges)
    np.testing.assert_allclose(gaussian[:, 0], truth, atol=0.02)


def test_moments_skip_hidden_and_ended_samples() -> None:
    states = one_step([[1.0, np.nan], [3.0, 4.0], [100.0, 100.0]])
    ended = np.array([[False], [False], [True]])
    mean, std = sample_moments(states, ended)
    np.testing.assert_allclose(mean, [[2.0, 4.0]])
    np.testing.assert_allclose(std, [[1.0, 0.0]])
    found = squared_error(states, ended, one_step([[3.0, 6.0]]), np.array([2.0, 1.0]))
    assert found.item() == pytest.approx((0.5**2 + 2.0**2) / 2)
    nothing = sample_moments(states, np.ones((3, 1), dtype=bool))[0]
    assert np.isnan(nothing).all()


def test_the_oracle_is_the_best_of_all_distributions_over_a_toy_discretisation() -> None:
    edges = [np.linspace(0.0, 2.0, 4), np.linspace(-1.0, 4.0, 3)]
    state = np.array([0.9, 1.7])
    shares = [np.array(p) / 10 for p in itertools.product(range(11), repeat=3) if sum(p) == 10]
    pairs = [np.array([p, 10 - p]) / 10 for p in range(11)]
    with np.errstate(divide="ignore"):
        best = max(
            float(np.log(first[1] / (2 / 3)) + np.log(second[1] / 2.5))
            for first, second in itertools.product(shares, pairs)
        )
    assert discrete_oracle(edges) == pytest.approx(best)
    assert float(oracle_log_prob(state, edges)) == pytest.approx(best)
    assert discrete_oracle(edges) == pytest.approx(math.log(3 / 2) + math.log(2 / 5))


def test_the_oracle_of_unequal_bins_depends_on_the_state() -> None:
    np.testing.assert_allclose(oracle_log_prob(np.array([[0.5, 0.0], [2.0, 0.0]]), EDGES), [0.0, -math.log(2)])
