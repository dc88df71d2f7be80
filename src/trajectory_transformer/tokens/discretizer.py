"""Real numbers to bins and back, one dimension at a time."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DoubleArray = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.int64]


def uniform_edges(data: DoubleArray, num_bins: int) -> DoubleArray:
    """Edges of bins of equal width between minimum and maximum: data [N] -> [num_bins + 1], increasing."""
    low, high = float(data.min()), float(data.max())
    # Adjacent floats can leave no room for this many bins: equal edges collapse into one.
    return np.unique(np.linspace(low, high, num_bins + 1))


def quantile_edges(data: DoubleArray, num_bins: int) -> DoubleArray:
    """Edges of bins of equal mass: data [N] -> at most [num_bins + 1], increasing.

    A value that is frequent enough to repeat an edge gets a bin of its own, so a dimension may have fewer bins than
    requested.
    """
    ordered = np.sort(data)
    if ordered[0] == ordered[-1]:
        return ordered[:1]
    stride = -(-len(ordered) // num_bins)
    edges = np.append(ordered[::stride], ordered[-1])
    repeated = edges[1:][edges[1:] == edges[:-1]]
    return np.unique(np.append(edges, np.nextafter(repeated, np.inf)))


EDGES: dict[str, Callable[[DoubleArray, int], DoubleArray]] = {"uniform": uniform_edges, "quantile": quantile_edges}


def category_edges(num_categories: int) -> DoubleArray:
    """Edges that give each category its own bin, with the number of the category: -> [num_categories + 1]."""
    return np.arange(num_categories + 1, dtype=np.float64)


def bins_of(values: npt.NDArray[np.floating], edges: DoubleArray) -> TokenArray:
    """Bin of the largest edge not above each value; values outside the edges fall into the first or last bin."""
    return edges[1:-1].searchsorted(values, side="right")  # the outer edges bound nothing


def midpoints(data: DoubleArray, edges: DoubleArray) -> DoubleArray:
    """Midpoint of each bin; a constant dimension decodes to its constant."""
    del data
    return (edges[:-1] + edges[1:]) / 2 if len(edges) > 1 else edges


def means(data: DoubleArray, edges: DoubleArray) -> DoubleArray:
    """Mean of the data in each bin, the midpoint where there is none."""
    middle = midpoints(data, edges)
    tokens = bins_of(data, edges)
    counts = np.bincount(tokens, minlength=len(middle))
    # Summed relative to the midpoint: no cancellation for data far from zero.
    offsets = np.bincount(tokens, weights=data - middle[tokens], minlength=len(middle))
    average = middle + offsets / np.maximum(counts, 1)
    return np.clip(average, edges[:-1], edges[1:]) if len(edges) > 1 else average  # rounding must not leave the bin


BIN_VALUES: dict[str, Callable[[DoubleArray, DoubleArray], DoubleArray]] = {"midpoint": midpoints, "mean": means}


@dataclass(frozen=True)
class Discretizer:
    """Edges and decoded values of S dimensions. The token after the last bin is the stop token."""

    edges: tuple[DoubleArray, ...]  # S arrays [num_bins_i + 1]; a constant dimension has a single edge
    values: DoubleArray  # [S, V], what each bin decodes to; unused bins repeat the value of the last one

    @classmethod
    def fit(
        cls,
        columns: Sequence[DoubleArray],
        num_bins: int,
        *,
        edges: str,
        bin_value: str,
        categories: Sequence[int] = (),
    ) -> "Discretizer":
        """Fit each dimension on its own data: S columns [N_i].

        `categories` gives the number of categories of each dimension, 0 for a continuous one. A category's number is
        its token, and decodes to itself.
        """
        counts = tuple(categories) or (0,) * len(columns)
        if max(counts) > num_bins:
            raise ValueError(
                f"tokens.num_bins must be at least {max(counts)}, the categories of one dimension, got {num_bins}"
            )
        fitted = tuple(
            category_edges(count) if count else EDGES[edges](column, num_bins)
            for column, count in zip(columns, counts, strict=True)
        )
        values = np.empty((len(columns), num_bins))
        for row, column, bounds, count in zip(values, columns, fitted, counts, strict=True):
            decoded = bounds[:-1] if count else BIN_VALUES[bin_value](column, bounds)
            row[: len(decoded)] = decoded
            row[len(decoded) :] = decoded[-1]
        return cls(fitted, values)

    @property
    def num_dims(self) -> int:
        """S, the dimensions."""
        return len(self.edges)

    @property
    def num_bins(self) -> int:
        """V, the largest number of bins of a dimension."""
        return int(self.values.shape[1])

    @property
    def stop(self) -> int:
        """The stop token."""
        return self.num_bins

    def encode(self, values: npt.NDArray[np.floating], dims: slice) -> TokenArray:
        """Tokens of the dimensions in `dims`: values [..., S'] -> [..., S']."""
        chosen = self._inner_edges[dims]
        tokens = np.empty((*values.shape[:-1], len(chosen)), dtype=np.int64)
        for index, edges in enumerate(chosen):
            tokens[..., index] = edges.searchsorted(values[..., index], side="right")  # as `bins_of`
        return tokens

    def decode(self, tokens: TokenArray, dims: slice) -> DoubleArray:
        """Values of the dimensions in `dims`, NaN for stop tokens: tokens [..., S'] -> [..., S']."""
        table = self._values_and_stop[dims]
        return np.asarray(table[np.arange(len(table)), tokens])

    @functools.cached_property
    def _inner_edges(self) -> tuple[DoubleArray, ...]:
        return tuple(edges[1:-1] for edges in self.edges)

    @functools.cached_property
    def _values_and_stop(self) -> DoubleArray:
        return np.concatenate([self.values, np.full((self.num_dims, 1), np.nan)], axis=1)


def discretizer_tensors(discretizer: Discretizer) -> dict[str, Tensor]:
    """A discretizer as tensors: edges [S, V + 1], padded with infinity, and values [S, V]."""
    padded = np.full((discretizer.num_dims, discretizer.num_bins + 1), np.inf)
    for row, edges in zip(padded, discretizer.edges, strict=True):
        row[: len(edges)] = edges
    return {"edges": torch.from_numpy(padded), "values": torch.from_numpy(discretizer.values)}


def discretizer_from(tensors: Mapping[str, Tensor]) -> Discretizer:
    """A discretizer from its tensors; refuses numbers that no fit could have given."""
    padded, values = tensors["edges"].double().numpy(), tensors["values"].double().numpy()
    if padded.ndim != 2 or values.ndim != 2 or padded.shape != (len(values), values.shape[1] + 1):
        raise ValueError(f"edges [S, V + 1] must fit the values of the bins [S, V], got {padded.shape}, {values.shape}")
    edges = tuple(row[: len(row) - int(np.isposinf(row).sum())] for row in padded)
    for slot, row in enumerate(edges):
        if not len(row) or not np.isfinite(row).all() or (row[1:] <= row[:-1]).any():
            raise ValueError(f"the edges of slot {slot} must be finite and increasing")
    if not (np.abs(values) <= np.finfo(np.float32).max).all():  # false for NaN
        raise ValueError("the values of its bins must be finite, as float32 too")
    return Discretizer(edges, values)
