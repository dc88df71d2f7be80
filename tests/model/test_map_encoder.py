"""Maps: added to every token, stored in checkpoints, and without effect on models that have none."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.map_encoder import MapEncoder
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.predict import predict
from trajectory_transformer.tokens.windows import gather_windows, tokenize

SIZES = ModelConfig(window=3, num_layers=1, num_heads=2, width=16, map_channels=4)


@pytest.fixture
def mapped(tiny_dataset: Dataset) -> Dataset:
    """The tiny dataset with a random map for each episode."""
    rng = np.random.default_rng(1)
    maps = rng.integers(2, size=(len(tiny_dataset), 2, 6, 5)).astype(np.uint8)
    return Dataset(tuple(replace(episode, map=each) for episode, each in zip(tiny_dataset, maps, strict=True)))


def create(dataset: Dataset, sizes: ModelConfig = SIZES) -> TrajectoryModel:
    return TrajectoryModel.create(dataset, TokenConfig(num_bins=10), sizes, seed=0)


def test_an_untrained_encoder_distinguishes_maps() -> None:
    torch.manual_seed(0)
    maps = torch.randint(0, 2, (64, 2, 9, 9), dtype=torch.uint8)
    encoded = MapEncoder((2, 9, 9), 8, 32)(maps).detach()
    assert encoded.shape == (64, 32)
    assert 0.005 < float(encoded.std(dim=0).mean()) < 0.1, "of the scale of token embeddings"


def test_a_map_embedding_is_added_to_every_token(mapped: Dataset) -> None:
    gpt = create(mapped).gpt
    tokens = torch.randint(0, 10, (2, 8), generator=torch.Generator().manual_seed(0))
    map_embedding = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shifted = gpt(tokens, map_embedding)
        # The same as adding it to all position embeddings, one row at a time.
        for row in range(2):
            gpt.position_embedding.add_(map_embedding[row])
            torch.testing.assert_close(gpt(tokens[row : row + 1]), shifted[row : row + 1])
            gpt.position_embedding.sub_(map_embedding[row])


def test_windows_have_the_map_of_their_episode(mapped: Dataset) -> None:
    model = create(mapped)
    data = tokenize(mapped, model.tokenizer)
    batch = gather_windows(data, torch.arange(data.num_windows), 3, model.tokenizer)
    expected = np.concatenate([np.repeat(e.map[None], len(e), axis=0) for e in mapped if e.map is not None])
    assert batch.maps is not None
    np.testing.assert_array_equal(batch.maps.numpy(), expected)
    assert batch.maps.dtype == torch.uint8


def test_checkpoints_store_the_encoder(mapped: Dataset, tmp_path: Path) -> None:
    model = create(mapped)
    model.save(tmp_path / "run")
    loaded = TrajectoryModel.load(tmp_path / "run")
    assert loaded.layout == model.layout and loaded.layout.map_shape == (2, 6, 5)
    maps = mapped.episodes[0].map
    before, after = model.encode_maps(maps), loaded.encode_maps(maps)
    assert before is not None and after is not None
    assert before.shape == (1, 16)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_checkpoints_without_a_map_shape_are_read(tiny_dataset: Dataset, tmp_path: Path) -> None:
    model = create(tiny_dataset)
    model.save(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.json"
    description = json.loads(path.read_text())
    del description["layout"]["map_shape"], description["model"]["map_channels"]
    path.write_text(json.dumps(description))
    loaded = TrajectoryModel.load(tmp_path / "run")
    assert loaded.layout.map_shape == ()
    assert loaded.gpt.map_encoder is None


def test_a_map_encoder_does_not_change_the_other_initial_weights(mapped: Dataset, tiny_dataset: Dataset) -> None:
    plain, ignoring, reading = create(tiny_dataset), create(mapped, replace(SIZES, map_channels=0)), create(mapped)
    assert ignoring.layout == plain.layout
    assert ignoring.encode_maps(mapped.episodes[0].map) is None
    for name, weights in plain.gpt.state_dict().items():
        assert torch.equal(ignoring.gpt.state_dict()[name], weights)
        assert torch.equal(reading.gpt.state_dict()[name], weights)
    more = reading.gpt.state_dict().keys() - plain.gpt.state_dict().keys()
    assert more and all(name.startswith("map_encoder.") for name in more)


def test_predictions_depend_on_the_map(mapped: Dataset) -> None:
    model = create(mapped)
    with torch.no_grad():
        for parameter in model.gpt.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    episode = mapped.episodes[1]
    futures = [
        predict(model, replace(episode, map=map), start=1, horizon=4, num_samples=8, seed=0).observations
        for map in (episode.map, episode.map, mapped.episodes[2].map)
    ]
    np.testing.assert_array_equal(futures[0], futures[1])
    assert not np.array_equal(futures[0], futures[2], equal_nan=True)


def test_a_missing_map_or_one_of_another_shape_is_refused(mapped: Dataset) -> None:
    model = create(mapped)
    with pytest.raises(ValueError, match=r"reads a map of shape \(2, 6, 5\) for every episode, got none"):
        model.encode_maps(None)
    with pytest.raises(ValueError, match=r"of shape \(2, 6, 5\) for every episode, got one of shape \(1, 6, 5\)"):
        model.encode_maps(np.zeros((4, 1, 6, 5), np.uint8))
