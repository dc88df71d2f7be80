"""Damaged and hostile checkpoints: refused with one sentence that names the folder, before anything large is built."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trajectory_transformer.baselines import Baseline, train_baseline
from trajectory_transformer.checkpoint import DESCRIPTION, KIND, WEIGHTS, read_tensors, save_checkpoint
from trajectory_transformer.config import EnsembleConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.pets.ensemble import KIND as ENSEMBLE
from trajectory_transformer.pets.ensemble import Ensemble
from trajectory_transformer.pets.fit import fit

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture
def folder(tiny_model: TrajectoryModel, tmp_path: Path) -> Path:
    """The checkpoint of a small model."""
    tiny_model.save(tmp_path / "run")
    return tmp_path / "run"


def damage(folder: Path, change: Change, kind: str = KIND) -> None:
    """Write a checkpoint again with other contents, as its author could, with a digest that matches."""
    tensors, _ = read_tensors(folder / WEIGHTS)
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description, tensors)
    for key in ("format", "kind", "weights_sha256"):
        description.pop(key, None)
    save_checkpoint(folder, tensors, description, kind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, t: t["discretizer.values"].view(-1)[3].fill_(float("nan")), "values of its bins must be finite"),
        (lambda d, t: t["discretizer.values"].view(-1)[3].fill_(1e300), "values of its bins must be finite"),
        (lambda d, t: t["discretizer.edges"][0, 1].fill_(float("nan")), "edges of slot 0 must be finite"),
        (lambda d, t: t["discretizer.edges"][1, 1].fill_(float("-inf")), "edges of slot 1 must be finite"),
        (lambda d, t: t["discretizer.edges"][2, 1].fill_(1e9), "edges of slot 2 must be finite and increasing"),
        (lambda d, t: t["discretizer.edges"].fill_(float("inf")), "edges of slot 0 must be finite"),
        (lambda d, t: t.update({"discretizer.edges": t["discretizer.edges"][0]}), "edges"),
        (lambda d, t: t["gpt.heads"].view(-1)[0].fill_(float("inf")), "weights are not finite"),
        (lambda d, t: d["model"].update(num_layers=3_000_000), "3000000 layers, the weights hold 2"),
        (lambda d, t: d["model"].update(window=10**9), "position_embedding"),
        (lambda d, t: d["model"].update(width=10**9, num_heads=1), "token_embedding"),
        (lambda d, t: d["tokens"].update(num_bins=32000), "slots of 32000 bins"),
        (lambda d, t: d["layout"].update(observation_dim=10**9), "slots of 10 bins"),
        (lambda d, t: d["layout"].update(map_shape=[9, 10**5, 10**5]), "map"),
        (lambda d, t: d["layout"].update(map_shape=[9, -1]), "map"),
        (lambda d, t: d["tokens"].update(goal_dims=[7]) or d["layout"].update(goal_dim=1), "goal_dims"),
        (lambda d, t: d["dimensions"].update(observation_names=["x"], observation_categories=[0]), "dimensions"),
        (lambda d, t: d.update(metadata=[1]), "metadata"),
        (lambda d, t: d.update(layout=None), "do not match"),
        (lambda d, t: d["model"].update(num_layers="two"), "do not match"),
    ],
)
def test_a_hostile_checkpoint_is_refused_at_once(folder: Path, change: Change, message: str) -> None:
    damage(folder, change)
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        TrajectoryModel.load(folder)
    assert time.perf_counter() - started < 2.0
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_bit_of_the_weights_is_found(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"weights.safetensors: .*SHA-256.*checkpoint.json"):
        TrajectoryModel.load(folder)


def test_a_checkpoint_without_a_digest_loads_with_a_note(
    tiny_model: TrajectoryModel, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    description = json.loads((folder / DESCRIPTION).read_text())
    del description["weights_sha256"]
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with caplog.at_level(logging.INFO):
        loaded = TrajectoryModel.load(folder)
    assert torch.equal(loaded.gpt.heads, tiny_model.gpt.heads)
    assert "no SHA-256" in caplog.text


def test_weights_of_another_save_are_refused_and_those_of_the_last_two_load(
    tiny_model: TrajectoryModel, folder: Path
) -> None:
    # A kill between the two files of a save leaves the new description and the old weights.
    old = (folder / WEIGHTS).read_bytes()
    with torch.no_grad():
        tiny_model.gpt.heads.add_(1.0)
    tiny_model.save(folder)
    new = (folder / WEIGHTS).read_bytes()
    for content in (old, new):
        (folder / WEIGHTS).write_bytes(content)
        TrajectoryModel.load(folder)
    with torch.no_grad():
        tiny_model.gpt.heads.add_(1.0)
    tiny_model.save(folder)
    (folder / WEIGHTS).write_bytes(old)
    with pytest.raises(ValueError, match="SHA-256"):
        TrajectoryModel.load(folder)


def test_a_window_whose_attention_mask_exceeds_the_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajectory_transformer.limits.available_bytes", lambda: 100)
    monkeypatch.setattr("trajectory_transformer.limits._SMALL", 1)
    with pytest.raises(ValueError, match="memory"):
        TrajectoryModel.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, t: d["algorithm"]["settings"].update(hidden=[10**6, 10**6]), "numbers, the weights hold"),
        (lambda d, t: d["algorithm"]["settings"].update(hidden=[2] * 10**6), "layers of"),
        (lambda d, t: next(iter(t.values())).view(-1)[0].fill_(float("nan")), "NaN or infinite"),
    ],
)
def test_a_hostile_baseline_is_refused(tiny_dataset: Dataset, tmp_path: Path, change: Change, message: str) -> None:
    settings = {"hidden": (4, 4), "steps": 1, "batch_size": 2}
    train_baseline(tiny_dataset, algorithm="bc", settings=settings, out=tmp_path / "bc", device="cpu")
    damage(tmp_path / "bc", change, "trajectory-transformer baseline")
    with pytest.raises(ValueError, match=message):
        Baseline.load(tmp_path / "bc")


@pytest.mark.parametrize(
    "change", [{"num_layers": 10**7}, {"width": 10**6}, {"num_elites": 10**9, "num_networks": 10**9}]
)
def test_a_hostile_ensemble_is_refused(tiny_dataset: Dataset, tmp_path: Path, change: dict[str, int]) -> None:
    config = EnsembleConfig(num_networks=1, num_elites=1, num_layers=2, width=4, epochs=1)
    fit(tiny_dataset, config, device="cpu").save(tmp_path / "pets")
    damage(tmp_path / "pets", lambda d, t: d["ensemble"]["config"].update(change), ENSEMBLE)
    with pytest.raises(ValueError, match="the weights hold"):
        Ensemble.load(tmp_path / "pets")
