"""Training: it learns, it is reproducible bit for bit, and a resumed run equals an uninterrupted one."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.train import Metrics, Trainer

TOKENS = TokenConfig(num_bins=8)
MODEL = ModelConfig(window=2, num_layers=1, num_heads=2, width=16, dropout=0.2)
TRAIN = TrainConfig(steps=12, batch_size=8, learning_rate=1e-2, warmup_steps=2)


def make_trainer(
    dataset: Dataset,
    train: TrainConfig = TRAIN,
    tokens: TokenConfig = TOKENS,
    model: ModelConfig = MODEL,
    *,
    seed: int = 3,
    log_every: int | None = 5,
) -> Trainer:
    """A run at its first step."""
    made = TrajectoryModel.create(dataset, tokens, model, seed=seed)
    return Trainer(made, tokenize(dataset, made.tokenizer), train, seed=seed, log_every=log_every)


def run(trainer: Trainer, steps: int | None = None) -> list[Metrics]:
    """Train to the end, or for a number of steps."""
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
    """Deterministic episodes: the state counts modulo 4, and the action is a quarter of the state."""
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


def test_the_loss_falls_on_predictable_data() -> None:
    config = replace(TRAIN, steps=150, batch_size=32)
    tokens = replace(TOKENS, discretizer="uniform")
    trainer = make_trainer(clockwork(), config, tokens, replace(MODEL, dropout=0.0, width=32), log_every=10)
    records = run(trainer)
    assert records[-1].loss < 0.25 * records[0].loss
    # All but the return follows from the state; the return depends on the remaining time, which no token holds.
    assert all(records[-1].losses[kind] < 0.01 for kind in ("observation", "action", "reward"))
    assert records[-1].losses["value"] > 0.5


def test_metrics_hold_the_step_the_learning_rate_and_losses_by_kind(tiny_dataset: Dataset) -> None:
    records = run(make_trainer(tiny_dataset))
    assert [record.step for record in records] == [5, 10, 12]  # every fifth and the last
    assert all(record.total_steps == 12 for record in records)
    assert records[0].learning_rate == pytest.approx(1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * 2 / 10))))
    assert all(record.gradient_norm > 0 and record.tokens_per_second > 0 for record in records)
    assert all(sorted(record.losses) == ["action", "observation", "reward", "value"] for record in records)
    paper = run(make_trainer(tiny_dataset, replace(TRAIN, optimizer="adam")))
    assert paper[0].learning_rate == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 2 / 10)))
    without = make_trainer(tiny_dataset, tokens=replace(TOKENS, rewards=False))
    assert sorted(run(without)[-1].losses) == ["action", "observation"]


def test_metrics_come_every_twentieth_step_or_hundred_times_a_run(tiny_dataset: Dataset) -> None:
    assert [record.step for record in run(make_trainer(tiny_dataset, log_every=None))] == list(range(1, 13))
    assert make_trainer(tiny_dataset, replace(TRAIN, steps=500), log_every=None).log_every == 5
    assert make_trainer(tiny_dataset, replace(TRAIN, steps=10_000), log_every=None).log_every == 20


def test_two_runs_are_equal_bit_for_bit(tiny_dataset: Dataset) -> None:
    first, second = make_trainer(tiny_dataset), make_trainer(tiny_dataset)
    losses = [record.loss for record in run(first)]
    torch.manual_seed(12345)  # the state of the global generator does not matter
    assert [record.loss for record in run(second)] == losses
    assert_identical(weights(second), weights(first))


def test_every_step_has_its_own_dropout(tiny_dataset: Dataset) -> None:
    seeds = [torch.initial_seed() for _ in make_trainer(tiny_dataset).run()]  # of the generator that dropout draws from
    assert len(set(seeds)) == len(seeds) == 12


def test_another_seed_gives_a_different_run(tiny_dataset: Dataset) -> None:
    first, second = make_trainer(tiny_dataset), make_trainer(tiny_dataset, seed=4)
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
            parameter.fill_(7.0)  # everything comes from the file
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
    # Dropout ends with the training: the model can plan at once.
    trainer = make_trainer(tiny_dataset)
    run(trainer)
    gpt = trainer.model.gpt
    tokens = torch.zeros(1, gpt.max_tokens, dtype=torch.long)
    assert torch.equal(gpt(tokens), gpt(tokens))


@pytest.fixture
def mkldnn_restored() -> Iterator[None]:
    """On a CPU without bfloat16, torch disables oneDNN for the whole process, which changes the bits of float32."""
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled):
        yield


@pytest.mark.filterwarnings("ignore::UserWarning")  # CPUs without bfloat16 instructions
@pytest.mark.usefixtures("mkldnn_restored")
@pytest.mark.parametrize("bf16", [False, True])
def test_key_biases_are_not_trained(tiny_dataset: Dataset, bf16: bool) -> None:
    # Softmax removes them, so only rounding errors could change them.
    trainer = make_trainer(tiny_dataset)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        run(trainer)
    queries, keys, values = trainer.model.gpt.state_dict()["blocks.0.qkv.bias"].chunk(3)
    assert (keys == 0).all()
    assert queries.abs().min() > 0
    assert values.abs().min() > 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # CPUs without bfloat16 instructions
@pytest.mark.usefixtures("mkldnn_restored")
def test_bfloat16_matmuls_follow_float32_and_leave_weights_in_float32(tiny_dataset: Dataset) -> None:
    sizes = replace(MODEL, dropout=0.0, width=32)
    config = replace(TRAIN, learning_rate=1e-3)
    exact, low = (make_trainer(tiny_dataset, config, model=sizes, log_every=1) for _ in range(2))
    expected = [record.loss for record in run(exact)]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # weights change between steps
        found = [record.loss for record in run(low)]
    assert found != expected
    assert found == pytest.approx(expected, rel=1e-2)
    assert {parameter.dtype for parameter in low.model.gpt.parameters()} == {torch.float32}


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(tiny_dataset: Dataset) -> None:
    trainer = make_trainer(tiny_dataset, log_every=1)
    with torch.no_grad():
        trainer.model.gpt.heads.fill_(torch.nan)
    with pytest.raises(ValueError, match="the loss is nan at step 1: lower train.learning_rate"):
        run(trainer)
