"""Log-likelihood of visited states under sampled marginals: histograms over bins, Gaussians, the discrete oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, pi

import numpy as np
import numpy.typing as npt

from trajectory_transformer.config import require
from trajectory_transformer.data.episode import DoubleArray
from trajectory_transformer.tokens.discretizer import bins_of

Edges = Sequence[DoubleArray]
"""Increasing edges of the bins of each dimension; a dimension with fewer than two edges is constant and left out."""
_SMALLEST_STD = 1e-6  # of a Gaussian marginal, in units of the range of the bins


@dataclass(frozen=True)
class Futures:
    """N sampled futures of S starts over H steps."""

    states: DoubleArray  # [S, N, H, O], after each action; NaN for unobserved entries
    ended: npt.NDArray[np.bool_]  # [S, N, H], whether the end of the episode was predicted at or before a step

    def __post_init__(self) -> None:
        """Check shapes."""
        assert self.states.ndim == 4 and self.ended.shape == self.states.shape[:3]


@dataclass(frozen=True)
class Likelihood:
    """Of R visited trajectories: log-likelihood of each state, and how many of its entries had no mass."""

    log_prob: DoubleArray  # [R, H]; NaN where nothing was visited
    zeros: DoubleArray  # [R, H], entries whose bin no sample hit, or outside of all bins; one more if all samples ended


def histogram_likelihood(
    states: DoubleArray, ended: npt.NDArray[np.bool_], visited: DoubleArray, edges: Edges, *, floor: float
) -> Likelihood:
    """Likelihood of visited states [R, H, O] under the marginals of samples [N, H, O] that ended [N, H] or not.

    A visited state has not ended: its likelihood is the share of the samples that go on, which counts once, times the
    density of its entries under the samples that go on. The marginal of a dimension at a step is a histogram: each bin
    is a uniform density over its range. Samples outside of all bins are part of the mass but in no bin. Unobserved
    entries (NaN) are independent of what they hide, so the observed samples stand for all. A bin with less mass than
    `floor` gets `floor`, and so does the share that goes on; a visited value outside of all bins gets `floor` over the
    width of the nearest bin.
    """
    require(0.0 < floor < 1.0, "the floor of the probability of a bin must lie in (0, 1)", floor)
    horizon = states.shape[1]
    alive = np.where(ended[..., None], np.nan, states)
    going_on = 1.0 - ended.mean(axis=0)  # [H]
    total = np.broadcast_to(np.log(np.maximum(going_on, floor)), visited.shape[:2]).copy()
    zeros = np.broadcast_to(going_on == 0.0, visited.shape[:2]).astype(np.float64)
    for dim, bounds in enumerate(edges):
        if len(bounds) < 2:
            continue
        values, widths = alive[..., dim], np.diff(bounds)
        observed = ~np.isnan(values)
        inside = observed & (values >= bounds[0]) & (values <= bounds[-1])
        places = bins_of(values, bounds) + len(widths) * np.arange(horizon)  # [N, H]
        counts = np.bincount(places[inside], minlength=horizon * len(widths)).reshape(horizon, -1)
        mass = counts / np.maximum(observed.sum(axis=0), 1)[:, None]  # [H, V]
        found = visited[..., dim]  # [R, H]
        bins = bins_of(found, bounds)
        outside = (found < bounds[0]) | (found > bounds[-1])
        hit = np.where(outside, 0.0, mass[np.arange(horizon), bins])
        zeros += hit == 0.0
        total += np.log(np.maximum(hit, floor) / widths[bins])
    missing = np.isnan(visited).any(axis=-1)
    return Likelihood(np.where(missing, np.nan, total), np.where(missing, np.nan, zeros))


def gaussian_log_prob(
    states: DoubleArray, ended: npt.NDArray[np.bool_], visited: DoubleArray, edges: Edges
) -> DoubleArray:
    """Log-density of visited states under Gaussians with mean and deviation of the samples; shapes as above -> [R, H].

    Constant dimensions are left out, as in the histogram.
    """
    mean, std = sample_moments(states, ended)
    varying = [dim for dim, bounds in enumerate(edges) if len(bounds) > 1]
    ranges = np.array([edges[dim][-1] - edges[dim][0] for dim in varying])
    std = np.maximum(std[:, varying], _SMALLEST_STD * ranges)
    scaled = (visited[..., varying] - mean[:, varying]) / std
    return np.asarray((-0.5 * scaled**2 - np.log(std) - 0.5 * log(2 * pi)).sum(axis=-1))


def sample_moments(states: DoubleArray, ended: npt.NDArray[np.bool_]) -> tuple[DoubleArray, DoubleArray]:
    """Mean and standard deviation of observed samples that have not ended: [N, H, O] -> two of [H, O].

    NaN where there are none.
    """
    observed = ~(np.isnan(states) | ended[..., None])
    count = observed.sum(axis=0)
    values = np.where(observed, states, 0.0)
    mean = np.where(count, values.sum(axis=0) / np.maximum(count, 1), np.nan)
    deviations = np.where(observed, states - mean, 0.0)
    return mean, np.where(count, np.sqrt((deviations**2).sum(axis=0) / np.maximum(count, 1)), np.nan)


def squared_error(
    states: DoubleArray, ended: npt.NDArray[np.bool_], visited: DoubleArray, scale: DoubleArray
) -> DoubleArray:
    """Squared error of the mean of the samples, in units of `scale` [O], mean over dimensions: -> [R, H]."""
    mean, _ = sample_moments(states, ended)
    return np.asarray((((visited - mean) / scale) ** 2).mean(axis=-1))


def oracle_log_prob(states: DoubleArray, edges: Edges) -> DoubleArray:
    """The largest log-likelihood that bins allow: all mass on the bin of every entry. states [..., O] -> [...]."""
    total = np.zeros(states.shape[:-1])
    for dim, bounds in enumerate(edges):
        if len(bounds) > 1:
            total -= np.log(np.diff(bounds)[bins_of(states[..., dim], bounds)])
    return total


def discrete_oracle(edges: Edges) -> float:
    """The same for bins of equal width, for any state: the sum over dimensions of log(number of bins / range)."""
    return float(sum(log((len(bounds) - 1) / (bounds[-1] - bounds[0])) for bounds in edges if len(bounds) > 1))
