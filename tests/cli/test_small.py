"""The preset small: taken on a CPU, named where training would be long, and overridden by flags."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trajectory_transformer import PRESETS, Dataset, ModelConfig, TrainConfig, save_dataset, train
from trajectory_transformer.cli import COMMANDS
from trajectory_transformer.cli.parser import parse
from trajectory_transformer.cli.train import Train

Run = Callable[..., tuple[int, str]]
SMALL = PRESETS["small"]
NOTE = "training on a CPU with the preset small (2 layers of width 64, 4,500 steps: minutes)"


def parsed(*words: str) -> Train:
    """`tt train` as it is read."""
    command = parse("train", COMMANDS["train"], ["x.npz", *words])
    assert isinstance(command, Train)
    return command


@pytest.mark.parametrize("gpu", [False, True])
def test_a_cpu_gets_the_small_preset_and_a_gpu_the_default_one(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    expected = PRESETS["default" if gpu else "small"]
    assert (parsed().tokens, parsed().model, parsed().train) == (expected.tokens, expected.model, expected.train)
    on_cpu = parsed("--device", "cpu", "--model.width", "32", "--train.epochs", "2")
    assert on_cpu.model.width == 32 and on_cpu.model.num_layers == 2
    assert (on_cpu.train.epochs, on_cpu.train.steps, on_cpu.train.batch_size) == (2.0, None, 64)
    full = parsed("--device", "cpu", "--preset", "default")
    assert (full.model, full.train) == (ModelConfig(), TrainConfig())


def test_the_choice_is_told_and_the_recorded_command_repeats_it(tt: Run, tiny_dataset: Dataset, tmp_path: Path) -> None:
    save_dataset(tiny_dataset, tmp_path / "data.npz")
    code, text = tt("train", "data.npz", "--out", "run", "--train.steps", 2, "--device", "cpu")
    assert code == 0 and f"note: {NOTE}" in " ".join(text.split()), text
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["model"]["width"] == SMALL.model.width and stored["train"]["steps"] == 2
    words = stored["command"].split()
    assert words[:5] == ["tt", "train", "data.npz", "--out", "run"] and "--preset default" in stored["command"]
    again = parse("train", COMMANDS["train"], words[2:])
    assert isinstance(again, Train)
    assert (again.model.width, again.model.window, again.train.learning_rate) == (64, 5, SMALL.train.learning_rate)
    code, text = tt("train", "--resume", "run")
    assert code == 0 and "preset small" not in text
    code, text = tt("train", "data.npz", "--out", "other", "--train.steps", 1, "--device", "cpu", "--preset", "small")
    assert code == 0 and "note: training on a CPU" not in text


def test_python_takes_the_same_preset_and_says_so(tiny_dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    model = train(tiny_dataset, train=TrainConfig(steps=1), device="cpu")
    assert model.gpt.config == SMALL.model
    assert [record.getMessage()[: len(NOTE)] for record in caplog.records if record.levelno == logging.WARNING][:1] == [
        NOTE
    ]
    caplog.clear()
    train(tiny_dataset, train=TrainConfig(steps=1), model=ModelConfig(window=2, num_layers=1, width=16), device="cpu")
    assert NOTE not in caplog.text


def test_a_long_run_names_the_small_preset(
    tt: Run, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dataset(tiny_dataset, tmp_path / "data.npz")
    monkeypatch.setattr("trajectory_transformer.cli.train.WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr("trajectory_transformer.cli.train.LONG_SECONDS", 0.0)
    words = ["train", "data.npz", "--model.window", 2, "--train.batch_size", 2, "--train.steps", 5, "--device", "cpu"]
    code, text = tt(*words, "--out", "run", "--preset", "default", "--model.width", 16)
    assert code == 0 and "minutes instead: --preset small" in " ".join(text.split()), text
    code, text = tt(
        "train", "data.npz", "--train.batch_size", 2, "--train.steps", 5, "--device", "cpu", "--out", "small"
    )
    assert code == 0 and " s each; fewer: --train.steps" in " ".join(text.split()), text
