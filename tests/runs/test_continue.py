"""A finished run is extended, and a run starts from the weights and the tokenizer of another one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runs.test_train import FLAGS, MODEL, TOKENS, TRAIN, same
from tests.runs.test_train import run as train_here
from trajectory_transformer import Dataset, Dimension, Metrics, TokenConfig, TrajectoryModel, save_dataset, train
from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Episode
from trajectory_transformer.training.optim import RECIPES, learning_rate


@pytest.fixture
def data(tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset file in the current folder, which is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    save_dataset(tiny_dataset, "data.npz")
    return "data.npz"


def steps_of(run: str) -> list[int]:
    """Steps that a run reported."""
    return [json.loads(line)["step"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_an_extended_run_follows_the_schedule_of_its_new_length(data: str) -> None:
    first = train_here(data, out="run")
    before = {name: value.clone() for name, value in first.gpt.state_dict().items()}
    seen: list[Metrics] = []
    longer = train_here(data, train=replace(TRAIN, steps=30), out="run", resume=True, on_metrics=seen.append)
    assert same(longer, "run") and any(
        not torch.equal(before[name], value) for name, value in longer.gpt.state_dict().items()
    )
    assert steps_of("run") == list(range(1, 31)) and [each.step for each in seen] == list(range(13, 31))
    expected = learning_rate(12, peak=TRAIN.learning_rate, warmup=3, total=30, final_share=RECIPES["adamw"].final_share)
    assert seen[0].learning_rate == expected
    stored = json.loads(Path("run/run.json").read_text())
    assert stored["train"]["steps"] == 30
    assert stored["command"].endswith(", then tt train --resume run --train.steps 30")


def test_an_extension_that_was_stopped_resumes_to_the_same_weights(data: str) -> None:
    for name in ("whole", "cut"):
        train_here(data, out=name)
    whole = train_here(data, train=replace(TRAIN, steps=30), out="whole", resume=True)

    def kill(metrics: Metrics) -> None:
        if metrics.step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_here(data, train=replace(TRAIN, steps=30), out="cut", resume=True, checkpoint_every=5, on_metrics=kill)
    assert main(["train", "--resume", "cut"]) == 0
    assert same(whole, "cut") and steps_of("cut") == steps_of("whole")


def test_tt_train_extends_a_run_by_steps_or_epochs(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = train_here(data, out="python")
    expected = train_here(data, train=replace(TRAIN, steps=20), out="python", resume=True)
    assert main(["train", data, "--out", "command", *FLAGS]) == 0
    assert main(["train", data, "--resume", "command", "--train.steps", "20"]) == 0
    assert same(expected, "command")
    assert "resuming command at step 12 of 20" in capsys.readouterr().out
    assert main(["train", "--resume", "command", "--train.epochs", "4"]) == 0
    assert steps_of("command")[-1] == 29  # 4 times 29 windows in batches of 4
    assert main(["train", "--resume", "command", "--train.steps", "29"]) == 2
    assert (
        "command has taken 29 steps: to extend it, the number of steps must be larger, got 29"
        in capsys.readouterr().err
    )


def test_a_run_that_stopped_early_goes_on(data: str) -> None:
    config = replace(TRAIN, steps=200, learning_rate=0.05, validation=0.3, patience=1)
    train_here(data, train=config, out="run")
    stopped = steps_of("run")[-1]
    assert stopped < 200
    train_here(data, train=replace(config, steps=300), out="run", resume=True)
    assert steps_of("run")[-1] > stopped


def other_data(rng: np.random.Generator, *, dims: int = 3) -> Dataset:
    """Episodes like those of the tiny dataset, with larger values."""
    episodes = [
        Episode(
            observations=5 * rng.normal(size=(9, dims)).astype(np.float32),
            actions=rng.uniform(-1, 1, size=(8, 2)).astype(np.float32),
            rewards=rng.normal(size=8).astype(np.float32),
            terminated=False,
        )
        for _ in range(4)
    ]
    return Dataset(tuple(episodes), {"env": "Other-v0"})


def test_a_run_starts_from_the_weights_and_bins_of_another(data: str, rng: np.random.Generator) -> None:
    first = train_here(data, out="first")
    save_dataset(other_data(rng), "other.npz")
    seen: list[Metrics] = []
    tuned = train("other.npz", init="first", train=TRAIN, seed=3, out="tuned", device="cpu", on_metrics=seen.append)
    assert (tuned.tokenizer.discretizer.values == first.tokenizer.discretizer.values).all()
    assert tuned.tokenizer.config == TOKENS and tuned.gpt.config == MODEL
    assert tuned.metadata["env"] == "Other-v0"
    assert [each.step for each in seen] == list(range(1, 13))
    scratch: list[Metrics] = []
    train_here(other_data(np.random.default_rng(0)), on_metrics=scratch.append)
    assert seen[0].learning_rate == scratch[0].learning_rate  # a new schedule
    # The command does the same; it starts where the first run ended, not at random.
    words = ["--train.steps", "12", "--train.batch_size", "4", "--seed", "3", "--device", "cpu", "--preset", "default"]
    assert main(["train", "other.npz", "--init", "first", "--out", "command", *words]) == 0
    assert same(tuned, "command")
    tiny = replace(TRAIN, steps=1, learning_rate=1e-9)
    unchanged = train("other.npz", init="first", train=tiny, device="cpu").gpt.state_dict()
    assert all(torch.allclose(value, unchanged[name], atol=1e-6) for name, value in first.gpt.state_dict().items())


def test_a_run_that_started_from_another_resumes_without_it(data: str, rng: np.random.Generator) -> None:
    train_here(data, out="first")
    save_dataset(other_data(rng), "other.npz")

    def start(out: str, **more: object) -> TrajectoryModel:
        return train("other.npz", init="first", train=TRAIN, seed=3, out=out, device="cpu", **more)  # type: ignore[arg-type]

    whole = start("whole")

    def stop(metrics: Metrics) -> None:
        if metrics.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start("cut", checkpoint_every=3, on_metrics=stop)
    Path("first").rename("moved")
    assert main(["train", "--resume", "cut"]) == 0
    assert same(whole, "cut")


def test_data_and_settings_that_do_not_fit_the_other_run_are_refused(
    data: str, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(data, out="first")
    with pytest.raises(ValueError, match="trained on 3 observation and 2 action dimensions, the dataset has 4 observ"):
        train(other_data(rng, dims=4), init="first", train=TRAIN)
    with pytest.raises(
        ValueError, match=r"its tokens settings \(expected tokens\.num_bins \d+, got 9; .*leave out tok"
    ):
        train(data, init="first", tokens=TokenConfig(num_bins=9), train=TRAIN)
    named = other_data(rng)
    actions = tuple(replace(each, actions=np.zeros_like(each.actions)) for each in named)
    gears = (Dimension("gear", categories=3), Dimension("action 1"))
    with pytest.raises(ValueError, match="gear has 3 categories, and the model to start from was trained with numbers"):
        train(replace(named, episodes=actions, action_dimensions=gears), init="first", train=TRAIN)
    with pytest.raises(ValueError, match=r"\(init\) cannot use shards"):
        train(data, init="first", shards="tokens", train=TRAIN)
    assert main(["train", data, "--init", "first", "--model.width", "32", "--out", "x"]) == 2
    assert "--init uses the token and model settings of first; leave out --model.width" in capsys.readouterr().err
    assert main(["train", data, "--init", "nowhere", "--out", "x"]) == 2
    assert not Path("x").exists()
