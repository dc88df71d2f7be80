"""The learning rate schedule, the optimizer recipes, and which weights decay."""

import itertools
import math
from typing import Literal

import pytest
import torch

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.optim import RECIPES, learning_rate, make_optimizer, total_steps, warmup_steps
from trajectory_transformer.training.train import Trainer


def rates(*, peak: float, warmup: int, total: int, final_share: float) -> list[float]:
    """Rates of all steps of a run."""
    return [
        learning_rate(step, peak=peak, warmup=warmup, total=total, final_share=final_share) for step in range(total)
    ]


def test_the_rate_rises_in_equal_steps_to_its_peak() -> None:
    assert rates(peak=8.0, warmup=4, total=20, final_share=0.1)[:5] == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_the_rate_decays_with_one_cosine_to_a_share_of_its_peak() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, peak=1.0, warmup=10, total=110, final_share=0.1)

    assert rate(10) == 1.0
    assert rate(35) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the way
    assert rate(60) == pytest.approx(0.55)  # half way
    assert rate(110) == pytest.approx(0.1)
    assert rate(1000) == pytest.approx(0.1)  # and stays there


@pytest.mark.parametrize(("warmup", "total"), [(0, 50), (7, 50), (49, 50), (0, 1), (2, 3)])
def test_after_the_warm_up_the_rate_never_rises(warmup: int, total: int) -> None:
    found = rates(peak=3.0, warmup=warmup, total=total, final_share=0.0)
    assert max(found) <= 3.0 and min(found) >= 0.0
    assert all(later > earlier for earlier, later in itertools.pairwise(found[:warmup]))
    falling = found[warmup:]
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert falling[0] == 3.0


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, peak=5.0, warmup=0, total=10, final_share=0.1) == 5.0


@pytest.mark.parametrize(
    ("config", "num_windows", "expected"),
    [
        (TrainConfig(steps=7), 1000, 7),
        (TrainConfig(epochs=2, batch_size=10), 100, 20),
        (TrainConfig(epochs=0.5, batch_size=10), 100, 5),
        (TrainConfig(batch_size=10), 20_000, 4000),  # two passes by default
        (TrainConfig(batch_size=10), 100, 2000),  # but at least 2,000 steps
        (TrainConfig(epochs=1, batch_size=256), 3, 1),  # at least one
    ],
)
def test_the_steps_of_a_run(config: TrainConfig, num_windows: int, expected: int) -> None:
    assert total_steps(config, num_windows) == expected


@pytest.mark.parametrize(
    ("config", "num_windows", "expected"),
    [
        (TrainConfig(warmup_steps=2000, steps=10), 100, 2000),
        (TrainConfig(warmup_steps=0), 100, 0),
        (TrainConfig(epochs=50, batch_size=10), 101, 11),  # one pass with an incomplete last batch
        (TrainConfig(epochs=5, batch_size=10), 1000, 50),  # a tenth of the run, which is less than a pass
        (TrainConfig(steps=5), 1000, 0),
    ],
)
def test_the_warm_up_of_a_run(config: TrainConfig, num_windows: int, expected: int) -> None:
    assert warmup_steps(config, num_windows) == expected


@pytest.mark.parametrize(
    ("optimizer", "betas", "decay", "final_share"),
    [("adamw", (0.9, 0.95), 0.1, 0.1), ("adam", (0.9, 0.999), 0.0, 0.0)],
)
def test_the_recipes_of_the_optimizers(
    tiny_model: TrajectoryModel,
    optimizer: Literal["adamw", "adam"],
    betas: tuple[float, float],
    decay: float,
    final_share: float,
) -> None:
    made = make_optimizer(tiny_model.gpt, TrainConfig(optimizer=optimizer, learning_rate=2e-3))
    assert [group["weight_decay"] for group in made.param_groups] == [decay, 0.0]
    assert all(group["lr"] == 2e-3 and group["betas"] == betas for group in made.param_groups)
    assert RECIPES[optimizer].final_share == final_share


@pytest.mark.parametrize(("optimizer", "last"), [("adamw", 0.1), ("adam", 0.0)])
def test_a_run_ends_at_the_final_rate_of_its_optimizer(
    tiny_model: TrajectoryModel, tiny_dataset: Dataset, optimizer: Literal["adamw", "adam"], last: float
) -> None:
    config = TrainConfig(steps=20, batch_size=2, learning_rate=1e-3, warmup_steps=4, optimizer=optimizer)
    trainer = Trainer(tiny_model, tokenize(tiny_dataset, tiny_model.tokenizer), config, log_every=1)
    found = [metrics.learning_rate for metrics in trainer.run() if metrics is not None]
    assert found[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    end = last + (1 - last) * 0.5 * (1 + math.cos(math.pi * 15 / 16))  # one step before the end of the cosine
    assert found[-1] == pytest.approx(1e-3 * end)


def test_only_the_weights_of_linear_layers_and_heads_decay(tiny_model: TrajectoryModel) -> None:
    optimizer = make_optimizer(tiny_model.gpt, TrainConfig())
    names = {id(parameter): name for name, parameter in tiny_model.gpt.named_parameters()}
    decayed, others = ({names[id(each)] for each in group["params"]} for group in optimizer.param_groups)
    layers = [f"blocks.{layer}.{name}.weight" for layer in range(2) for name in ("qkv", "out", "up", "down")]
    assert decayed == {*layers, "heads"}
    assert decayed | others == set(names.values()) and not decayed & others


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw", 0.99), ("adam", 1.0)])
def test_decay_shrinks_a_weight_by_its_share_of_the_rate(
    tiny_model: TrajectoryModel, optimizer: Literal["adamw", "adam"], factor: float
) -> None:
    gpt = tiny_model.gpt
    made = make_optimizer(gpt, TrainConfig(optimizer=optimizer, learning_rate=0.1))
    before = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for name, parameter in gpt.named_parameters():
        decays = name == "heads" or (name.endswith("weight") and name.startswith("blocks") and "norm" not in name)
        torch.testing.assert_close(parameter.detach(), before[name] * (factor if decays else 1.0))
