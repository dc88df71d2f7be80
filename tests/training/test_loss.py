"""Precision and compilation: what `auto` means, and that neither changes what is learned."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trajectory_transformer.cli import main
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.loss import uses_bf16, uses_compile
from trajectory_transformer.training.train import Trainer

CPU = torch.device("cpu")
CONFIG = TrainConfig(steps=10, batch_size=8, log_every=1)


@pytest.fixture
def kernels_restored() -> Iterator[None]:
    """A CPU without bf16 makes torch give up oneDNN for the whole process, and float32's last bits with it."""
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled):
        yield


def trainer_of(dataset: Dataset, config: TrainConfig, device: torch.device = CPU) -> Trainer:
    """A small run."""
    sizes = ModelConfig(window=3, num_layers=1, num_heads=2, width=32, dropout=0.0)
    model = TrajectoryModel.create(dataset, TokenConfig(num_bins=8), sizes, seed=0)
    data = tokenize(dataset, model.discretizer, model.layout, model.tokens).to(device)
    model.gpt.to(device)
    return Trainer(model, data, config)


def losses_of(trainer: Trainer) -> list[float]:
    """The loss of every step."""
    return [metrics.loss for metrics in trainer.run() if metrics is not None]


def test_auto_means_float32_uncompiled_on_a_cpu() -> None:
    assert not uses_bf16(CONFIG, CPU) and not uses_compile(CONFIG, CPU)
    assert uses_bf16(replace(CONFIG, precision="bf16"), CPU)
    assert uses_compile(replace(CONFIG, compile=True), CPU)
    assert not uses_compile(replace(CONFIG, compile=False), torch.device("cuda"))
    assert not uses_bf16(replace(CONFIG, precision="float32"), torch.device("cuda"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # a CPU without bf16 instructions says so
@pytest.mark.usefixtures("kernels_restored")
def test_bf16_follows_float32_and_keeps_weights_in_float32(tiny_dataset: Dataset) -> None:
    exact, low = (trainer_of(tiny_dataset, replace(CONFIG, precision=kind)) for kind in ("float32", "bf16"))
    expected, found = losses_of(exact), losses_of(low)
    assert found != expected
    assert found == pytest.approx(expected, rel=1e-2)
    assert {parameter.dtype for parameter in low.model.gpt.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_loss_follows_the_eager_one(tiny_dataset: Dataset) -> None:
    eager, compiled = (losses_of(trainer_of(tiny_dataset, replace(CONFIG, compile=kind))) for kind in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # it may miss some waits
def test_nothing_waits_for_a_gpu_between_reports(tiny_dataset: Dataset) -> None:
    trainer = trainer_of(tiny_dataset, replace(CONFIG, steps=30, log_every=10), torch.device("cuda"))
    run = trainer.run()
    for _ in range(10):
        next(run)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(9):
            next(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # float32 is meant
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_follows_a_cpu(tiny_dataset: Dataset, compiled: bool) -> None:
    config = replace(CONFIG, precision="float32", compile=compiled)
    found = losses_of(trainer_of(tiny_dataset, config, torch.device("cuda")))
    assert found == pytest.approx(losses_of(trainer_of(tiny_dataset, replace(config, compile=False))), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [(["--train.precision", "float16"], "precision"), (["--train.compile", "maybe"], "compile")],
)
def test_other_words_for_precision_and_compilation_are_refused(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "x.npz", *words])
    text = capsys.readouterr().err
    assert left.value.code == 2 and pattern in text and len(text.splitlines()) == 1, text


@pytest.mark.filterwarnings("ignore::UserWarning")  # a CPU without bf16 instructions says so
@pytest.mark.usefixtures("kernels_restored")
def test_the_settings_are_stored_and_resumed(tiny_dataset: Dataset, tmp_path: Path) -> None:
    save_npz(tiny_dataset, tmp_path / "data.npz")
    words = ["--train.precision", "bf16", "--train.compile", "false", "--train.steps", "2"]
    words += ["--train.batch_size", "4", "--model.width", "16", "--model.num_layers", "1", "--model.window", "2"]
    assert main(["train", str(tmp_path / "data.npz"), *words, "--out", str(tmp_path / "run")]) == 0
    stored = json.loads((tmp_path / "run/run.json").read_text())["train"]
    assert (stored["precision"], stored["compile"]) == ("bf16", False)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
