"""Training: it learns, it repeats bit for bit, and a run cut in two ends as one that was not."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import Batch, gather_windows, tokenize
from trajectory_transformer.training.loss import losses_by_kind, weighted_loss
from trajectory_transformer.training.train import Metrics, Trainer

TOKENS = TokenConfig(num_bins=8)
MODEL = ModelConfig(window=2, num_layers=1, num_heads=2, width=16, dropout=0.2)
TRAIN = TrainConfig(steps=12, batch_size=8, learning_rate=1e-2, warmup_steps=2, log_every=5, seed=3)


def make_trainer(
    dataset: Dataset, train: TrainConfig = TRAIN, tokens: TokenConfig = TOKENS, model: ModelConfig = MODEL
) -> Trainer:
    """A run at its first step."""
    made = TrajectoryModel.create(dataset, tokens, model, seed=train.seed)
    return Trainer(made, tokenize(dataset, made.discretizer, made.layout, tokens), train)


def run(trainer: Trainer, steps: int | None = None) -> list[Metrics]:
    """Train to the end, or for so many steps."""
    records = []
    for index, metrics in enumerate(trainer.run(), start=1):
        if metrics is not None:
            records.append(metrics)
        if index == steps:
            break
    return records


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: value.clone() for name, value in trainer.model.gpt.state_dict().items()}


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def clockwork(num_episodes: int = 6) -> Dataset:
    """Episodes in which everything follows from the first state: it goes round, the action names it."""
    episodes = []
    for index in range(num_episodes):
        states = (index + np.arange(9)) % 4
        episodes.append(
            Episode(
                observations=states.astype(np.float32)[:, None],
                actions=(states[:-1] / 4).astype(np.float32)[:, None],
                rewards=(states[:-1] == 0).astype(np.float32),
                terminated=False,
            )
        )
    return Dataset(tuple(episodes))


def test_the_loss_falls_on_data_that_can_be_learnt() -> None:
    config = replace(TRAIN, steps=150, batch_size=32, log_every=10)
    tokens = replace(TOKENS, discretizer="uniform")
    records = run(make_trainer(clockwork(), config, tokens, replace(MODEL, dropout=0.0, width=32)))
    assert records[-1].loss < 0.25 * records[0].loss
    # What follows from the state is certain; the return depends on how much time is left, which no token says.
    assert all(records[-1].losses[kind] < 0.01 for kind in ("observation", "action", "reward"))
    assert records[-1].losses["value"] > 0.5


def test_metrics_tell_the_step_the_rate_and_every_kind_of_token(tiny_dataset: Dataset) -> None:
    records = run(make_trainer(tiny_dataset))
    assert [record.step for record in records] == [5, 10, 12]  # every fifth and the last
    assert all(record.total_steps == 12 for record in records)
    assert records[0].learning_rate == pytest.approx(1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * 2 / 10))))
    assert all(record.gradient_norm > 0 and record.tokens_per_second > 0 for record in records)
    assert all(sorted(record.losses) == ["action", "observation", "reward", "value"] for record in records)
    without = make_trainer(tiny_dataset, tokens=replace(TOKENS, rewards=False))
    assert sorted(run(without)[-1].losses) == ["action", "observation"]


def test_two_runs_are_equal_bit_for_bit(tiny_dataset: Dataset) -> None:
    first, second = make_trainer(tiny_dataset), make_trainer(tiny_dataset)
    losses = [record.loss for record in run(first)]
    torch.manual_seed(12345)  # the state of the global generator does not matter
    assert [record.loss for record in run(second)] == losses
    assert_identical(weights(second), weights(first))


def test_every_step_drops_other_activations(tiny_dataset: Dataset) -> None:
    seeds = [torch.initial_seed() for _ in make_trainer(tiny_dataset).run()]  # of the generator that dropout draws from
    assert len(set(seeds)) == len(seeds) == 12


def test_another_seed_gives_another_run(tiny_dataset: Dataset) -> None:
    first, second = make_trainer(tiny_dataset), make_trainer(tiny_dataset, replace(TRAIN, seed=4))
    assert run(first)[-1].loss != run(second)[-1].loss


@pytest.mark.parametrize("stop_after", [0, 1, 5, 11, 12])
def test_a_run_resumed_at_any_step_ends_with_the_same_weights(
    tiny_dataset: Dataset, tmp_path: Path, stop_after: int
) -> None:
    whole = make_trainer(tiny_dataset)
    run(whole)
    stopped = make_trainer(tiny_dataset)
    if stop_after:
        run(stopped, stop_after)
    stopped.save(tmp_path / "state.safetensors")

    resumed = make_trainer(tiny_dataset)
    with torch.no_grad():
        for parameter in resumed.model.gpt.parameters():
            parameter.fill_(7.0)  # all that matters comes from the file
    torch.manual_seed(0)
    resumed.load(tmp_path / "state.safetensors")
    assert resumed.step == stop_after
    run(resumed)
    assert resumed.step == 12
    assert_identical(weights(resumed), weights(whole))


def test_a_state_of_another_model_is_refused_by_name(tiny_dataset: Dataset, tmp_path: Path) -> None:
    make_trainer(tiny_dataset).save(tmp_path / "other.safetensors")
    wider = make_trainer(tiny_dataset, model=replace(MODEL, width=32))
    with pytest.raises(ValueError, match=r"other\.safetensors: "):
        wider.load(tmp_path / "other.safetensors")


def test_a_truncated_or_missing_state_is_refused_by_name(tiny_dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    trainer = make_trainer(tiny_dataset)
    with pytest.raises(ValueError, match=r"state\.safetensors: the file is missing"):
        trainer.load(path)
    trainer.save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"state\.safetensors: .*truncated"):
        trainer.load(path)


def test_a_trained_model_gives_the_same_logits_twice(tiny_dataset: Dataset) -> None:
    # Dropout ends with the training: the model may be planned with at once.
    trainer = make_trainer(tiny_dataset)
    run(trainer)
    gpt = trainer.model.gpt
    tokens = torch.zeros(1, gpt.max_tokens, dtype=torch.long)
    assert torch.equal(gpt(tokens), gpt(tokens))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # CPUs without bfloat16
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_biases_of_keys_stay_where_they_are(tiny_dataset: Dataset, precision: str) -> None:
    # Softmax takes them away, so all that could move them is rounding.
    trainer = make_trainer(tiny_dataset, replace(TRAIN, precision=precision))  # type: ignore[arg-type]
    run(trainer)
    queries, keys, values = trainer.model.gpt.state_dict()["blocks.0.qkv.bias"].chunk(3)
    assert (keys == 0).all()
    assert queries.abs().min() > 0
    assert values.abs().min() > 0


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(tiny_dataset: Dataset) -> None:
    trainer = make_trainer(tiny_dataset, replace(TRAIN, log_every=1))
    with torch.no_grad():
        trainer.model.gpt.heads.fill_(torch.nan)
    with pytest.raises(ValueError, match="the loss is nan at step 1: lower train.learning_rate"):
        run(trainer)


@pytest.mark.parametrize("goal_dims", [(), (1,), (2, 0)])
def test_the_loss_is_the_weighted_mean_over_all_predictions_after_the_goal(
    tiny_dataset: Dataset, goal_dims: tuple[int, ...]
) -> None:
    tokens = replace(TOKENS, goal_dims=goal_dims)
    model = TrajectoryModel.create(tiny_dataset, tokens, MODEL, seed=0)
    model.gpt.eval().requires_grad_(False)
    layout = model.layout
    data = tokenize(tiny_dataset, model.discretizer, layout, tokens)
    batch = gather_windows(data, torch.arange(data.num_windows), MODEL.window, layout, tokens)
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
