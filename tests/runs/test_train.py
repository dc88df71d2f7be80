"""`train()`: the Python API gives the weights of `tt train`, keeps what it is asked to keep, and resumes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trajectory_transformer import (
    Dataset,
    Metrics,
    ModelConfig,
    TokenConfig,
    TrainConfig,
    TrajectoryModel,
    load_dataset,
    save_dataset,
    train,
)
from trajectory_transformer.cli import main
from trajectory_transformer.runs.sources import identity, open_or_build_shards
from trajectory_transformer.tokens.shards import open_shards

TOKENS = TokenConfig(num_bins=8, discount=0.9)
MODEL = ModelConfig(window=3, num_layers=1, num_heads=2, width=16, dropout=0.2)
TRAIN = TrainConfig(steps=12, batch_size=4)
FLAGS = ["--tokens.num_bins", "8", "--tokens.discount", "0.9", "--model.window", "3", "--model.num_layers", "1"]
FLAGS += ["--model.num_heads", "2", "--model.width", "16", "--model.dropout", "0.2", "--train.steps", "12"]
FLAGS += ["--train.batch_size", "4", "--seed", "3", "--device", "cpu", "--preset", "default"]


@pytest.fixture
def data(tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset file in the current folder, which is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    save_dataset(tiny_dataset, "data.npz")
    return "data.npz"


def run(dataset: Dataset | str | Path, **more: object) -> TrajectoryModel:
    """`train()` with the settings of this file."""
    given: dict[str, object] = {"tokens": TOKENS, "model": MODEL, "train": TRAIN, "seed": 3, "device": "cpu", **more}
    return train(dataset, **given)  # type: ignore[arg-type]


def same(model: TrajectoryModel, folder: str) -> bool:
    """Whether a model has the weights of a run folder, bit for bit."""
    stored = TrajectoryModel.load(folder).gpt.state_dict()
    found = model.gpt.state_dict()
    return stored.keys() == found.keys() and all(torch.equal(found[name], stored[name]) for name in stored)


def test_python_and_command_give_the_same_weights_and_files(data: str) -> None:
    assert main(["train", data, "--out", "command", *FLAGS]) == 0
    model = run(data, out="python")
    assert same(model, "command") and same(model, "python")
    assert not model.gpt.training
    first, second = (
        sorted(path.name for path in Path(name).iterdir() if path.name != "report.html")
        for name in ("command", "python")
    )
    assert first == second
    stored = [json.loads((Path(name) / "run.json").read_text()) for name in ("command", "python")]
    assert stored[0].pop("command").startswith("tt train data.npz --out command")
    assert stored[1].pop("command").startswith("python ")
    assert stored[0] == stored[1]


def test_names_paths_and_episodes_in_memory_give_the_same_weights(data: str) -> None:
    run(data, out="named")
    assert same(run(Path(data)), "named")
    assert same(run(load_dataset(data)), "named")


def test_without_out_nothing_is_written(data: str, tmp_path: Path) -> None:
    seen: list[Metrics] = []
    run(data, on_metrics=seen.append)
    assert [path.name for path in tmp_path.iterdir()] == [data]
    assert [(metrics.step, metrics.total_steps) for metrics in seen] == [(step, 12) for step in range(1, 13)]


def test_metrics_come_every_hundredth_of_a_run(data: str) -> None:
    seen: list[int] = []
    run(data, train=replace(TRAIN, steps=250), on_metrics=lambda metrics: seen.append(metrics.step))
    assert seen == list(range(2, 251, 2))


def test_another_seed_gives_other_weights(data: str) -> None:
    run(data, out="run")
    assert not same(run(data, seed=4), "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_run_and_resume_reaches_the_same_weights(data: str, number: signal.Signals) -> None:
    whole = run(data)

    def interrupt(metrics: Metrics) -> None:
        if metrics.step == 5:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        run(data, out="cut", on_metrics=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    steps = [json.loads(line)["step"] for line in Path("cut/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 7))  # the step during which it was raised is finished
    assert not Path("cut/training.json").exists()
    seen: list[int] = []
    resumed = run(data, out="cut", resume=True, on_metrics=lambda metrics: seen.append(metrics.step))
    assert seen == list(range(7, 13))
    assert same(whole, "cut") and same(resumed, "cut")
    assert Path("cut/training.json").exists()


CHILD = """
import sys, time
from trajectory_transformer import ModelConfig, TokenConfig, TrainConfig, train

def slow(metrics):
    print(metrics.step, flush=True)
    time.sleep(0.05)

train(
    "data.npz",
    tokens=TokenConfig(num_bins=8, discount=0.9),
    model=ModelConfig(window=3, num_layers=1, num_heads=2, width=16, dropout=0.2),
    train=TrainConfig(steps=60, batch_size=4),
    seed=3,
    out="cut",
    device="cpu",
    on_metrics=slow,
)
"""


def test_ctrl_c_in_another_process_saves_the_run(data: str) -> None:
    # With as many threads as here: their number can change the last bits of a sum.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors
    settings = replace(TRAIN, steps=60)
    assert same(run(data, train=settings, out="cut", resume=True), "cut")
    assert same(run(data, train=settings), "cut")


def test_resume_starts_a_run_that_does_not_exist_and_returns_a_finished_one(data: str) -> None:
    first = run(data, out="run", resume=True)
    written = Path("run/training.json").read_text()
    assert same(first, "run")
    seen: list[Metrics] = []
    assert same(run(data, out="run", resume=True, on_metrics=seen.append), "run")
    assert seen == [] and Path("run/training.json").read_text() == written


def test_a_run_of_the_usual_length_stores_its_steps_and_resumes(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajectory_transformer.training.optim.DEFAULT_EPOCHS", 0.1)
    monkeypatch.setattr("trajectory_transformer.training.optim.MIN_STEPS", 14)
    usual = TrainConfig(batch_size=4)
    model = run(data, train=usual, out="run")
    stored = json.loads(Path("run/run.json").read_text())["train"]
    assert (stored["steps"], stored["epochs"]) == (14, None)
    assert same(model, "run") and same(run(data, train=replace(usual, steps=14)), "run")
    assert same(run(data, train=usual, out="run", resume=True), "run")
    with pytest.raises(ValueError, match="run was started with other settings"):
        run(data, train=replace(usual, batch_size=5), out="run", resume=True)


def test_resume_refuses_other_data_and_other_settings(data: str, tiny_dataset: Dataset) -> None:
    run(data, out="run")
    weights = load_file("run/weights.safetensors")
    steps, batch_size = TRAIN.steps, TRAIN.batch_size
    both = f"expected train.steps {steps}, got 20; expected train.batch_size {batch_size}, got 5"
    for name, other, differences in (
        ("tokens", replace(TOKENS, num_bins=9), f"expected tokens.num_bins {TOKENS.num_bins}, got 9"),
        ("model", replace(MODEL, width=32), f"expected model.width {MODEL.width}, got 32"),
        ("train", replace(TRAIN, steps=20, batch_size=5), both),
        ("seed", 4, "expected seed 3, got 4"),
    ):
        rule = rf"run was started with other settings \({differences}\); leave out {name} to resume"
        with pytest.raises(ValueError, match=rule):
            run(data, out="run", resume=True, **{name: other})
    save_dataset(replace(tiny_dataset, episodes=tiny_dataset.episodes[:3]), "other.npz")
    with pytest.raises(ValueError, match=r"different dataset .* has other\.npz changed\?"):
        run("other.npz", out="run", resume=True)
    found = load_file("run/weights.safetensors")
    assert all(found[name].equal(weights[name]) for name in weights)


def test_episodes_in_memory_must_be_given_again_to_resume(data: str, tiny_dataset: Dataset) -> None:
    run(tiny_dataset, out="run")
    with pytest.raises(ValueError, match="run was trained on episodes in memory: pass them again to resume"):
        train(out="run", resume=True)
    fewer = replace(tiny_dataset, episodes=tiny_dataset.episodes[:3])
    with pytest.raises(ValueError, match="run was started on a different dataset"):
        run(fewer, out="run", resume=True)
    assert same(run(tiny_dataset, out="run", resume=True), "run")


def test_invalid_arguments_are_refused_before_anything_is_written(data: str, tmp_path: Path) -> None:
    Path("there").mkdir()
    for more, message in (
        ({"preset": "papr"}, "preset must be one of default, small, paper, .*got 'papr'"),
        ({"resume": True}, "resume needs the run folder"),
        ({"seed": -1}, "the seed must not be negative, got -1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"device": "abacus"}, "the device must be auto, cpu or cuda, got 'abacus'"),
        ({"out": "there"}, "there exists already"),
    ):
        with pytest.raises(ValueError, match=message):
            run(data, **more)
    with pytest.raises(ValueError, match="name the dataset to train on"):
        train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [data, "there"]
    assert list(Path("there").iterdir()) == []


def test_shards_round_trip_and_give_the_weights_of_tokens_in_memory(data: str, tiny_dataset: Dataset) -> None:
    memory = run(data, out="memory")
    assert same(run(data, shards="tokens", out="made"), "memory")
    shards = open_shards("tokens")
    assert shards.tokenizer.config == TOKENS and shards.source == identity(data)
    assert dict(shards.metadata) == dict(tiny_dataset.metadata)
    assert torch.equal(shards.data.rows.long(), torch.from_numpy(memory.tokenizer.encode(*tiny_dataset.episodes)))
    assert shards.data.num_steps.tolist() == [len(episode) for episode in tiny_dataset]
    assert same(train(shards="tokens", model=MODEL, train=TRAIN, seed=3, device="cpu"), "memory")
    assert same(run(tiny_dataset, shards="from memory"), "memory")
    with pytest.raises(ValueError, match=r"tokens made with tokens\.discount 0\.9, not 0\.5"):
        open_or_build_shards(Path("tokens"), data, replace(TOKENS, discount=0.5))
    Path(data).unlink()
    assert same(train(out="made", resume=True, device="cpu"), "memory")
