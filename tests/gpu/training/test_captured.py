"""Training on a GPU: captured steps equal the steps themselves, and runs resume bit for bit and move to the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.gpu.training.test_fused import MODEL, with_maps
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.backends import make_batch_maker, make_engine
from trajectory_transformer.gpu.training import captured as captured_module
from trajectory_transformer.gpu.training.captured import CapturedCalls
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler uses what torch deprecates, and warns where float32 is intended.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32 tensor cores:UserWarning"
    ),
]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SIZES = replace(MODEL, dropout=0.2)
SHORT = TrainConfig(steps=12, batch_size=8, learning_rate=1e-3, warmup_steps=2)


def make_trainer(
    dataset: Dataset,
    config: TrainConfig,
    device: torch.device = GPU,
    *,
    sizes: ModelConfig = SIZES,
    log_every: int = 1,
) -> Trainer:
    """A small run on a device, with the engine and batches of its backend."""
    model = TrajectoryModel.create(dataset, TokenConfig(num_bins=9), sizes, seed=0)
    data = tokenize(dataset, model.tokenizer).to(device)
    model.gpt.to(device)
    engine, make_batch = make_engine(model, config, World()), make_batch_maker(model, data, config)
    return Trainer(model, data, config, seed=3, engine=engine, make_batch=make_batch, log_every=log_every)


def losses_of(trainer: Trainer, steps: int | None = None) -> list[float]:
    """The loss of every step, up to a number of steps."""
    losses = []
    for metrics in trainer.run():
        assert metrics is not None
        losses.append(metrics.loss)
        if len(losses) == steps:
            break
    return losses


def without_compilation(function: Callable[..., object], **_: object) -> Callable[..., object]:
    """Replaces torch.compile."""
    return function


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("backend", "bf16", "compiled"),
    [
        ("compiled", False, False),
        ("compiled", False, True),
        ("compiled", True, False),
        ("compiled", True, True),
        ("fused", True, True),
    ],
)
def test_captured_steps_equal_steps_run_one_by_one(
    tiny_dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    backend: Literal["compiled", "fused"],
    bf16: bool,
    compiled: bool,
    mapped: bool,
) -> None:
    dataset = with_maps(tiny_dataset) if mapped else tiny_dataset
    monkeypatch.setattr(captured_module, "supports_bf16", lambda: bf16)
    if not compiled:
        monkeypatch.setattr(torch, "compile", without_compilation)
    captured, plain = (make_trainer(dataset, replace(SHORT, backend=backend)) for _ in range(2))
    found = losses_of(captured)
    monkeypatch.setattr(CapturedCalls, "WARM_UP", 1000)  # never capture
    # The gradients of embeddings in compiled code use atomics, so two runs of it differ by rounding.
    rounding = 2e-2 if compiled and bf16 and backend == "compiled" else 1e-3 if compiled and not bf16 else 1e-5
    assert found == pytest.approx(losses_of(plain), rel=rounding)
    for one, other in zip(captured.model.gpt.parameters(), plain.model.gpt.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # it may miss some
def test_training_does_not_synchronise_with_the_gpu_between_reports(tiny_dataset: Dataset) -> None:
    sizes = replace(MODEL, num_layers=1, dropout=0.0)
    trainer = make_trainer(tiny_dataset, replace(SHORT, steps=30), sizes=sizes, log_every=10)
    run = trainer.run()
    for _ in range(10):
        next(run)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(9):
            next(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_losses_on_a_gpu_follow_those_on_the_cpu(
    tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch, backend: Literal["eager", "compiled"]
) -> None:
    monkeypatch.setattr(captured_module, "supports_bf16", lambda: False)
    sizes = replace(MODEL, dropout=0.0)
    found = losses_of(make_trainer(tiny_dataset, replace(SHORT, backend=backend), sizes=sizes))
    expected = losses_of(make_trainer(tiny_dataset, replace(SHORT, backend="eager"), CPU, sizes=sizes))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("backend", ["compiled", "fused"])
def test_losses_in_bfloat16_follow_float32_and_weights_stay_in_float32(
    tiny_dataset: Dataset, backend: Literal["compiled", "fused"]
) -> None:
    sizes = replace(MODEL, dropout=0.0)
    low = make_trainer(tiny_dataset, replace(SHORT, backend=backend), sizes=sizes)
    found = losses_of(low)
    expected = losses_of(make_trainer(tiny_dataset, replace(SHORT, backend="eager"), sizes=sizes))
    assert found != expected
    assert found == pytest.approx(expected, rel=3e-2)
    assert {parameter.dtype for parameter in low.model.gpt.parameters()} == {torch.float32}


@pytest.mark.parametrize(("stop_after", "mapped"), [(1, False), (5, False), (5, True)])  # steps are captured after 2
def test_a_run_on_a_gpu_resumes_bit_for_bit(
    tiny_dataset: Dataset, tmp_path: Path, stop_after: int, mapped: bool
) -> None:
    dataset, config = with_maps(tiny_dataset) if mapped else tiny_dataset, SHORT
    whole = make_trainer(dataset, config)
    losses = losses_of(whole)
    stopped = make_trainer(dataset, config)
    losses_of(stopped, stop_after)
    stopped.save(tmp_path / "state.safetensors")
    resumed = make_trainer(dataset, config)
    torch.manual_seed(0)
    resumed.load(tmp_path / "state.safetensors")
    assert losses_of(resumed) == losses[stop_after:]
    for found, expected in zip(resumed.model.gpt.parameters(), whole.model.gpt.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_run_moves_from_a_gpu_to_the_cpu(tiny_dataset: Dataset, tmp_path: Path) -> None:
    started = make_trainer(tiny_dataset, SHORT)
    losses_of(started, 6)
    started.save(tmp_path / "state.safetensors")
    moved = make_trainer(tiny_dataset, SHORT, CPU)
    moved.load(tmp_path / "state.safetensors")
    assert moved.step == 6
    assert len(losses_of(moved)) == 6
