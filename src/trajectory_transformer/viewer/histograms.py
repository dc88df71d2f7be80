"""What a dataset holds: counts per bin of every slot, returns of episodes, share of actions at their limits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import Dataset, DoubleArray
from trajectory_transformer.tokens.tokenizer import Tokenizer, slot_values


@dataclass(frozen=True)
class SlotHistogram:
    """Values of one slot, counted in the bins of the tokenizer."""

    edges: DoubleArray  # [n + 1], the bin edges; two equal ones for a constant
    counts: npt.NDArray[np.int64]  # [n]
    density: DoubleArray  # [n], share per unit of the value; 1 for a constant
    at_limits: float  # share of values equal to the smallest or the largest one


def slot_histogram(dataset: Dataset, tokenizer: Tokenizer, slot: int) -> SlotHistogram:
    """Count the values of a slot in its bins; values outside the edges count in the outer bins."""
    values = np.concatenate([_column(part, slot) for part in (slot_values(each, tokenizer.config) for each in dataset)])
    edges = tokenizer.discretizer.edges[slot]
    tokens = tokenizer.discretizer.encode(values[:, None], slice(slot, slot + 1)).ravel()
    num_bins = max(len(edges) - 1, 1)
    counts = np.bincount(tokens, minlength=num_bins)[:num_bins]
    if len(edges) == 1:
        edges = np.repeat(edges, 2)
    widths = np.diff(edges)
    density = counts / counts.sum() / np.where(widths > 0, widths, 1.0)
    limits = float(np.mean((values == values.min()) | (values == values.max())))
    return SlotHistogram(edges, counts, density, limits)


def _column(parts: list[DoubleArray], slot: int) -> DoubleArray:
    """One slot of the values of an episode, whose parts have several columns each."""
    for part in parts:
        if slot < part.shape[1]:
            return part[:, slot]
        slot -= part.shape[1]
    raise IndexError(slot)


def action_limits(dataset: Dataset) -> DoubleArray:
    """Share of each action dimension at its smallest or largest recorded value [A]."""
    actions = np.concatenate([episode.actions for episode in dataset])
    return np.asarray(((actions == actions.min(axis=0)) | (actions == actions.max(axis=0))).mean(axis=0), np.float64)


def episode_order(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Episodes by return, the best first; by length where there are no rewards."""
    key = [episode.total_reward if dataset.has_rewards else float(len(episode)) for episode in dataset]
    return np.argsort(-np.array(key), kind="stable")
