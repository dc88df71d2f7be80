"""Predictors: what they may read, densities that agree with samples, masks, given and sampled actions."""

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from tests.pets.test_ensemble import drifting
from trajectory_transformer.analysis.masking import masked_dataset
from trajectory_transformer.analysis.predictors import (
    BEHAVIOUR,
    EnsemblePredictor,
    Past,
    TransformerPredictor,
    load_predictor,
)
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode, FloatArray
from trajectory_transformer.model.gpt import Block
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.pets import Behaviour, Ensemble, EnsembleConfig, GaussianNetworks
from trajectory_transformer.tokens.discretizer import bins_of

NUM_BINS = 5


def random_dataset(rng: np.random.Generator) -> Dataset:
    """Three episodes of 2 observation and 1 action dimensions."""
    episodes = [
        Episode(rng.normal(size=(31, 2)).astype(np.float32), rng.normal(size=(30, 1)).astype(np.float32), None, False)
        for _ in range(3)
    ]
    return Dataset(tuple(episodes))


def make_model(
    dataset: Dataset, *, window: int, num_bins: int = NUM_BINS, discretizer: Literal["uniform", "quantile"] = "uniform"
) -> TrajectoryModel:
    """An untrained model whose predictions depend strongly on what it reads."""
    tokens = TokenConfig(num_bins=num_bins, discretizer=discretizer, rewards=False)
    model = TrajectoryModel.create(dataset, tokens, ModelConfig(window=window, num_layers=2, width=32), seed=0)
    with torch.no_grad():
        model.gpt.token_embedding.weight.mul_(50.0)
        model.gpt.heads[:, -1] = 0.0
        model.gpt.heads.mul_(3.0)
        for block in model.gpt.blocks:
            assert isinstance(block, Block)
            block.qkv.weight.mul_(10.0)
            block.out.weight.mul_(20.0)
    return model


def start_of(rng: np.random.Generator, context: int = 4, starts: int = 2) -> tuple[FloatArray, Past]:
    def draw(*shape: int) -> FloatArray:
        return rng.normal(size=shape).astype(np.float32)

    return draw(starts, 2), Past(draw(starts, context, 2), draw(starts, context, 1))


def changed(past: Past, transitions: slice) -> Past:
    """Another past in some transitions."""
    states, actions = past.states.copy(), past.actions.copy()
    states[:, transitions] *= -3.0
    actions[:, transitions] *= -3.0
    return Past(states, actions)


def differ(one: DoubleArray, other: DoubleArray) -> bool:
    """Whether futures differ; NaN is equal to NaN."""
    return not np.array_equal(one, other, equal_nan=True)


def test_the_markovian_variant_reads_one_transition_and_nothing_before(rng: np.random.Generator) -> None:
    markov = TransformerPredictor(make_model(random_dataset(rng), window=2))
    state, past = start_of(rng)
    older, last = changed(past, slice(0, 3)), changed(past, slice(3, 4))
    found = [markov.predict(state, each, None, 6, 8, seed=1).states for each in (past, older, last)]
    np.testing.assert_array_equal(found[0], found[1])
    assert differ(found[0], found[2]), "the first action may depend on the transition before"
    # Given actions leave only the states to predict: these depend on one state and one action.
    actions = rng.normal(size=(2, 6, 1)).astype(np.float32)
    given = [markov.predict(state, each, actions, 6, 8, seed=1).states for each in (past, older, last)]
    np.testing.assert_array_equal(given[0], given[1])
    np.testing.assert_array_equal(given[0], given[2])
    following = rng.normal(size=(2, 2)).astype(np.float32)
    log_probs = [markov.log_prob(state, each, actions[:, 0], following) for each in (past, older, last)]
    np.testing.assert_array_equal(log_probs[0], log_probs[1])
    np.testing.assert_array_equal(log_probs[0], log_probs[2])


def test_a_longer_window_reads_the_past(rng: np.random.Generator) -> None:
    predictor = TransformerPredictor(make_model(random_dataset(rng), window=5))
    state, past = start_of(rng)
    found = [predictor.predict(state, each, None, 3, 8, seed=1).states for each in (past, changed(past, slice(1, 3)))]
    assert differ(found[0], found[1])


@pytest.mark.parametrize(("discretizer", "masked"), [("uniform", False), ("uniform", True), ("quantile", False)])
def test_densities_agree_with_the_frequencies_of_samples(
    rng: np.random.Generator, discretizer: Literal["uniform", "quantile"], masked: bool
) -> None:
    plain = random_dataset(rng)
    data = masked_dataset(plain, 0.5, 0, NUM_BINS) if masked else plain
    model = make_model(data, window=4, num_bins=NUM_BINS + masked, discretizer=discretizer)
    predictor = TransformerPredictor(model, max_rows=1500)
    assert [len(bounds) - 1 for bounds in predictor.edges] == [NUM_BINS, NUM_BINS]
    state, past = start_of(rng, context=2, starts=1)
    if masked:
        state[0, 1] = np.nan
    action = np.array([[0.3]], dtype=np.float32)
    futures = predictor.predict(state, past, action[:, None], 1, 6000, seed=2)
    alive = futures.states[0, ~futures.ended[0, :, 0], 0]  # [N, O]
    assert np.isnan(alive).any() == masked
    alive = alive[~np.isnan(alive).any(axis=1)]
    bins = np.stack([bins_of(alive[:, dim], predictor.edges[dim]) for dim in range(2)], axis=1)
    centers = [(bounds[:-1] + bounds[1:]) / 2 for bounds in predictor.edges]
    widths = [np.diff(bounds) for bounds in predictor.edges]
    total = 0.0
    for one in range(NUM_BINS):
        for other in range(NUM_BINS):
            following = np.array([[centers[0][one], centers[1][other]]], dtype=np.float32)
            mass = (
                float(np.exp(predictor.log_prob(state, past, action, following)[0])) * widths[0][one] * widths[1][other]
            )
            share = float(((bins[:, 0] == one) & (bins[:, 1] == other)).mean())
            if masked:  # given what is observed, which here depends a little on the state
                assert share == pytest.approx(mass, abs=0.06)
            else:
                assert share * len(bins) / 6000 == pytest.approx(mass, abs=0.02)
            total += mass
    ended = float(futures.ended.mean())  # the stop token has the rest of the mass
    assert total == pytest.approx(1.0 - ended, abs=0.06 if masked else 0.02)


def test_hidden_entries_do_not_matter_and_count_only_where_the_model_knows_masks(rng: np.random.Generator) -> None:
    plain = random_dataset(rng)
    state, past = start_of(rng, starts=1)
    past.states[0, :, 0] = np.nan
    unmasked = TransformerPredictor(make_model(plain, window=4))
    with pytest.raises(ValueError, match="trained with masks"):
        unmasked.predict(state, past, None, 2, 3)
    masked = TransformerPredictor(make_model(masked_dataset(plain, 0.5, 0, NUM_BINS), window=4, num_bins=NUM_BINS + 1))
    assert masked._state_tokens(past.states)[0, :, 0].tolist() == [NUM_BINS] * 4
    assert masked._state_tokens(np.full((1, 2), 1e6, dtype=np.float32)).tolist() == [[NUM_BINS - 1] * 2]
    futures = masked.predict(state, past, None, 4, 50, seed=0)
    hidden = np.isnan(futures.states) & ~futures.ended[..., None]
    assert hidden.any() and not hidden.all()
    action, following = np.zeros((1, 1), dtype=np.float32), np.array([[0.1, np.nan]], dtype=np.float32)
    assert np.isfinite(masked.log_prob(state, past, action, following)).all()
    nothing = np.full((1, 2), np.nan, dtype=np.float32)
    assert masked.log_prob(state, past, action, nothing).tolist() == [0.0]


def test_futures_are_the_same_for_equal_seeds_and_given_actions_are_taken(rng: np.random.Generator) -> None:
    predictor = TransformerPredictor(make_model(random_dataset(rng), window=3), max_rows=7)
    state, past = start_of(rng)
    actions = rng.normal(size=(2, 4, 1)).astype(np.float32)
    one, again, other = (predictor.predict(state, past, actions, 4, 9, seed=seed) for seed in (5, 5, 6))
    assert one.states.shape == (2, 9, 4, 2)
    np.testing.assert_array_equal(one.states, again.states)
    assert differ(one.states, other.states)
    assert differ(predictor.predict(state, past, -actions, 4, 9, seed=5).states, one.states)
    with pytest.raises(ValueError, match=r"given actions must have shape \(2, 3\)"):
        predictor.predict(state, past, actions, 3, 9)


def test_models_with_rewards_are_refused(tiny_model: TrajectoryModel) -> None:
    with pytest.raises(ValueError, match="--tokens.rewards false"):
        TransformerPredictor(tiny_model)


def constant_policy(action: float, *, masked: bool = False) -> Behaviour:
    """Takes the mask of the only state dimension times an action, almost without noise."""
    config = EnsembleConfig(num_networks=1, num_elites=1, num_layers=1, width=2)
    networks = GaussianNetworks(1, 1 + masked, 1, num_layers=1, width=2, generator=torch.Generator())
    with torch.no_grad():
        for weight in networks.weights:
            weight.zero_()
        if masked:
            networks.weights[0][0, 1, 0] = 50.0  # swish is linear there
            networks.weights[1][0, 0, 0] = action / 50.0
            networks.biases[1][0, 0, 1] = -40.0
        else:
            networks.biases[1][0, 0] = torch.tensor([action, -40.0])
        networks.min_log_variance.fill_(-60.0)
        networks.max_log_variance.fill_(60.0)
    scales = {name: torch.zeros(1) for name in ("input_mean", "target_mean")}
    scales |= {name: torch.ones(1) for name in ("input_std", "target_std")}
    scales |= {"low": torch.full((1,), -9.0), "high": torch.full((1,), 9.0)}
    return Behaviour(networks, scales, config, masked=masked)


def adding(*, masked: bool) -> Ensemble:
    """One network: s' = known s + a, almost without noise."""
    config = EnsembleConfig(num_networks=1, num_elites=1, num_layers=1, width=2)
    networks = GaussianNetworks(1, 2 + masked, 1, num_layers=1, width=2, generator=torch.Generator())
    with torch.no_grad():
        for weight in networks.weights:
            weight.zero_()
        networks.biases[0].fill_(50.0)
        networks.weights[0][0, 1, 0] = 1.0
        networks.weights[1][0, 0, 0] = 1.0
        networks.biases[1][0, 0] = torch.tensor([-50.0, -40.0])
        networks.min_log_variance.fill_(-60.0)
        networks.max_log_variance.fill_(60.0)
    scales = {"input_mean": torch.zeros(2), "input_std": torch.ones(2)}
    scales |= {"target_mean": torch.zeros(1), "target_std": torch.ones(1)}
    return Ensemble(networks, scales, config, observation_dim=1, masked=masked)


NO_PAST = Past(np.zeros((2, 0, 1), dtype=np.float32), np.zeros((2, 0, 1), dtype=np.float32))
STATES = np.array([[1.0], [2.0]], dtype=np.float32)


def test_the_ensemble_takes_given_actions_or_those_of_the_cloned_policy() -> None:
    predictor = EnsemblePredictor(adding(masked=False), constant_policy(0.5), max_rows=5)  # one start at a time
    own = predictor.predict(STATES, NO_PAST, None, 3, 4)
    np.testing.assert_allclose(own.states, np.broadcast_to(STATES[:, None, None] + [[0.5], [1.0], [1.5]], (2, 4, 3, 1)))
    actions = np.array([[[1.0], [1.0], [2.0]], [[0.0], [3.0], [0.0]]], dtype=np.float32)
    given = predictor.predict(STATES, NO_PAST, actions, 3, 4)
    np.testing.assert_allclose(given.states[:, 0, :, 0], [[2, 3, 5], [2, 5, 5]], atol=1e-4)
    assert not given.ended.any()
    with pytest.raises(ValueError, match="needs a cloned policy"):
        EnsemblePredictor(adding(masked=False)).predict(STATES, NO_PAST, None, 3, 4)


def test_a_masked_ensemble_and_its_policy_read_the_same_random_part_of_predicted_states() -> None:
    predictor = EnsemblePredictor(adding(masked=True), constant_policy(0.5, masked=True), hidden=0.5)
    start = np.array([[1.0], [np.nan]], dtype=np.float32)
    futures = predictor.predict(start, NO_PAST, None, 2, 400)
    np.testing.assert_allclose(futures.states[0, :, 0], 1.5, atol=1e-4)  # observed: 1 + 0.5
    np.testing.assert_allclose(futures.states[1, :, 0], 0.0, atol=1e-4)  # hidden: the mean of the data, and no action
    seen = futures.states[0, :, 1, 0]
    assert np.isclose(seen, 2.0, atol=1e-3).mean() == pytest.approx(0.5, abs=0.1)
    assert np.isclose(seen, 0.0, atol=1e-3).mean() == pytest.approx(0.5, abs=0.1)
    with pytest.raises(ValueError, match="trained with masks"):
        EnsemblePredictor(adding(masked=False), constant_policy(0.5)).predict(start, NO_PAST, None, 2, 4)


def test_samples_that_diverge_are_far_away_but_finite() -> None:
    predictor = EnsemblePredictor(drifting(1e38, std=1e-3), constant_policy(0.0))
    states = predictor.predict(STATES, NO_PAST, None, 9, 3).states
    assert np.isfinite(states).all() and states[:, :, -1].min() > 1e29


def test_the_density_of_an_ensemble_is_its_mixture_of_gaussians() -> None:
    predictor = EnsemblePredictor(drifting(0.0, 1.0, std=0.5))
    found = predictor.log_prob(STATES, NO_PAST, np.zeros((2, 1), dtype=np.float32), STATES + np.float32(1.0))
    each = [math.exp(-0.5 * (x / 0.5) ** 2) / (0.5 * math.sqrt(2 * math.pi)) for x in (1.0, 0.0)]
    np.testing.assert_allclose(found, math.log(sum(each) / 2), rtol=1e-5)
    hidden = np.full((2, 1), np.nan, dtype=np.float32)
    np.testing.assert_allclose(
        predictor.log_prob(STATES, NO_PAST, np.zeros((2, 1), dtype=np.float32), hidden), 0.0, atol=1e-6
    )


def test_folders_are_loaded_as_what_they_are(rng: np.random.Generator, tmp_path: Path) -> None:
    make_model(random_dataset(rng), window=3).save(tmp_path / "run")
    assert isinstance(load_predictor(tmp_path / "run"), TransformerPredictor)
    drifting(0.0, 1.0).save(tmp_path / "pets")
    constant_policy(0.5).save(tmp_path / "pets" / BEHAVIOUR)
    predictor = load_predictor(tmp_path / "pets")
    assert isinstance(predictor, EnsemblePredictor)
    assert predictor.predict(STATES, NO_PAST, None, 1, 4).states.shape == (2, 4, 1, 1)
