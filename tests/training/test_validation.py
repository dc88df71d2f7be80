"""Held-out episodes: their loss by value, the best weights, early stopping, and resuming to the same bits."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_train import MODEL, TOKENS, TRAIN, assert_identical, clockwork, make_trainer, run, weights
from trajectory_transformer import Metrics, TrainConfig, TrajectoryModel, load_dataset, save_dataset, train
from trajectory_transformer.analysis.held_out import held_out_losses
from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.split import split_episodes
from trajectory_transformer.tokens.windows import gather_windows, tokenize
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.train import Trainer

HELD_OUT = replace(TRAIN, steps=40, batch_size=8, validation=0.3)
FLAGS = ["--tokens.num_bins", "8", "--model.window", "2", "--model.num_layers", "1", "--model.num_heads", "2"]
FLAGS += ["--model.width", "16", "--train.batch_size", "8", "--train.learning_rate", "0.01", "--device", "cpu"]
FLAGS += ["--train.warmup_steps", "2", "--model.dropout", "0.2", "--train.validation", "0.3"]


def make_validated(dataset: Dataset, config: TrainConfig = HELD_OUT) -> Trainer:
    """A trainer with held-out episodes."""
    kept, left = split_episodes(dataset, config.validation, seed=3)
    model = TrajectoryModel.create(kept, TOKENS, MODEL, seed=3)
    data, held_out = tokenize(kept, model.tokenizer), tokenize(left, model.tokenizer)
    return Trainer(model, data, config, seed=3, held_out=held_out)


def train_here(dataset: Dataset, config: TrainConfig = HELD_OUT, **more: object) -> TrajectoryModel:
    """`train()` with the settings of this file."""
    given: dict[str, object] = {"tokens": TOKENS, "model": MODEL, "train": config, "seed": 3, "device": "cpu", **more}
    return train(dataset, **given)  # type: ignore[arg-type]


def test_the_validation_loss_is_the_training_loss_on_held_out_windows_without_dropout(tiny_dataset: Dataset) -> None:
    trainer = make_validated(tiny_dataset)
    found = [metrics for metrics in run(trainer) if metrics.validation_loss is not None][-1]
    left = split_episodes(tiny_dataset, 0.3, seed=3)[1]
    data = tokenize(left, trainer.model.tokenizer)
    batch = gather_windows(data, torch.arange(data.num_windows), MODEL.window, trainer.model.tokenizer)
    expected = weighted_loss(trainer.model, batch, 5.0)[0].item()
    assert found.step == 40 and found.validation_loss == pytest.approx(expected, rel=1e-6)
    assert found.validation_losses == pytest.approx(held_out_losses(trainer.model, left), rel=1e-6)


def test_a_validation_leaves_the_training_as_it_is(tiny_dataset: Dataset) -> None:
    kept = split_episodes(tiny_dataset, 0.3, seed=3)[0]
    plain = make_trainer(kept, replace(HELD_OUT, validation=0.0), log_every=None)
    expected = [metrics.loss for metrics in run(plain)]
    validated = make_validated(tiny_dataset)
    assert [metrics.loss for metrics in run(validated)] == expected
    assert_identical(weights(validated), weights(plain))


def test_validations_come_at_reports_and_at_the_end(tiny_dataset: Dataset) -> None:
    trainer = make_validated(tiny_dataset, replace(HELD_OUT, steps=12))
    steps = [metrics.step for metrics in run(trainer) if metrics.validation_loss is not None]
    assert steps == [5, 10, 12]  # one batch is held out: at least five steps for it
    assert trainer.validation is not None
    assert trainer.validation.interval(5_000, 20) == 100  # fifty times a run
    assert trainer.validation.interval(1_010, 10) == 20  # with a report


def test_the_run_folder_holds_the_best_model_and_last_the_last(tiny_dataset: Dataset, tmp_path: Path) -> None:
    seen: list[Metrics] = []
    model = train_here(tiny_dataset, out=tmp_path / "run", on_metrics=seen.append)
    losses = {metrics.step: metrics.validation_loss for metrics in seen if metrics.validation_loss is not None}
    best_step = min(losses, key=lambda step: losses[step] or math.inf)
    assert best_step < 40  # six random episodes are soon overfitted
    best, last = TrajectoryModel.load(tmp_path / "run"), TrajectoryModel.load(tmp_path / "run/last")
    assert_identical(dict(best.gpt.state_dict()), dict(model.gpt.state_dict()))
    held_out = split_episodes(tiny_dataset, 0.3, seed=3)[1]
    found = next(metrics.validation_losses for metrics in seen if metrics.step == best_step)
    assert held_out_losses(best, held_out) == pytest.approx(found, rel=1e-6)
    assert held_out_losses(last, held_out) == pytest.approx(seen[-1].validation_losses, rel=1e-6)
    stored = json.loads((tmp_path / "run/training.json").read_text())["metrics"]
    assert (stored["validation_loss"], stored["best_step"]) == (losses[best_step], best_step)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line} == losses


def test_training_stops_early_when_the_held_out_loss_rises(tiny_dataset: Dataset) -> None:
    config = replace(HELD_OUT, steps=400, patience=3)
    seen = run(make_validated(tiny_dataset, config))
    validated = [metrics for metrics in seen if metrics.validation_loss is not None]
    losses = [metrics.validation_loss or 0.0 for metrics in validated]
    assert seen[-1].step == validated[-1].step < 400
    assert losses.index(min(losses)) == len(losses) - 4  # three more without a smaller one
    learnable = run(make_validated(clockwork(), replace(config, steps=60, patience=3)))
    assert learnable[-1].step == 60


@pytest.mark.parametrize("stop_after", [3, 5, 17, 39])
def test_a_validated_run_resumes_to_the_same_best_and_last_model(
    tiny_dataset: Dataset, tmp_path: Path, stop_after: int
) -> None:
    config = replace(HELD_OUT, patience=6)
    whole, cut = make_validated(tiny_dataset, config), make_validated(tiny_dataset, config)
    expected = run(whole)
    seen = run(cut, stop_after)
    cut.save(tmp_path / "state.safetensors")
    resumed = make_validated(tiny_dataset, config)
    resumed.load(tmp_path / "state.safetensors")
    seen += run(resumed)
    measured = [
        [(each.step, each.validation_loss, each.validation_losses) for each in part] for part in (seen, expected)
    ]
    assert measured[0] == measured[1]
    assert_identical(weights(resumed), weights(whole))
    assert resumed.validation is not None and whole.validation is not None
    found, wanted = resumed.validation.best_model(), whole.validation.best_model()
    assert found is not None and wanted is not None
    assert_identical(dict(found.gpt.state_dict()), dict(wanted.gpt.state_dict()))
    assert (resumed.step, resumed.validation.since_best) == (whole.step, whole.validation.since_best)


def test_the_bins_are_fitted_on_the_episodes_that_are_trained_on(tiny_dataset: Dataset, tmp_path: Path) -> None:
    model = train_here(tiny_dataset)
    kept = split_episodes(tiny_dataset, 0.3, seed=3)[0]
    fitted = TrajectoryModel.create(kept, TOKENS, MODEL, seed=3).tokenizer.discretizer
    assert (model.tokenizer.discretizer.values == fitted.values).all()


def test_shards_hold_out_the_same_episodes(tiny_dataset: Dataset, tmp_path: Path) -> None:
    seen: list[Metrics] = []
    model = train_here(tiny_dataset, shards=tmp_path / "tokens", on_metrics=seen.append)
    kept, left = split_episodes(tiny_dataset, 0.3, seed=3)
    best = min((metrics for metrics in seen if metrics.validation_loss), key=lambda each: each.validation_loss or 0.0)
    assert held_out_losses(model, left) == pytest.approx(best.validation_losses, rel=1e-6)
    again = tokenize(kept, model.tokenizer)
    assert seen[-1].step == 40 and again.num_windows == sum(len(episode) for episode in kept)


def test_tt_train_shows_held_out_losses_and_tells_which_model_the_folder_holds(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_dataset(tiny_dataset, "data.npz")
    assert main(["train", "data.npz", "--out", "run", *FLAGS, "--train.steps", "400", "--train.patience", "3"]) == 0
    text = capsys.readouterr().out
    assert "stopped early: no smaller held-out loss in 3 validations" in text
    assert "run holds that model, run/last the one of the last step" in text
    page = Path("run/report.html").read_text()
    assert "validation, best" in page
    best = load_file("run/weights.safetensors")
    shutil.rmtree("run/last")
    assert main(["train", "--resume", "run"]) == 0  # it is finished: nothing changes
    again = load_file("run/weights.safetensors")
    assert all(again[name].equal(best[name]) for name in best) and Path("run/last/checkpoint.json").is_file()


def test_a_single_episode_cannot_be_split(tiny_dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="a split needs at least 2 episodes, got 1"):
        train_here(replace(tiny_dataset, episodes=tiny_dataset.episodes[4:5]))


def test_episodes_are_played_every_so_many_steps_and_change_nothing(tiny_dataset: Dataset) -> None:
    config = replace(TRAIN, steps=250, batch_size=2)  # a report every second step
    seen: list[Metrics] = []
    played: list[bool] = []

    def play(model: TrajectoryModel) -> dict[str, float]:
        played.append(model.gpt.training)
        torch.manual_seed(7)
        return {"return": float(len(played))}

    model = train_here(tiny_dataset, config, evaluate=play, evaluate_every=75, on_metrics=seen.append)
    assert played == [False] * 4  # without dropout
    assert {each.step: each.evaluation for each in seen if each.evaluation is not None} == {
        76: {"return": 1.0},
        150: {"return": 2.0},
        226: {"return": 3.0},
        250: {"return": 4.0},
    }
    assert_identical(dict(model.gpt.state_dict()), dict(train_here(tiny_dataset, config).gpt.state_dict()))
    with pytest.raises(ValueError, match="evaluate_every must be at least 1, got 0"):
        train_here(tiny_dataset, evaluate=play, evaluate_every=0)
    with pytest.raises(ValueError, match="evaluate and evaluate_every belong together, got evaluate_every 75"):
        train_here(tiny_dataset, evaluate_every=75)


def test_tt_train_plays_episodes_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["collect", "--episodes", "4", "--out", "rooms.npz", "--env_options", '{"success_radius": 0.5}']) == 0
    words = [*FLAGS[:-2], "--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false"]
    words += ["--train.steps", "6", "--evaluate_every", "4", "--evaluate_episodes", "1"]
    assert main(["train", "rooms.npz", "--out", "run", *words]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["evaluation"]["return_n"] for line in lines if "evaluation" in line} == {4: 1.0, 6: 1.0}
    assert "step 4: success_rate " in capsys.readouterr().out
    assert "success_rate" in Path("run/report.html").read_text()
    assert main(["train", "rooms.npz", "--out", "other", *words[:-1], "0"]) == 2
    assert "evaluate_episodes must be at least 1, got 0" in capsys.readouterr().err
    save_dataset(Dataset(load_dataset("rooms.npz").episodes), "nameless.npz")
    assert main(["train", "nameless.npz", "--out", "other", *words]) == 2
    assert "names no environment" in capsys.readouterr().err and not Path("other").exists()
