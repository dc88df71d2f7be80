"""`tt train --shards` as a user types it."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dataset, save_npz

SETTINGS = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
SETTINGS += ["--train.batch_size", "8", "--train.steps", "6", "--device", "cpu"]
BINS = ["--tokens.num_bins", "8"]


@pytest.fixture
def data(tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset file in the current folder."""
    monkeypatch.chdir(tmp_path)
    save_npz(tiny_dataset, tmp_path / "data.npz")
    return tmp_path / "data.npz"


def same_weights(one: str, other: str) -> bool:
    """Whether two runs hold the same bits."""
    first, second = load_file(f"{one}/weights.safetensors"), load_file(f"{other}/weights.safetensors")
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_shards_are_made_used_again_and_give_the_weights_of_tokens_in_memory(data: Path) -> None:
    train = ["train", "data.npz", *SETTINGS, *BINS]
    assert main([*train, "--out", "memory"]) == 0
    assert main([*train, "--shards", "tokens", "--out", "made"]) == 0
    written = Path("tokens/index.json").stat().st_mtime_ns
    assert main([*train, "--shards", "tokens", "--out", "again"]) == 0
    data.unlink()  # the folder is complete in itself
    assert main(["train", *SETTINGS, "--shards", "tokens", "--out", "alone"]) == 0
    assert main(["train", "--resume", "made"]) == 0
    assert Path("tokens/index.json").stat().st_mtime_ns == written
    for run in ("made", "again", "alone"):
        assert same_weights("memory", run), run
    assert json.loads(Path("alone/run.json").read_text())["tokens"]["num_bins"] == 8


def test_shards_of_other_data_or_settings_are_refused(
    data: Path, tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "data.npz", *SETTINGS, *BINS, "--shards", "tokens", "--out", "run"]) == 0
    save_npz(Dataset(tiny_dataset.episodes[:3]), Path("other.npz"))
    Path("full").mkdir()
    Path("full/mine").touch()
    for words, pattern in (
        (["data.npz", "--shards", "tokens"], r"tokens made with tokens\.num_bins 8, not 100; choose another folder"),
        (["data.npz", *BINS, "--tokens.discount", "0.5", "--shards", "tokens"], r"tokens\.discount 0\.99, not 0\.5"),
        (["--tokens.num_bins", "9", "--shards", "tokens"], r"tokens\.num_bins 8, not 9"),
        (
            ["other.npz", *BINS, "--shards", "tokens"],
            r"tokens holds tokens of a different dataset \(expected sha256:\w+, got sha256:\w+\)",
        ),
        (["--shards", "nowhere"], "nowhere: no token shards there; name the dataset"),
        (["data.npz", "--shards", "full"], r"full/index\.json: the file is missing"),
    ):
        capsys.readouterr()
        assert main(["train", *words, *SETTINGS, "--out", "new"]) == 2
        text = capsys.readouterr().err
        assert len(text.splitlines()) == 1 and re.search(pattern, text), text
        assert not Path("new").exists() and not Path("nowhere").exists()
