"""Discrete actions and observations: in files, as tokens, in checkpoints and in environments."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, load_npz, save_npz
from trajectory_transformer.data.sources import load_dataset, save_dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.rollout import make_envs, rollout
from trajectory_transformer.tokens.tokenizer import Tokenizer


@pytest.fixture
def cart_poles(rng: np.random.Generator) -> Dataset:
    """Four episodes in the format of CartPole; action 1 occurs once."""
    episodes = []
    for steps in (5, 8, 3, 6):
        actions = np.zeros((steps, 1), dtype=np.float32)
        actions[0] = steps == 8
        observations = rng.normal(size=(steps + 1, 4)).astype(np.float32)
        episodes.append(Episode(observations, actions, np.ones(steps, dtype=np.float32), terminated=True))
    observed = tuple(map(Dimension, ("x", "speed", "angle", "spin")))
    return Dataset(tuple(episodes), {"env": "CartPole-v1"}, observed, (Dimension("push", 2),))


def test_names_and_categories_are_saved_and_loaded(cart_poles: Dataset, tmp_path: Path) -> None:
    save_npz(cart_poles, tmp_path / "x.npz")
    loaded = load_npz(tmp_path / "x.npz")
    assert loaded.observation_dimensions == tuple(map(Dimension, ("x", "speed", "angle", "spin")))
    assert loaded.action_dimensions == (Dimension("push", 2),)


def test_dimensions_are_continuous_and_numbered_by_default(tiny_dataset: Dataset) -> None:
    assert tiny_dataset.action_dimensions == (Dimension("action 0"), Dimension("action 1"))
    assert [d.name for d in tiny_dataset.observation_dimensions] == ["observation 0", "observation 1", "observation 2"]


def test_dimensions_that_do_not_fit_the_episodes_are_refused(cart_poles: Dataset) -> None:
    with pytest.raises(ValueError, match="episode 1: push must be an integer from 0 to 0, got 1"):
        Dataset(cart_poles.episodes, action_dimensions=(Dimension("push", 1),))
    with pytest.raises(ValueError, match="action_dimensions must have 1 entries, one per action dimension, got 2"):
        Dataset(cart_poles.episodes, action_dimensions=(Dimension("a", 2), Dimension("b", 2)))
    with pytest.raises(ValueError, match="dimension 'push': categories must not be negative, got -1"):
        Dimension("push", -1)


def test_a_loaded_model_plans_exact_categories_in_a_discrete_environment(cart_poles: Dataset, tmp_path: Path) -> None:
    sizes = ModelConfig(window=3, num_layers=1, num_heads=2, width=16)
    model = TrajectoryModel.create(cart_poles, TokenConfig(num_bins=7), sizes, seed=0)
    model.save(tmp_path)
    loaded = TrajectoryModel.load(tmp_path)
    np.testing.assert_array_equal(loaded.tokenizer.decode_action(np.array([[0], [1]])), [[0.0], [1.0]])
    policy = Planner(loaded, search=SearchConfig(beam_width=2, horizon=1)).policy()
    episodes = rollout(make_envs("CartPole-v1", 2), policy, num_episodes=2, seed=0)
    assert {value for episode in episodes for value in episode.actions.ravel().tolist()} <= {0.0, 1.0}


@pytest.fixture
def walks(rng: np.random.Generator) -> Dataset:
    """Observations with one continuous dimension and one of 30 categories, few of which occur."""
    observations = np.stack([rng.normal(size=9), rng.choice([0, 3, 4, 29], size=9)], axis=1).astype(np.float32)
    episode = Episode(observations, np.zeros((8, 1), np.float32), None, terminated=False)
    return Dataset((episode,), {}, (Dimension("x"), Dimension("cell", 30)), (Dimension("turn", 2),))


def test_categories_of_observations_are_their_tokens(walks: Dataset) -> None:
    discretizer = Tokenizer.fit(walks, TokenConfig(num_bins=30, rewards=False)).discretizer
    every = np.arange(30.0)[:, None]  # categories that never occur included
    np.testing.assert_array_equal(discretizer.encode(every, slice(1, 2)), every)
    np.testing.assert_array_equal(discretizer.decode(np.arange(30)[:, None], slice(1, 2)), every)


def test_observations_with_more_categories_than_bins_are_binned_as_numbers(walks: Dataset) -> None:
    tokens = TokenConfig(num_bins=3, rewards=False, discretizer="uniform")
    discretizer = Tokenizer.fit(walks, tokens).discretizer
    np.testing.assert_array_equal(discretizer.encode(np.array([[0.0], [4.0], [29.0]]), slice(1, 2))[:, 0], [0, 0, 2])


@pytest.mark.parametrize("name", ["x.npz", "x.hdf5", "x.parquet", "x.csv", "tt/walks-v0"])
def test_dimensions_are_saved_and_loaded_in_every_format(
    walks: Dataset, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.chdir(tmp_path)
    save_dataset(walks, name)
    loaded = load_dataset(name)
    assert loaded.observation_dimensions == (Dimension("x"), Dimension("cell", 30))
    assert loaded.action_dimensions == (Dimension("turn", 2),)


@pytest.mark.parametrize("name", ["x.hdf5", "x.parquet", "x.csv", "tt/walks-v0"])
def test_only_npz_files_can_store_maps(
    walks: Dataset, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mapped = Dataset((replace(walks.episodes[0], map=np.zeros((1, 2, 2), np.uint8)),))
    with pytest.raises(ValueError, match=f"{name}: only .npz files can store the maps"):
        save_dataset(mapped, name)
    assert list(tmp_path.iterdir()) == []
