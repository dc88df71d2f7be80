"""Run folders and token shards written before version 0.1.

`tests/golden/before` was written by the last version before 0.1: `stopped` is a run of 12 steps that ended after step
6, `expected.safetensors` are the weights that it would have had after step 12, `shards` are tokens in the old format.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trajectory_transformer import TokenConfig, TrainConfig, TrajectoryModel
from trajectory_transformer.cli import main
from trajectory_transformer.runs.settings import RunSettings
from trajectory_transformer.tokens.shards import open_shards

BEFORE = Path(__file__).parents[1] / "golden/before"


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A copy of the old run that stopped at step 6 of 12."""
    return Path(shutil.copytree(BEFORE / "stopped", tmp_path / "stopped"))


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what `run.json` says."""
    stored = json.loads((run / "run.json").read_text())
    change(stored)
    (run / "run.json").write_text(json.dumps(stored))


def test_an_old_run_resumes_to_almost_the_weights_it_would_have_had(stopped: Path) -> None:
    assert main(["train", str(BEFORE / "reward.npz"), "--resume", str(stopped), "--device", "cpu"]) == 0
    expected, found = load_file(BEFORE / "expected.safetensors"), load_file(stopped / "weights.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        # Output heads decay since then. Without the stored moments of the optimizer weights differ by ten times more.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)
    steps = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, *range(7, 13)]  # metrics come more often now
    assert TrajectoryModel.load(stopped).metadata == {"env": "Nowhere-v0", "seed": 1}


def test_settings_of_an_old_run_are_read_under_their_new_names(stopped: Path) -> None:
    edit(stopped, lambda stored: stored["train"].update(precision="float32"))
    settings = RunSettings.read(stopped)
    assert (settings.seed, settings.checkpoint_every) == (2, 6)
    assert (settings.train.steps, settings.train.epochs, settings.train.optimizer) == (12, None, "adamw")
    assert settings.train.backend == "eager"
    assert (settings.tokens.termination_penalty, settings.tokens.authors_conventions) == (-5.0, False)
    assert settings.model.map_channels == 32


def test_a_run_that_stored_no_length_has_50_epochs_and_returns_that_stop(tmp_path: Path) -> None:
    RunSettings(train=TrainConfig(learning_rate=6e-4)).write(tmp_path)
    edit(tmp_path, lambda stored: stored["tokens"].pop("truncated"))
    settings = RunSettings.read(tmp_path)
    assert settings.train == TrainConfig(learning_rate=6e-4, epochs=50.0)
    assert settings.tokens == TokenConfig(truncated="stop")


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("train", "betas", [0.8, 0.9]),
        ("train", "weight_decay", 0.2),
        ("train", "final_lr_share", 0.5),
        ("train", "epoch_size", 1000),
        ("train", "grad_clip", 2.0),
        ("tokens", "bin_value", "midpoint"),
        ("tokens", "final_observation", False),
        ("tokens", "max_episode_steps", 500),
    ],
)
def test_an_old_run_with_settings_that_no_longer_exist_is_refused(
    stopped: Path, capsys: pytest.CaptureFixture[str], group: str, name: str, value: object
) -> None:
    edit(stopped, lambda stored: stored[group].update({name: value}))
    assert main(["train", str(BEFORE / "reward.npz"), "--resume", str(stopped)]) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        f"tt train: error: {stopped} was started before version 0.1 with settings that no longer exist, so it cannot "
        "be resumed; its checkpoint still loads (tt evaluate), or train again"
    ]
    TrajectoryModel.load(stopped)  # as the message says


@pytest.mark.parametrize("content", ["{}", "[]", '{"train": {', '{"train": {}, "tokens": {}, "model": {}, "x": 1}'])
def test_a_damaged_run_json_is_refused_in_one_sentence(
    stopped: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (stopped / "run.json").write_text(content)
    assert main(["train", "--resume", str(stopped)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{stopped / 'run.json'}: not the description of a run" in error or "run.json: not valid JSON" in error


def test_old_token_shards_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"index\.json: shard format 1 cannot be read .* reads format 2; remove the"):
        open_shards(BEFORE / "shards")
    assert main(["train", "--shards", str(BEFORE / "shards"), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "shard format 1 cannot be read by this version" in error
    assert not (tmp_path / "run").exists()
