"""Open-loop prediction: recorded actions, samples like the data, sliding windows and predicted ends."""

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.predict import predict, recorded
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.train import Trainer


@pytest.fixture(scope="module")
def counting() -> tuple[TrajectoryModel, Dataset]:
    """A model of a counter modulo 8 to which the action adds -1 or 1."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(60):
        actions = rng.choice([-1, 1], size=(30, 1)).astype(np.float32)
        states = (np.concatenate([[[rng.integers(8)]], actions]).cumsum(axis=0) % 8).astype(np.float32)
        episodes.append(Episode(states, actions, None, terminated=False))
    dataset = Dataset(tuple(episodes))
    tokens = TokenConfig(num_bins=8, discretizer="uniform", rewards=False)
    size = ModelConfig(window=3, num_layers=1, num_heads=2, width=32, dropout=0.0)
    model = TrajectoryModel.create(dataset, tokens, size, seed=0)
    data = tokenize(dataset, model.tokenizer)
    config = TrainConfig(steps=400, batch_size=64, learning_rate=1e-2, warmup_steps=10)
    for _ in Trainer(model, data, config).run():
        pass
    return model, dataset


def test_recorded_actions_lead_to_the_recorded_states(counting: tuple[TrajectoryModel, Dataset]) -> None:
    model, dataset = counting
    episode = dataset.episodes[0]
    # Twelve steps with a window of three transitions: the window slides nine times.
    prediction = predict(model, episode, start=5, horizon=12, num_samples=16, seed=0)
    assert prediction.observations.shape == (16, 12, 1)
    np.testing.assert_array_equal(prediction.actions, np.broadcast_to(episode.actions[5:17], (16, 12, 1)))
    right = prediction.observations == recorded(episode, 5, 12)
    assert right.mean() > 0.97


def test_sampled_actions_vary_and_states_follow_them(counting: tuple[TrajectoryModel, Dataset]) -> None:
    model, dataset = counting
    prediction = predict(model, dataset.episodes[1], start=0, horizon=6, num_samples=32, seed=1, given_actions=False)
    assert len(np.unique(prediction.actions.reshape(32, -1), axis=0)) > 10
    start = dataset.episodes[1].observations[0]
    expected = (start + prediction.actions.cumsum(axis=1)) % 8
    assert (prediction.observations == expected).mean() > 0.95


def test_the_same_seed_gives_the_same_futures(counting: tuple[TrajectoryModel, Dataset]) -> None:
    model, dataset = counting
    first, again, other = (
        predict(model, dataset.episodes[2], start=3, horizon=4, num_samples=8, seed=seed, given_actions=False)
        for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(first.actions, again.actions)
    assert (first.actions != other.actions).any()


def test_futures_are_nan_after_a_predicted_end(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    with torch.no_grad():
        tiny_model.gpt.heads[0, -1] = 1.0
        tiny_model.gpt.norm.weight.zero_()
        tiny_model.gpt.norm.bias.fill_(10.0)  # the first state slot always predicts the stop token
    prediction = predict(tiny_model, tiny_dataset.episodes[4], start=2, horizon=3, num_samples=4, seed=0)
    assert np.isnan(prediction.observations[..., 0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 9}, r"must lie in \[0, 9\), got 9"),
        ({"start": -1}, r"must lie in \[0, 9\), got -1"),
        ({"horizon": 0}, "at least 1, got 0 and 4"),
        ({"horizon": 8}, "7 recorded actions from step 2 on, got a horizon of 8"),
    ],
)
def test_impossible_predictions_are_refused(
    tiny_model: TrajectoryModel, tiny_dataset: Dataset, changes: dict[str, int], message: str
) -> None:
    start, horizon = changes.get("start", 2), changes.get("horizon", 3)
    with pytest.raises(ValueError, match=message):
        predict(tiny_model, tiny_dataset.episodes[4], start=start, horizon=horizon, num_samples=4, seed=0)
