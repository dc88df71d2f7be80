"""Bins by hand, and properties that hold for any data."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trajectory_transformer.tokens.discretizer import (
    BIN_VALUES,
    EDGES,
    Discretizer,
    DoubleArray,
    bins_of,
    means,
    midpoints,
    quantile_edges,
    uniform_edges,
)

# Ordinary numbers, repeated values, very large and very small magnitudes, subnormals, adjacent floats.
numbers = st.one_of(
    st.floats(-1e3, 1e3),
    st.sampled_from([-100.0, 0.0, 0.1, 1.0, 1.0, math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0), -0.0]),
    st.floats(-1e300, 1e300),
    st.floats(-1e-300, 1e-300),
    st.sampled_from([5e-324, -5e-324, 1e-323, 1e300, -1e300, math.nextafter(1e300, 0.0)]),
)
columns = st.one_of(
    st.lists(numbers, min_size=1, max_size=60),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60),
    st.builds(lambda value, size: [value] * size, numbers, st.integers(1, 60)),
).map(lambda values: np.array(values, dtype=np.float64))
bin_counts = st.integers(1, 20)
edge_rules = st.sampled_from(sorted(EDGES))
value_rules = st.sampled_from(sorted(BIN_VALUES))


def fit(column: DoubleArray, num_bins: int, edges: str, bin_value: str) -> Discretizer:
    """A discretizer of one dimension."""
    return Discretizer.fit([column], num_bins, edges=edges, bin_value=bin_value)


def tokens_of(discretizer: Discretizer, column: DoubleArray) -> list[int]:
    """Tokens of values of the only dimension."""
    return [int(token) for token in discretizer.encode(column[:, None], slice(0, 1))[:, 0]]


@settings(deadline=None)
@given(column=columns, num_bins=bin_counts, edges=edge_rules)
def test_edges_increase_and_are_at_most_num_bins_plus_one(column: DoubleArray, num_bins: int, edges: str) -> None:
    found = EDGES[edges](column, num_bins)
    assert 1 <= len(found) <= num_bins + 1
    assert (np.diff(found) > 0).all()
    assert np.isfinite(found).all()


@settings(deadline=None)
@given(column=columns, num_bins=bin_counts, edges=edge_rules)
@example(column=np.array([-0.1, 0.3, 0.2]), num_bins=3, edges="uniform")
@example(column=np.array([0.1, 0.7000000000000001]), num_bins=1, edges="uniform")
def test_every_value_lies_between_the_edges_of_its_bin(column: DoubleArray, num_bins: int, edges: str) -> None:
    found = EDGES[edges](column, num_bins)
    tokens = bins_of(column, found)
    assert (found[tokens] <= column).all()
    assert (column <= found[np.minimum(tokens + 1, len(found) - 1)]).all()


@settings(deadline=None)
@given(column=columns, probe=st.lists(numbers, max_size=20), num_bins=bin_counts, edges=edge_rules)
def test_tokens_are_in_range_and_monotonic_in_the_values(
    column: DoubleArray, probe: list[float], num_bins: int, edges: str
) -> None:
    discretizer = fit(column, num_bins, edges, "midpoint")
    tokens = tokens_of(discretizer, np.sort(np.concatenate([column, probe])))
    assert tokens == sorted(tokens)
    assert tokens[0] >= 0 and tokens[-1] < max(len(discretizer.edges[0]) - 1, 1) <= num_bins


@settings(deadline=None)
@given(column=columns, num_bins=bin_counts, edges=edge_rules)
def test_values_outside_the_data_fall_into_the_first_or_last_bin(
    column: DoubleArray, num_bins: int, edges: str
) -> None:
    discretizer = fit(column, num_bins, edges, "midpoint")
    outside = np.array([column.min() - 1.0, -np.inf, column.max() + 1.0, np.inf])
    last = max(len(discretizer.edges[0]) - 2, 0)
    assert tokens_of(discretizer, outside)[1:] == [0, last, last]
    assert tokens_of(discretizer, outside)[0] == 0


@settings(deadline=None)
@given(column=columns, num_bins=bin_counts, edges=edge_rules, bin_value=value_rules)
@example(column=np.array([0.1] * 5 + [0.3, 0.9]), num_bins=1, edges="quantile", bin_value="mean")
def test_a_decoded_value_is_finite_and_between_the_edges_of_its_bin(
    column: DoubleArray, num_bins: int, edges: str, bin_value: str
) -> None:
    discretizer = fit(column, num_bins, edges, bin_value)
    bounds = discretizer.edges[0]
    tokens = np.arange(max(len(bounds) - 1, 1))
    decoded = discretizer.decode(tokens[:, None], slice(0, 1))[:, 0]
    assert np.isfinite(decoded).all()
    assert (bounds[tokens] <= decoded).all()
    assert (decoded <= bounds[np.minimum(tokens + 1, len(bounds) - 1)]).all()


def test_the_mean_of_a_bin_never_leaves_the_bin() -> None:
    # Rounding must not move the mean of equal values below the edge that they lie on.
    rng = np.random.default_rng(0)
    for _ in range(200):
        low, width = rng.normal() * 10.0 ** rng.integers(-3, 3), rng.random() * 10.0 ** rng.integers(-3, 3)
        column = np.array([low] * int(rng.integers(1, 9)) + [low + width])
        edges = np.array([low, low + width / 3, low + width])
        found = means(column, edges)
        assert edges[0] <= found[0] <= edges[1]
        assert edges[1] <= found[1] <= edges[2]


@settings(deadline=None)
@given(column=columns, num_bins=bin_counts, edges=edge_rules, bin_value=value_rules)
def test_unused_bins_decode_to_the_value_of_the_last_bin(
    column: DoubleArray, num_bins: int, edges: str, bin_value: str
) -> None:
    discretizer = fit(column, num_bins, edges, bin_value)
    assert discretizer.values.shape == (1, num_bins)
    last = max(len(discretizer.edges[0]) - 2, 0)
    np.testing.assert_array_equal(discretizer.values[0, last:], discretizer.values[0, last])


@given(num_bins=bin_counts, per_bin=st.integers(2, 7), seed=st.integers(0, 100))
def test_quantile_bins_of_distinct_data_hold_equal_mass(num_bins: int, per_bin: int, seed: int) -> None:
    column = np.random.default_rng(seed).normal(size=num_bins * per_bin)
    tokens = bins_of(column, quantile_edges(column, num_bins))
    np.testing.assert_array_equal(np.bincount(tokens), np.full(num_bins, per_bin))


@given(num_bins=bin_counts, size=st.integers(1, 20), seed=st.integers(0, 100))
def test_quantile_bins_separate_distinct_values_if_there_are_enough_bins(num_bins: int, size: int, seed: int) -> None:
    column = np.random.default_rng(seed).normal(size=min(size, num_bins))
    tokens = bins_of(column, quantile_edges(column, num_bins))
    assert len(set(tokens.tolist())) == len(column)


@pytest.mark.parametrize(
    "column",
    [
        np.array([0.0] * 90 + [1.0] * 10),  # ten in a hundred
        np.array([0.0] * 999 + [1.0]),  # a tenth of a bin
        np.array([-1.0] + [0.0] * 98 + [1.0]),
        np.array([0.0] * 30 + [0.5] * 30 + [1.0] * 40),
    ],
    ids=["a-tenth", "one-in-a-thousand", "both-ends", "three-atoms"],
)
@pytest.mark.parametrize("edges", sorted(EDGES))
def test_a_few_distinct_values_each_have_a_bin_of_their_own(column: DoubleArray, edges: str) -> None:
    # A reward of 1 on success and 0 otherwise is very common; one bin for both would lose it.
    discretizer = fit(column, 10, edges, "mean")
    distinct = np.unique(column)
    tokens = tokens_of(discretizer, distinct)
    assert len(set(tokens)) == len(distinct)
    decoded = discretizer.decode(np.array(tokens)[:, None], slice(0, 1))[:, 0]
    np.testing.assert_allclose(decoded, distinct, rtol=1e-12, atol=1e-12)


def test_quantile_edges_are_equally_spaced_sorted_values_and_the_maximum() -> None:
    column = np.array([5.0, 1.0, 3.0, 2.0, 4.0, 0.0])
    np.testing.assert_array_equal(quantile_edges(column, 3), [0.0, 2.0, 4.0, 5.0])
    np.testing.assert_array_equal(bins_of(column, quantile_edges(column, 3)), [2, 0, 1, 1, 2, 0])
    np.testing.assert_array_equal(quantile_edges(np.arange(8.0), 3), [0.0, 3.0, 6.0, 7.0])


@pytest.mark.parametrize(
    ("size", "expected"), [(9, [3, 3, 3]), (8, [3, 3, 2]), (7, [3, 3, 1]), (3, [1, 1, 1]), (2, [1, 1])]
)
def test_the_last_quantile_bin_holds_the_remainder(size: int, expected: list[int]) -> None:
    column = np.arange(float(size))
    assert np.bincount(bins_of(column, quantile_edges(column, 3))).tolist() == expected


@given(
    low=st.floats(-1e3, 1e3),
    width=st.floats(0.1, 1e3),
    num_bins=bin_counts,
    inner=st.lists(st.floats(0, 1), max_size=9),
)
def test_uniform_bins_have_equal_widths_between_minimum_and_maximum(
    low: float, width: float, num_bins: int, inner: list[float]
) -> None:
    column = np.array([low, low + width, *(low + width * share for share in inner)])
    edges = uniform_edges(column, num_bins)
    assert len(edges) == num_bins + 1
    np.testing.assert_allclose(np.diff(edges), width / num_bins, rtol=1e-9, atol=1e-12 * (abs(low) + width))
    assert edges[0] == column.min()
    assert edges[-1] == column.max()


def test_uniform_bins_by_hand() -> None:
    column = np.array([8.0, 0.0, 1.0])
    edges = uniform_edges(column, 4)
    np.testing.assert_array_equal(edges, [0.0, 2.0, 4.0, 6.0, 8.0])
    values = np.array([-5.0, 0.0, 1.9, 2.0, 5.9, 6.0, 8.0, 9.0])
    np.testing.assert_array_equal(bins_of(values, edges), [0, 0, 0, 1, 2, 3, 3, 3])


def test_a_bin_decodes_to_the_mean_of_its_data_or_to_its_midpoint() -> None:
    column = np.array([8.0, 0.0, 1.0])
    edges = np.array([0.0, 2.0, 4.0, 6.0, 8.0])
    np.testing.assert_array_equal(midpoints(column, edges), [1.0, 3.0, 5.0, 7.0])
    np.testing.assert_array_equal(means(column, edges), [0.5, 3.0, 5.0, 8.0])  # empty bins decode to their midpoint


def test_a_mean_far_from_zero_keeps_its_precision() -> None:
    column = 1e9 + np.array([0.0, 0.25, 0.75, 1.0])
    np.testing.assert_array_equal(means(column, np.array([1e9, 1e9 + 0.5, 1e9 + 1.0])) - 1e9, [0.125, 0.875])


@pytest.mark.parametrize("edges", sorted(EDGES))
@pytest.mark.parametrize("bin_value", sorted(BIN_VALUES))
def test_a_constant_dimension_decodes_to_its_constant(edges: str, bin_value: str) -> None:
    discretizer = fit(np.full(7, 0.3), 5, edges, bin_value)
    assert tokens_of(discretizer, np.array([-1.0, 0.3, 2.0])) == [0, 0, 0]
    assert discretizer.decode(np.array([[0]]), slice(0, 1)).item() == 0.3


def test_dimensions_are_fitted_independently_and_selected_by_slice() -> None:
    fitted = Discretizer.fit(
        [np.arange(4.0), np.arange(3.0) * 10, np.zeros(2)], 2, edges="uniform", bin_value="midpoint"
    )
    assert (fitted.num_dims, fitted.num_bins, fitted.stop) == (3, 2, 2)
    np.testing.assert_array_equal(fitted.values, [[0.75, 2.25], [5.0, 15.0], [0.0, 0.0]])
    values = np.array([[0.0, 19.0, 7.0], [3.0, 1.0, -7.0]], dtype=np.float32)
    np.testing.assert_array_equal(fitted.encode(values, slice(0, 3)), [[0, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(fitted.encode(values[:, 1:2], slice(1, 2)), [[1], [0]])
    np.testing.assert_array_equal(fitted.decode(np.array([[1, 0], [0, 0]]), slice(1, 3)), [[15.0, 0.0], [5.0, 0.0]])


def test_a_stop_token_decodes_to_nan() -> None:
    fitted = fit(np.arange(4.0), 2, "uniform", "midpoint")
    np.testing.assert_array_equal(fitted.decode(np.array([[fitted.stop], [1]]), slice(0, 1)), [[np.nan], [2.25]])


def test_float32_values_get_the_tokens_of_their_exact_float64_values() -> None:
    column = np.array([0.1, 0.2, 0.3], dtype=np.float32)
    discretizer = fit(column.astype(np.float64), 3, "quantile", "midpoint")
    direct = discretizer.encode(column[:, None], slice(0, 1))
    np.testing.assert_array_equal(direct[:, 0], tokens_of(discretizer, column.astype(np.float64)))


def test_categories_are_their_own_tokens_and_values_for_any_data() -> None:
    columns = [np.array([2.0, 2.0, 0.0]), np.array([-1.0, 0.5, 1.0])]
    fitted = Discretizer.fit(columns, 5, edges="quantile", bin_value="mean", categories=(4, 0))
    categories = np.arange(4.0)[:, None]
    np.testing.assert_array_equal(fitted.encode(categories, slice(0, 1)), [[0], [1], [2], [3]])
    np.testing.assert_array_equal(fitted.decode(np.arange(4)[:, None], slice(0, 1)), categories)
    np.testing.assert_array_equal(fitted.encode(columns[1][:, None], slice(1, 2)).ravel(), [0, 1, 2])


def test_more_categories_than_bins_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens\.num_bins must be at least 6, .* got 5"):
        Discretizer.fit([np.zeros(3)], 5, edges="uniform", bin_value="mean", categories=(6,))
