"""Attention maps are the weights that the model itself uses."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trajectory_transformer.analysis.attention import (
    attention_maps,
    head_scores,
    token_labels,
    uniform_attention,
    window_tokens,
)
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
    assert token_labels(layout, names, 5, first_step=7)[-1] == "x, step 8"


LAYOUT = TokenLayout(goal_dim=1, observation_dim=2, action_dim=1, rewards=False)  # transitions of 3 tokens
LENGTH = 1 + 4 * 3


def reading(columns: Callable[[int], int]) -> npt.NDArray[np.float32]:
    """A map whose rows read one column each."""
    weights = np.zeros((LENGTH, LENGTH), dtype=np.float32)
    for row in range(LENGTH):
        weights[row, columns(row)] = 1.0
    return weights


@pytest.mark.parametrize(
    ("columns", "markov", "striation"),
    [
        (lambda row: row, 1.0, 0.0),
        (lambda row: row - 2, 1.0, 0.0),  # within the last transition
        (lambda row: row - 3, 0.0, 1.0),  # the same slot one transition back
        (lambda row: row - 4, 0.0, 1.0),
        (lambda row: 2, 0.0, 1.0),  # everything reads one slot
        (lambda row: 0, 0.0, 0.0),  # the goal belongs to no transition
        # Slots 0 and 2 read one slot each; slot 1 reads another one in every transition.
        (lambda row: {7: 1, 8: 1, 9: 2, 10: 4, 11: 3, 12: 2}.get(row, 0), 0.0, (1.0 + 0.5 + 1.0) / 3),
    ],
)
def test_scores_of_heads_that_read_one_token(columns: Callable[[int], int], markov: float, striation: float) -> None:
    own = head_scores(reading(columns), LAYOUT)
    np.testing.assert_allclose((own.markov, own.striation), (markov, striation), atol=1e-6)


def test_scores_are_shares_of_all_that_is_read(tiny_model: TrajectoryModel) -> None:
    layout, length = tiny_model.layout, tiny_model.gpt.max_tokens
    weights = uniform_attention(tiny_model, length)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)
    assert (weights[:, layout.value :: layout.size] == 0).all()
    own = head_scores(weights, layout)
    rows = range(2 * layout.size, length)
    assert own.markov == pytest.approx(np.mean([weights[row, row - layout.size + 1 : row + 1].sum() for row in rows]))
    assert 0 < own.striation < 1 - own.markov
    with pytest.raises(ValueError, match=r"more than two transitions \(14 tokens\) are needed, got 14 tokens"):
        head_scores(weights[:14, :14], layout)


def test_a_window_starts_with_the_goal_and_ends_with_the_episode(tiny_dataset: Dataset) -> None:
    config = ModelConfig(window=3, num_layers=1, num_heads=1, width=8)
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=10, goal_dims=(1,)), config, seed=0)
    episode = tiny_dataset.episodes[1]
    rows = model.tokenizer.encode(episode)
    tokens = window_tokens(model, episode, 2)
    assert len(tokens) == min(model.gpt.max_tokens, 1 + 3 * model.layout.size)
    np.testing.assert_array_equal(tokens[1:], rows[2:5].ravel()[: len(tokens) - 1])
    np.testing.assert_array_equal(tokens[:1], model.tokenizer.goals_of([episode])[0])
    assert len(window_tokens(model, episode, len(episode) - 1)) == 1 + 2 * model.layout.size  # and the final state
