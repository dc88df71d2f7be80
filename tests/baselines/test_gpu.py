"""Baselines on a GPU: captured and compiled steps equal steps run one by one, and follow those of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.baselines.conftest import SMALL, SMALL_OF
from trajectory_transformer.baselines import PRESETS, Baseline, BaselineTrainer, train_baseline
from trajectory_transformer.baselines.cql import CQL
from trajectory_transformer.baselines.data import Learner
from trajectory_transformer.baselines.presets import changed
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.baselines.train import STEPS_PER_REPLAY, Backend, draw
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.training.captured import CapturedCalls
from trajectory_transformer.rollout import Step

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler uses what torch deprecates, and warns where float32 is intended.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32 tensor cores:UserWarning"
    ),
]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ALGORITHMS = ["bc", "td3bc", "iql", "cql", "brac", "dt", "mbop"]
STEPS = 6 * STEPS_PER_REPLAY + 3  # two warm-ups, then the capture, replays, and a shorter rest


def make(
    name: str, dataset: Dataset, device: torch.device, backend: Backend, *, steps: int = STEPS
) -> BaselineTrainer[Any]:
    """Two learners with small networks in float32."""
    values: dict[str, object] = {**SMALL, **SMALL_OF.get(name, {}), "steps": steps, "tf32": False}
    values |= {"clone_steps": 3 * STEPS_PER_REPLAY} if name == "cql" else {}
    settings = changed(PRESETS[name].settings, values)
    trainer, _ = make_trainer(name, settings, [dataset], [Learner(0), Learner(1)], device=device, backend=backend)
    trainer.log_every = STEPS_PER_REPLAY
    return trainer


def losses(trainer: BaselineTrainer[Any]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """All reported losses [reports, learners] by name."""
    reports = [metrics.losses for metrics in trainer.run() if metrics is not None]
    return {name: np.array([report[name] for report in reports if name in report]) for name in reports[-1]}


def check(found: BaselineTrainer[Any], expected: BaselineTrainer[Any], rounding: float) -> None:
    """Equal losses and weights."""
    ours, theirs = losses(found), losses(expected)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=rounding, atol=rounding, err_msg=name)
    for name, group in expected.algorithm.groups.items():
        for key, value in group.tensors.items():
            other = found.algorithm.groups[name].tensors[key]
            torch.testing.assert_close(other.cpu(), value.cpu(), rtol=rounding, atol=rounding, msg=f"{name}.{key}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_captured_steps_equal_eager_steps(points: Dataset, name: str) -> None:
    captured, eager = make(name, points, GPU, "captured"), make(name, points, GPU, "eager")
    check(captured, eager, 1e-5)
    assert captured._captured is not None and len(captured._captured._graphs) > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_compiled_steps_follow_eager_steps(points: Dataset, name: str) -> None:
    check(make(name, points, GPU, "compiled"), make(name, points, GPU, "eager"), 2e-3)


def test_compiled_steps_of_cql_in_bfloat16_use_their_kernel_and_follow_plain_ones(points: Dataset) -> None:
    from trajectory_transformer.gpu.training import perceptrons

    values = {**SMALL, "steps": STEPS, "hidden": (32, 32), "clone_steps": 0, "tf32": False}
    found = {}
    for bfloat16 in (True, False):
        settings = changed(PRESETS["cql"].settings, {**values, "bfloat16": bfloat16})
        trainer, _ = make_trainer("cql", settings, [points], [Learner(0), Learner(1)], device=GPU, backend="compiled")
        trainer.log_every = STEPS_PER_REPLAY
        assert isinstance(trainer.algorithm, CQL)
        assert (trainer.algorithm.hidden_layers is perceptrons.hidden_layers) == bfloat16
        found[bfloat16] = losses(trainer)
    np.testing.assert_allclose(found[True]["critic"], found[False]["critic"], rtol=0.01)
    np.testing.assert_allclose(found[True]["conservative"], found[False]["conservative"], rtol=0.01)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_on_a_gpu_follow_those_on_the_cpu(points: Dataset, name: str) -> None:
    check(make(name, points, GPU, "captured", steps=30), make(name, points, CPU, "eager", steps=30), 2e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_captured_run_resumes_to_the_same_weights(points: Dataset, tmp_path: Path, name: str) -> None:
    whole = make(name, points, GPU, "captured")
    losses(whole)
    stopped = make(name, points, GPU, "captured")
    for _ in stopped.run():
        if stopped.step == 4 * STEPS_PER_REPLAY:
            break
    stopped.save(tmp_path / "state.safetensors")
    resumed = make(name, points, GPU, "captured")
    resumed.load(tmp_path / "state.safetensors")
    losses(resumed)
    for key, value in whole.state().items():
        torch.testing.assert_close(resumed.state()[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_random_numbers_are_the_same_on_both_devices() -> None:
    keys, step = torch.tensor([5, 2**62 + 3]), torch.tensor(7)
    found = draw(keys.to(GPU), step.to(GPU), 2, 64, 3)
    assert torch.equal(found.cpu(), draw(keys, step, 2, 64, 3))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")  # once per process
def test_training_does_not_synchronise_with_the_gpu_between_reports(points: Dataset) -> None:
    trainer = make("iql", points, GPU, "captured", steps=10 * STEPS_PER_REPLAY)
    trainer.log_every = 10 * STEPS_PER_REPLAY
    run = trainer.run()
    for _ in range(4):
        next(run)  # captures
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            next(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_calls_run_capture_and_replay() -> None:
    value = torch.zeros(2, device=GPU)
    calls = []

    def add() -> None:
        calls.append(1)
        value.add_(1.0)

    captured = CapturedCalls()
    for _ in range(6):
        captured("add", add)
    assert value.tolist() == [6.0, 6.0]
    assert len(calls) == CapturedCalls.WARM_UP + 1


@pytest.mark.parametrize("name", ["iql", "brac", "dt", "mbop"])
def test_policies_act_on_a_gpu_as_on_a_cpu(points: Dataset, tmp_path: Path, name: str) -> None:
    settings: dict[str, object] = {**SMALL, **SMALL_OF.get(name, {}), "steps": 5}
    settings |= {"noise_std": 0.0} if name == "mbop" else {}  # noise is drawn on the device
    train_baseline(points, algorithm=name, settings=settings, device="cpu", out=tmp_path / "run")
    policies = [Baseline.load(tmp_path / "run", device).policy() for device in (CPU, GPU)]
    positions, first = np.linspace(-1, 1, 4, dtype=np.float32)[:, None], np.ones(4, np.bool_)
    for _ in range(6):
        step = Step(positions, -positions[:, 0], first, np.zeros((4, 0), np.float32), np.ones(4, np.bool_))
        ours, theirs = (policy.act(step) for policy in policies)
        np.testing.assert_allclose(theirs, ours, atol=1e-3)
        positions, first = positions + 0.4 * ours, np.array([False, True, False, False])
