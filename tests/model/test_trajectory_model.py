"""Checkpoint folders of models: equal after loading, and refused if their parts do not match."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajectory_transformer.checkpoint import DESCRIPTION, WEIGHTS, read_tensors, write_tensors
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel


def test_a_saved_model_loads_with_equal_logits(tiny_model: TrajectoryModel, tmp_path: Path) -> None:
    tiny_model.save(tmp_path / "model")
    loaded = TrajectoryModel.load(tmp_path / "model")
    tokens = torch.arange(20)[None] % 11
    with torch.no_grad():
        assert torch.equal(loaded.gpt(tokens), tiny_model.gpt(tokens))
    assert not loaded.gpt.training
    assert loaded.device == torch.device("cpu")


def test_a_saved_model_loads_with_an_equal_discretizer_and_settings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # A continuous dimension, one with few distinct values, and a constant.
    states = np.stack([rng.normal(size=31), rng.integers(3, size=31), np.full(31, 0.1)], axis=1).astype(np.float32)
    episode = Episode(states, rng.normal(size=(30, 1)).astype(np.float32), np.ones(30, np.float32), terminated=True)
    tokens = TokenConfig(num_bins=10, goal_dims=(2, 0), termination_penalty=-100.0, authors_conventions=True)
    dataset = Dataset((episode,), {"env_id": "x", "seed": 1, "noise": 0.5, "note": None})
    model = TrajectoryModel.create(dataset, tokens, ModelConfig(window=2, num_layers=1, width=8), seed=0)
    model.save(tmp_path)
    loaded = TrajectoryModel.load(tmp_path)
    assert loaded.tokenizer.config == tokens
    assert loaded.layout == model.layout and loaded.layout.goal_dim == 2
    assert loaded.gpt.config == model.gpt.config
    assert loaded.metadata == {"env_id": "x", "seed": 1, "noise": 0.5, "note": None}
    bins, expected_bins = loaded.tokenizer.discretizer, model.tokenizer.discretizer
    assert len(bins.edges) == len(expected_bins.edges) == 6
    for found, expected in zip(bins.edges, expected_bins.edges, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(bins.values, expected_bins.values)


def test_a_folder_may_be_given_as_a_string(tiny_model: TrajectoryModel, tmp_path: Path) -> None:
    tiny_model.save(f"{tmp_path}/model")
    loaded = TrajectoryModel.load(f"{tmp_path}/model")
    assert torch.equal(loaded.gpt.heads, tiny_model.gpt.heads)


def test_bin_values_are_those_of_the_discretizer(tiny_model: TrajectoryModel) -> None:
    values = tiny_model.bin_values()
    assert values.shape == (tiny_model.layout.size, 10) and values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), tiny_model.tokenizer.discretizer.values.astype(np.float32))


def test_the_initial_weights_depend_on_the_seed_only(tiny_dataset: Dataset) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = TrajectoryModel.create(
            tiny_dataset, TokenConfig(num_bins=5), ModelConfig(window=1, num_layers=1, width=8), seed=seed
        )
        return torch.cat([parameter.detach().flatten() for parameter in model.gpt.parameters()])

    state = torch.get_rng_state()
    first = weights(3)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is untouched
    torch.manual_seed(99)
    assert torch.equal(weights(3), first)
    assert not torch.equal(weights(4), first)


def test_a_new_model_gives_the_same_logits_twice(tiny_dataset: Dataset) -> None:
    # Dropout is for training: a new model can plan at once.
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(), ModelConfig(window=2, num_layers=1, width=32), seed=0)
    tokens = torch.arange(10)[None]
    assert torch.equal(model.gpt(tokens), model.gpt(tokens))


def edit(folder: Path, section: str, key: str, value: object) -> None:
    """Change one setting in the description of a checkpoint."""
    description = json.loads((folder / DESCRIPTION).read_text())
    description[section][key] = value
    (folder / DESCRIPTION).write_text(json.dumps(description))


def drop(folder: Path, section: str) -> None:
    """Remove a section from the description of a checkpoint."""
    description = json.loads((folder / DESCRIPTION).read_text())
    del description[section]
    (folder / DESCRIPTION).write_text(json.dumps(description))


def replace_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change or remove one tensor of a checkpoint."""
    tensors: dict[str, Any] = read_tensors(folder / WEIGHTS)[0]
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    write_tensors(folder / WEIGHTS, tensors)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: edit(folder, "model", "width", 64),
        lambda folder: edit(folder, "model", "num_layers", 3),
        lambda folder: edit(folder, "model", "num_heads", 5),
        lambda folder: edit(folder, "model", "colour", "red"),
        lambda folder: edit(folder, "layout", "action_dim", 3),
        lambda folder: edit(folder, "layout", "observation_dim", 0),
        lambda folder: edit(folder, "tokens", "num_bins", 12),
        lambda folder: edit(folder, "tokens", "num_bins", "ten"),
        lambda folder: edit(folder, "tokens", "goal_dims", [0]),
        lambda folder: drop(folder, "layout"),
        lambda folder: drop(folder, "metadata"),
        lambda folder: replace_tensor(folder, "gpt.heads", lambda _: None),
        lambda folder: replace_tensor(folder, "gpt.heads", lambda heads: heads[:, :-1]),
        lambda folder: replace_tensor(folder, "discretizer.edges", lambda _: None),
        lambda folder: replace_tensor(folder, "discretizer.edges", lambda edges: edges[:-1]),
        lambda folder: replace_tensor(folder, "discretizer.values", lambda values: values[:-1]),
        lambda folder: replace_tensor(folder, "discretizer.values", lambda values: values[:, :-1]),
    ],
    ids=[
        "another-width",
        "more-layers",
        "heads-that-do-not-divide",
        "unknown-setting",
        "another-action",
        "no-observation",
        "more-bins",
        "bins-in-words",
        "goal-without-layout",
        "no-layout",
        "no-metadata",
        "no-heads",
        "smaller-heads",
        "no-edges",
        "fewer-edges",
        "fewer-values",
        "fewer-bins",
    ],
)
def test_parts_that_do_not_match_are_refused_by_name(
    tiny_model: TrajectoryModel, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "broken-model"
    tiny_model.save(folder)
    damage(folder)
    with pytest.raises(ValueError, match="broken-model: weights and description do not match"):
        TrajectoryModel.load(folder)


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_a_truncated_file_is_refused_by_name(tiny_model: TrajectoryModel, tmp_path: Path, name: str) -> None:
    tiny_model.save(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name}: .*truncated"):
        TrajectoryModel.load(tmp_path)
