"""The eager engine: gradients, clipping and state of the optimizer."""

import pytest
import torch

from tests.training.test_loss import MODEL, all_windows
from trajectory_transformer.config import TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch
from trajectory_transformer.training.engine import EagerEngine
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import GRAD_CLIP


def model_and_batch(dataset: Dataset) -> tuple[TrajectoryModel, Batch]:
    model = TrajectoryModel.create(dataset, TokenConfig(num_bins=8), MODEL, seed=0)
    return model, all_windows(model, dataset)


@pytest.mark.parametrize(("action_weight", "clipped"), [(500.0, True), (0.0, False)])
def test_gradients_are_clipped_to_norm_1(tiny_dataset: Dataset, action_weight: float, clipped: bool) -> None:
    model, batch = model_and_batch(tiny_dataset)
    if not clipped:  # a small loss: few predictions count
        few = torch.zeros_like(batch.real)
        few[0, :3] = True
        batch = Batch(batch.tokens, batch.real & few)
    loss, _ = weighted_loss(model, batch, action_weight)
    names = [name for name, _ in model.gpt.named_parameters()]
    grads = dict(zip(names, torch.autograd.grad(loss, list(model.gpt.parameters())), strict=True))
    norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    assert (norm > GRAD_CLIP) == clipped and GRAD_CLIP == 1.0

    engine = EagerEngine(model, TrainConfig(action_weight=action_weight))
    outcome = engine.step(batch, 1e-3)
    assert float(outcome.norm) == pytest.approx(norm, rel=1e-5), "the norm before clipping"
    # After one step, the first moment is a tenth of the gradient that the optimizer got.
    state = engine.state()
    used = {name: state[f"exp_avg.{name}"] / 0.1 for name in names}
    total = float(torch.stack([grad.norm() for grad in used.values()]).norm())
    assert total == pytest.approx(1.0 if clipped else norm, rel=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(used[name], grad / norm if clipped else grad, rtol=1e-4, atol=1e-7, msg=name)


def test_a_step_returns_the_loss_before_the_update(tiny_dataset: Dataset) -> None:
    model, batch = model_and_batch(tiny_dataset)
    expected, by_token = weighted_loss(model, batch, 5.0)
    engine = EagerEngine(model, TrainConfig())
    outcome = engine.step(batch, 1e-2)
    torch.testing.assert_close(outcome.loss, expected.detach())
    torch.testing.assert_close(outcome.by_token, by_token.detach())
    assert float(engine.step(batch, 1e-2).loss) < float(outcome.loss)
    assert all(parameter.grad is None for parameter in model.gpt.parameters())


def test_the_learning_rate_of_a_step_is_its_argument(tiny_dataset: Dataset) -> None:
    model, batch = model_and_batch(tiny_dataset)
    before = model.gpt.heads.detach().clone()
    engine = EagerEngine(model, TrainConfig())
    engine.step(batch, 0.0)
    assert torch.equal(model.gpt.heads, before)
    engine.step(batch, 1e-3)
    # Adam's steps are about as large as the learning rate.
    assert 1e-4 < float((model.gpt.heads.detach() - before).abs().max()) < 3e-3


def test_a_restored_state_continues_with_the_same_weights(tiny_dataset: Dataset) -> None:
    one, batch = model_and_batch(tiny_dataset)
    other, _ = model_and_batch(tiny_dataset)
    first, second = EagerEngine(one, TrainConfig()), EagerEngine(other, TrainConfig())
    first.step(batch, 1e-2)
    other.gpt.load_state_dict(one.gpt.state_dict())
    second.load_state({name: value.clone() for name, value in first.state().items()})
    for engine in (first, second):
        engine.step(batch, 1e-2)
    for found, expected in zip(other.gpt.parameters(), one.gpt.parameters(), strict=True):
        assert torch.equal(found, expected)
