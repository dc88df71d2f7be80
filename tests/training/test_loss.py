"""The training loss, against a plain loop over all predictions."""

import pytest
import torch
from torch.nn import functional

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import Batch, gather_windows, tokenize
from trajectory_transformer.training.loss import losses_by_kind, weighted_loss

MODEL = ModelConfig(window=2, num_layers=1, num_heads=2, width=16, dropout=0.2)


def all_windows(model: TrajectoryModel, dataset: Dataset) -> Batch:
    """All windows of a dataset as one batch."""
    data = tokenize(dataset, model.tokenizer)
    return gather_windows(data, torch.arange(data.num_windows), model.gpt.config.window, model.tokenizer)


@pytest.mark.parametrize("goal_dims", [(), (1,), (2, 0)])
def test_the_loss_is_the_weighted_mean_over_all_predictions_after_the_goal(
    tiny_dataset: Dataset, goal_dims: tuple[int, ...]
) -> None:
    tokens = TokenConfig(num_bins=8, goal_dims=goal_dims)
    model = TrajectoryModel.create(tiny_dataset, tokens, MODEL, seed=0)
    model.gpt.requires_grad_(False)
    layout = model.layout
    batch = all_windows(model, tiny_dataset)
    loss, by_token = weighted_loss(model, batch, action_weight=5.0)

    first = max(layout.goal_dim, 1)
    total, count = 0.0, 0
    for row, real in zip(batch.tokens, batch.real, strict=True):
        logits = model.gpt(row[None, :-1])[0]
        for position in range(first, len(row)):
            count += 1
            slot = layout.slot(position)
            weight = 5.0 if layout.action.start <= slot < layout.action.stop else 1.0
            own = functional.cross_entropy(logits[position - first], row[position])
            total += float(own) * weight * float(real[position])
    assert by_token.numel() == count
    assert float(loss) == pytest.approx(total / count, rel=1e-5)


def test_losses_by_kind_are_means_over_real_tokens() -> None:
    layout = TokenLayout(1, 1, 1, rewards=True)
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    batch = Batch(tokens=torch.zeros(1, 9, dtype=torch.long), real=real)
    by_token = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 60.0, 70.0, 80.0]])  # s a r v s a r v
    assert losses_by_kind(by_token, batch, layout) == {"observation": 3.0, "action": 2.0, "reward": 3.0, "value": 4.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_loss_equals_the_eager_one(tiny_dataset: Dataset) -> None:
    model = TrajectoryModel.create(tiny_dataset, TokenConfig(num_bins=8), MODEL, seed=0)
    batch = all_windows(model, tiny_dataset)
    parameters = list(model.gpt.parameters())
    compiled = torch.compile(lambda: weighted_loss(model, batch, 5.0)[0])
    expected, found = weighted_loss(model, batch, 5.0)[0], compiled()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    pairs = zip(*(torch.autograd.grad(loss, parameters) for loss in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
