"""The learning rate by value, and which weights decay."""

import itertools
import math

import pytest
import torch

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.training.optim import learning_rate, make_optimizer, total_steps, warmup_steps


def rates(*, peak: float, warmup: int, total: int, final_share: float) -> list[float]:
    """Rates of all steps of a run."""
    return [
        learning_rate(step, peak=peak, warmup=warmup, total=total, final_share=final_share) for step in range(total)
    ]


def test_the_rate_climbs_in_equal_steps_to_its_peak() -> None:
    assert rates(peak=8.0, warmup=4, total=20, final_share=0.1)[:5] == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_the_rate_falls_along_one_cosine_to_a_share_of_its_peak() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, peak=1.0, warmup=10, total=110, final_share=0.1)

    assert rate(10) == 1.0
    assert rate(35) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the way
    assert rate(60) == pytest.approx(0.55)  # half way
    assert rate(110) == pytest.approx(0.1)
    assert rate(1000) == pytest.approx(0.1)  # and stays there: it never climbs back


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
        (TrainConfig(epochs=50, epoch_size=1_000_000, batch_size=256), 12345, 195_312),  # 5e7 / 256 = 195312.5
        (TrainConfig(epochs=1, batch_size=256), 3, 1),  # at least one
    ],
)
def test_a_runs_steps(config: TrainConfig, num_windows: int, expected: int) -> None:
    assert total_steps(config, num_windows) == expected


@pytest.mark.parametrize(
    ("config", "num_windows", "expected"),
    [
        (TrainConfig(warmup_steps=2000, steps=10), 100, 2000),
        (TrainConfig(warmup_steps=0), 100, 0),
        (TrainConfig(epochs=50, batch_size=10), 101, 11),  # one pass, its last batch not full
        (TrainConfig(epochs=5, batch_size=10), 1000, 50),  # a tenth of the run, less than a pass
        (TrainConfig(steps=5), 1000, 0),
    ],
)
def test_a_runs_warm_up(config: TrainConfig, num_windows: int, expected: int) -> None:
    assert warmup_steps(config, num_windows) == expected


def test_only_the_weights_of_linear_layers_decay(tiny_model: TrajectoryModel) -> None:
    config = TrainConfig(weight_decay=0.25, learning_rate=2e-3, betas=(0.8, 0.9))
    optimizer = make_optimizer(tiny_model.gpt, config)
    names = {id(parameter): name for name, parameter in tiny_model.gpt.named_parameters()}
    decayed, others = ({names[id(each)] for each in group["params"]} for group in optimizer.param_groups)
    layers = [f"blocks.{layer}.{name}.weight" for layer in range(2) for name in ("qkv", "out", "up", "down")]
    assert decayed == set(layers)
    assert decayed | others == set(names.values()) and not decayed & others
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert all(group["lr"] == 2e-3 and group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_decay_shrinks_a_weight_by_its_share_of_the_rate(tiny_model: TrajectoryModel) -> None:
    gpt = tiny_model.gpt
    optimizer = make_optimizer(gpt, TrainConfig(weight_decay=0.5, learning_rate=0.1))
    before = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in gpt.named_parameters():
        decays = name.endswith("weight") and name.startswith("blocks") and "norm" not in name
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))
