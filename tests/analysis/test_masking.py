"""Masks by seed, and the token that stands for a hidden entry."""

import numpy as np
import pytest

from trajectory_transformer.analysis.masking import MASKED, masked_dataset, masked_states, observation_masks
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel


def long_dataset(rng: np.random.Generator) -> Dataset:
    """Four long episodes; one dimension far from zero, one constant."""
    scale, shift = np.array([1.0, 0.01, 0.0]), np.array([0.0, 30.0, 2.0])
    episodes = [
        Episode(
            (rng.normal(size=(501, 3)) * scale + shift).astype(np.float32),
            rng.normal(size=(500, 1)).astype(np.float32),
            None,
            terminated=False,
        )
        for _ in range(4)
    ]
    return Dataset(tuple(episodes), {"env": "x"})


def test_masks_are_fixed_by_the_seed_and_hide_the_wanted_share(rng: np.random.Generator) -> None:
    episodes = long_dataset(rng).episodes
    masks, again = (observation_masks(episodes, 0.5, 3) for _ in range(2))
    for one, other in zip(masks, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.concatenate(masks).mean() == pytest.approx(0.5, abs=0.02)
    assert (masks[0] != masks[1]).any() and (masks[0] != observation_masks(episodes, 0.5, 4)[0]).any()
    np.testing.assert_array_equal(observation_masks(episodes[:1], 0.5, 3)[0], masks[0])
    assert observation_masks(episodes, 0.0, 3)[0].all()
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1"):
        observation_masks(episodes, 1.0, 3)


def test_hidden_entries_have_the_last_token_and_observed_ones_never(rng: np.random.Generator) -> None:
    dataset = long_dataset(rng)
    hidden = masked_dataset(dataset, 0.5, 3, num_bins=20)
    tokens = TokenConfig(num_bins=21, discretizer="uniform", rewards=False)
    model = TrajectoryModel.create(hidden, tokens, ModelConfig(window=2, num_layers=1, width=16), seed=0)
    masks = observation_masks(dataset.episodes, 0.5, 3)
    for episode, mask, plain_episode in zip(hidden, masks, dataset, strict=True):
        plain_states = plain_episode.observations
        states = model.tokenizer.encode(episode)[:, :3]
        lowest = np.concatenate([each.observations for each in dataset]).min(axis=0)
        starts_bins = plain_states == lowest  # shown even if hidden, so that bins begin there
        np.testing.assert_array_equal((states == 20)[~starts_bins], ~mask[~starts_bins])
    assert model.metadata[MASKED] == 0.5
    # Observed bins are those of the plain data up to the margin.
    plain = np.concatenate([episode.observations for episode in dataset])[:, 0]
    edges = model.tokenizer.discretizer.edges[0][:-1]
    np.testing.assert_allclose(edges, np.linspace(plain.min(), plain.max(), 21), atol=0.02 * np.ptp(plain) / 20 + 1e-5)
    assert edges[-1] > plain.max()


def test_masked_states_are_nan_where_hidden() -> None:
    found = masked_states(np.array([[1.0, 2.0]], dtype=np.float32), np.array([[True, False]]))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[1.0, np.nan]])
