"""Checkpoint folders: there and back, and every way they can be broken."""

import json
from pathlib import Path

import pytest
import torch

from trajectory_transformer.checkpoint import (
    DESCRIPTION,
    FORMAT,
    KIND,
    WEIGHTS,
    load_checkpoint,
    read_tensors,
    save_checkpoint,
    write_tensors,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor([1, 2], dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint."""
    save_checkpoint(tmp_path / "deep" / "run", TENSORS, {"model": {"width": 3}})
    return tmp_path / "deep" / "run"


def test_a_checkpoint_survives_its_folder(folder: Path) -> None:
    tensors, description = load_checkpoint(folder)
    assert sorted(tensors) == ["a", "b"]
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert tensors["b"].dtype == torch.int64
    assert description["model"] == {"width": 3}


def test_a_checkpoint_is_two_files_and_leaves_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted([WEIGHTS, DESCRIPTION])
    written = json.loads((folder / DESCRIPTION).read_text())
    assert written == {"format": FORMAT, "kind": KIND, "model": {"width": 3}}


def test_a_checkpoint_may_be_written_over(folder: Path) -> None:
    save_checkpoint(folder, {"a": torch.zeros(1)}, {"model": {"width": 4}})
    tensors, description = load_checkpoint(folder)
    assert tensors["a"].tolist() == [0.0] and description["model"] == {"width": 4}


def test_metadata_of_tensors_survives(tmp_path: Path) -> None:
    write_tensors(tmp_path / "state", {"a": torch.ones(2)}, {"step": "7"})
    tensors, metadata = read_tensors(tmp_path / "state")
    assert tensors["a"].tolist() == [1.0, 1.0] and metadata == {"step": "7"}


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: no such checkpoint folder"):
        load_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_a_missing_file_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: the file is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_a_truncated_file_is_refused_by_name(folder: Path, name: str, share: float) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{name}: not .* was it truncated"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("[]", f"not the description of a {KIND} checkpoint"),
        ('{"format": 1}', f"not the description of a {KIND} checkpoint"),
        ('{"format": 1, "kind": "something-else"}', f"not the description of a {KIND} checkpoint"),
        (f'{{"format": {FORMAT + 1}, "kind": "{KIND}"}}', f"checkpoint format {FORMAT + 1} is newer than {FORMAT}"),
        (f'{{"format": "new", "kind": "{KIND}"}}', "checkpoint format new"),
        (f'{{"kind": "{KIND}"}}', "checkpoint format None"),
    ],
)
def test_a_description_with_a_fault_is_refused_by_name(folder: Path, text: str, message: str) -> None:
    (folder / DESCRIPTION).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"{DESCRIPTION}: {message}"):
        load_checkpoint(folder)


def test_weights_are_never_unpickled(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"{WEIGHTS}: not a whole safetensors file"):
        load_checkpoint(folder)
