"""Which episodes of a dataset are held out."""

from dataclasses import replace

import numpy as np

from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.randomness import stream_seed


def held_out_episodes(num_episodes: int, share: float, seed: int) -> list[int]:
    """Indices of the held-out episodes, increasing: a share of all by a seed, at least one and not all of them."""
    require(0.0 < share < 1.0, "the share of held-out episodes must lie in (0, 1)", share)
    require(num_episodes >= 2, "a split needs at least 2 episodes", num_episodes)
    count = min(max(round(share * num_episodes), 1), num_episodes - 1)
    order = np.random.default_rng(stream_seed(seed)).permutation(num_episodes)
    return sorted(order[:count].tolist())


def split_episodes(dataset: Dataset, held_out: float, seed: int) -> tuple[Dataset, Dataset]:
    """Episodes to train on and held-out ones, by a seed; the order within each part is kept."""
    chosen = set(held_out_episodes(len(dataset), held_out, seed))
    kept = tuple(episode for index, episode in enumerate(dataset) if index not in chosen)
    left = tuple(episode for index, episode in enumerate(dataset) if index in chosen)
    return replace(dataset, episodes=kept), replace(dataset, episodes=left)
