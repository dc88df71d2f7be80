"""The GPT: what attends to what, and which embedding and which head belong to a token."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.config import ModelConfig
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.tokens.layout import TokenLayout

NUM_BINS = 5
CONFIG = ModelConfig(window=3, num_layers=2, num_heads=2, width=16, dropout=0.1)
LAYOUTS = [TokenLayout(goal, 2, 1, rewards) for goal in (0, 1, 2) for rewards in (True, False)]


def random_gpt(layout: TokenLayout, *, seed: int = 0) -> GPT:
    """A model in evaluation mode with large random weights."""
    generator = torch.Generator().manual_seed(seed)
    gpt = GPT(layout, NUM_BINS, CONFIG)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return gpt.double().eval().requires_grad_(False)


def random_tokens(gpt: GPT, batch: int = 4) -> Tensor:
    """Sequences as long as the window, with some stop tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(NUM_BINS + 1, (batch, gpt.max_tokens), generator=generator)


def change_by_prediction(gpt: GPT, tokens: Tensor, position: int) -> dict[int, float]:
    """How much a different token at a position changes the prediction of each position (keys) that has one."""
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % NUM_BINS
    difference = (gpt(changed) - gpt(tokens)).abs().amax(dim=(0, 2)).tolist()
    first = max(gpt.layout.goal_dim, 1)
    return dict(enumerate(difference, start=first))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_after_the_first_goal_token_is_predicted_once(layout: TokenLayout) -> None:
    gpt = random_gpt(layout)
    for length in (max(layout.goal_dim, 1), layout.length(1), gpt.max_tokens):
        logits = gpt(random_tokens(gpt)[:, :length])
        assert logits.shape == (4, length - max(layout.goal_dim - 1, 0), NUM_BINS + 1)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.rewards])
def test_no_token_attends_to_a_value_token(layout: TokenLayout) -> None:
    gpt = random_gpt(layout)
    values = [position for position, kept in enumerate(layout.readable(0, gpt.max_tokens)) if not kept]
    assert values == [layout.goal_dim + 4, layout.goal_dim + 9]
    for position in values:
        change = change_by_prediction(gpt, random_tokens(gpt), position)
        # It reaches the next prediction through the residual stream of its own position, and nothing else.
        assert change.pop(position + 1) > 1e-3
        assert max(change.values()) == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_changes_all_later_predictions_and_no_earlier_ones(layout: TokenLayout) -> None:
    gpt = random_gpt(layout)
    for position in range(gpt.max_tokens):
        change = change_by_prediction(gpt, random_tokens(gpt), position)
        assert all(amount == 0.0 for predicted, amount in change.items() if predicted <= position)
        if layout.readable(position, position + 1) == [True]:
            assert all(amount > 1e-6 for predicted, amount in change.items() if predicted > position)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shorter_sequence_gives_the_same_predictions(layout: TokenLayout) -> None:
    gpt = random_gpt(layout)
    tokens = random_tokens(gpt)
    whole = gpt(tokens)
    for length in range(max(layout.goal_dim, 1), gpt.max_tokens):
        part = gpt(tokens[:, :length])
        torch.testing.assert_close(part, whole[:, : part.shape[1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("goal_dim", [0, 2])
def test_each_slot_and_bin_has_an_embedding_and_all_stop_tokens_share_one(goal_dim: int) -> None:
    layout = TokenLayout(goal_dim, 1, 1, rewards=True)
    gpt = GPT(layout, NUM_BINS, ModelConfig(window=2, num_layers=1, num_heads=1, width=8)).eval()
    num_slots = goal_dim + 4
    stop = num_slots * NUM_BINS
    assert gpt.token_embedding.weight.shape == (stop + 1, 8)

    def embeddings_read(tokens: list[int]) -> list[int]:
        gpt.zero_grad()
        gpt(torch.tensor([tokens])).square().sum().backward()
        gradient = gpt.token_embedding.weight.grad
        assert gradient is not None
        return gradient.abs().sum(dim=1).nonzero().flatten().tolist()

    in_order = [slot % NUM_BINS for slot in range(num_slots)]
    assert embeddings_read(in_order) == [slot * NUM_BINS + slot % NUM_BINS for slot in range(num_slots)]
    assert embeddings_read([NUM_BINS] * num_slots) == [stop]
    # The second transition uses the embeddings of the first.
    goal, transition = in_order[:goal_dim], in_order[goal_dim:]
    assert embeddings_read(goal + transition + transition[:3]) == embeddings_read(in_order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_slot_is_predicted_by_its_own_head(layout: TokenLayout) -> None:
    gpt = GPT(layout, NUM_BINS, CONFIG).eval()
    with torch.no_grad():
        # Every hidden state becomes the first unit vector, so a logit is a head's first weight.
        gpt.norm.weight.zero_()
        gpt.norm.bias.copy_(functional.one_hot(torch.tensor(0), CONFIG.width))
        slots, bins = torch.arange(layout.size)[:, None], torch.arange(NUM_BINS + 1)
        gpt.heads[:, :, 0] = 10.0 * slots + bins
        logits = gpt(random_tokens(gpt))
    for index, predicted in enumerate(range(max(layout.goal_dim, 1), gpt.max_tokens + 1)):
        expected = [10.0 * layout.slot(predicted) + token for token in range(NUM_BINS + 1)]
        assert logits[0, index].tolist() == expected


def test_the_initial_loss_is_near_that_of_uniform_predictions() -> None:
    layout = TokenLayout(0, 3, 2, rewards=True)
    torch.manual_seed(0)
    gpt = GPT(layout, 100, ModelConfig(window=4, num_layers=2, width=64)).eval()
    tokens = torch.randint(101, (32, layout.length(4)))
    with torch.no_grad():
        loss = functional.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert math.log(101) < float(loss) < math.log(101) + 0.6


def test_dropout_is_active_in_training_mode_only() -> None:
    torch.manual_seed(0)
    gpt = GPT(LAYOUTS[0], NUM_BINS, CONFIG)
    tokens = random_tokens(gpt)
    assert not torch.equal(gpt.train()(tokens), gpt(tokens))
    assert torch.equal(gpt.eval()(tokens), gpt(tokens))


def test_a_sequence_longer_than_the_window_does_not_fit() -> None:
    gpt = random_gpt(LAYOUTS[0])
    assert gpt.max_tokens == 3 * 5 - 1  # the last token of a window is predicted but never read
    with pytest.raises(AssertionError, match="15 tokens do not fit the 14"):
        gpt(torch.zeros(1, 15, dtype=torch.long))
