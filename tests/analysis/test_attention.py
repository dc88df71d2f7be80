"""Attention maps are the weights that the model itself uses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trajectory_transformer.analysis.attention import attention_maps, token_labels
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.gpt import Block
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.discretizer import TokenArray
from trajectory_transformer.tokens.layout import TokenLayout


@pytest.fixture
def sharp_model(tiny_dataset: Dataset) -> TrajectoryModel:
    """A model with large weights, whose attention is far from uniform."""
    config = ModelConfig(window=3, num_layers=2, num_heads=2, width=16, dropout=0.5)
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=10), config, seed=0)
    with torch.no_grad():
        for parameter in model.gpt.parameters():
            parameter.mul_(8.0)
    return model


def model_tokens(model: TrajectoryModel, dataset: Dataset) -> TokenArray:
    return model.tokenizer.encode(dataset.episodes[1]).ravel()[: model.gpt.max_tokens]


def test_maps_mix_values_as_the_attention_of_the_model(sharp_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    gpt, tokens = sharp_model.gpt, model_tokens(sharp_model, tiny_dataset)
    maps = attention_maps(sharp_model, tokens)
    assert maps.shape == (2, 2, len(tokens), len(tokens))
    mask = gpt.mask[: len(tokens), : len(tokens)]
    with torch.inference_mode():
        x = gpt.embed(torch.from_numpy(tokens)[None], 0, None)
        for block, weights in zip(gpt.blocks, maps, strict=True):
            assert isinstance(block, Block)
            query, key, value = block.project(x)
            own = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            torch.testing.assert_close(torch.from_numpy(weights) @ value[0], own[0], rtol=1e-4, atol=1e-4)
            x = block.finish(x, own)
    assert maps.max() > 0.9 and maps.std(axis=(2, 3)).min() > 0.05


def test_rows_sum_to_one_and_nothing_reads_the_future_or_a_value(
    sharp_model: TrajectoryModel, tiny_dataset: Dataset
) -> None:
    tokens, layout = model_tokens(sharp_model, tiny_dataset), sharp_model.layout
    maps = attention_maps(sharp_model, tokens)
    np.testing.assert_allclose(maps.sum(axis=-1), 1.0, rtol=1e-5)
    assert (np.triu(maps, k=1) == 0).all()
    assert (maps[..., layout.value :: layout.size] == 0).all()
    assert (maps[..., -1, 0] > 0).any()


def test_a_later_token_does_not_change_earlier_rows(sharp_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    tokens = model_tokens(sharp_model, tiny_dataset)
    changed = tokens.copy()
    changed[-1] = (changed[-1] + 1) % 10
    before, after = attention_maps(sharp_model, tokens), attention_maps(sharp_model, changed)
    np.testing.assert_array_equal(before[..., :-1, :-1], after[..., :-1, :-1])
    assert not np.array_equal(before, after)


def test_a_window_that_is_too_long_is_refused(tiny_model: TrajectoryModel) -> None:
    with pytest.raises(ValueError, match="1 to 20 tokens is needed, got 21"):
        attention_maps(tiny_model, np.zeros(21, dtype=np.int64))


def test_labels_name_goal_slot_and_step() -> None:
    layout = TokenLayout(1, 2, 1, False)
    names = ["goal x", "x", "y", "push"]
    assert token_labels(layout, names, 6) == [
        "goal x",
        "x, step 0",
        "y, step 0",
        "push, step 0",
        "x, step 1",
        "y, step 1",
    ]
    assert token_labels(replace(layout, goal_dim=0), names[1:], 2) == ["x, step 0", "y, step 0"]
