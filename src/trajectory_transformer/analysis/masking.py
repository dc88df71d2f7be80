"""Partially observed datasets: each entry of every state is hidden with a given probability, by a seed.

An unobserved entry is NaN in the states that predictors read. How a model is trained on such states:

- the ensemble gets the dataset and `observation_masks`: it reads 0 and the mask for hidden entries;
- the Trajectory Transformer gets `masked_dataset`, an ordinary dataset in which hidden entries hold one value above the
  range of their dimension. With uniform bins and one bin more than for the observed data, the last bin of a dimension
  holds that value and nothing else: its token is the mask token of the dimension. The tokenizer is unchanged.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, Episode, FloatArray
from trajectory_transformer.randomness import stream_seed

MASKED = "masked"
"""Key of the metadata of masked datasets, and so of models trained on them: the probability of a hidden entry."""
_MARGIN = 0.01  # of a bin, between the largest observed value and the bin of the mask


def observation_masks(episodes: Sequence[Episode], probability: float, seed: int) -> tuple[npt.NDArray[np.bool_], ...]:
    """Which entries of the states are observed: one array [T + 1, O] per episode.

    The mask of an episode depends only on seed, probability and the index of the episode.
    """
    require(0.0 <= probability < 1.0, "the probability of a hidden entry must lie in [0, 1)", probability)
    return tuple(
        np.random.default_rng(stream_seed(seed, index)).random(episode.observations.shape) >= probability
        for index, episode in enumerate(episodes)
    )


def masked_states(states: FloatArray, mask: npt.NDArray[np.bool_]) -> FloatArray:
    """States as predictors read them: NaN where the mask is false."""
    return np.where(mask, states, np.float32(np.nan))


def masked_dataset(dataset: Dataset, probability: float, seed: int, num_bins: int) -> Dataset:
    """A dataset whose hidden entries hold the value of the mask token; train with `num_bins` + 1 uniform bins.

    The smallest value of each dimension stays observed, so that the bins are those of the observed dataset up to 0.02
    of a bin. The metadata says that the dataset is masked, and the trained model keeps it.
    """
    observations = np.concatenate([episode.observations for episode in dataset]).astype(np.float64)
    low, high = observations.min(axis=0), observations.max(axis=0)
    width = (high - low) / num_bins
    # A bin above the observed ones. The largest observed value must stay below the edge between them.
    hidden = np.where(high > low, high + (1 + 2 * _MARGIN) * width, low + 1.0).astype(np.float32)
    mask = np.concatenate(observation_masks(dataset.episodes, probability, seed))
    # The smallest value of a dimension is where its bins begin.
    mask[observations.argmin(axis=0), np.arange(len(low))] = True
    ends = np.cumsum([len(episode.observations) for episode in dataset])[:-1]
    shown = np.split(np.where(mask, observations, hidden).astype(np.float32), ends)
    episodes = tuple(replace(episode, observations=states) for episode, states in zip(dataset, shown, strict=True))
    metadata = {**dataset.metadata, MASKED: probability, "mask_seed": seed, "mask_bins": num_bins}
    return replace(dataset, episodes=episodes, metadata=metadata)
