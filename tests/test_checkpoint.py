"""Checkpoint folders: written and read back; broken ones raise errors that name the file."""

import hashlib
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
    """A valid checkpoint."""
    save_checkpoint(tmp_path / "deep" / "run", TENSORS, {"model": {"width": 3}})
    return tmp_path / "deep" / "run"


def test_saved_checkpoints_load_unchanged(folder: Path) -> None:
    tensors, description = load_checkpoint(folder)
    assert sorted(tensors) == ["a", "b"]
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert tensors["b"].dtype == torch.int64
    assert description["model"] == {"width": 3}


def test_a_checkpoint_consists_of_two_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted([WEIGHTS, DESCRIPTION])
    written = json.loads((folder / DESCRIPTION).read_text())
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert written == {"format": FORMAT, "kind": KIND, "weights_sha256": [digest], "model": {"width": 3}}


def test_a_checkpoint_can_be_overwritten(folder: Path) -> None:
    save_checkpoint(folder, {"a": torch.zeros(1)}, {"model": {"width": 4}})
    tensors, description = load_checkpoint(folder)
    assert tensors["a"].tolist() == [0.0] and description["model"] == {"width": 4}


def test_metadata_of_tensor_files_is_read_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "state", {"a": torch.ones(2)}, {"step": "7"})
    tensors, metadata = read_tensors(tmp_path / "state")
    assert tensors["a"].tolist() == [1.0, 1.0] and metadata == {"step": "7"}


def test_paths_may_be_strings(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path / "run"), TENSORS, {})
    assert sorted(load_checkpoint(str(tmp_path / "run"))[0]) == ["a", "b"]


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: no such checkpoint folder"):
        load_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_a_missing_file_is_an_error_that_names_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: the file is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_a_truncated_file_is_an_error_that_names_it(folder: Path, name: str, share: float) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{name}: not .* may be truncated"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("[]", f"not the description of a {KIND} checkpoint"),
        ('{"format": 1}', f"not the description of a {KIND} checkpoint"),
        (
            '{"format": 1, "kind": "something-else"}',
            f"not the description of a {KIND} checkpoint",
        ),
        (
            f'{{"format": {FORMAT + 1}, "kind": "{KIND}"}}',
            f"checkpoint format {FORMAT + 1} is not supported, expected at most {FORMAT}",
        ),
        (f'{{"format": "new", "kind": "{KIND}"}}', "checkpoint format new"),
        (f'{{"kind": "{KIND}"}}', "checkpoint format None"),
    ],
)
def test_an_invalid_description_is_an_error_that_names_the_file(folder: Path, text: str, message: str) -> None:
    (folder / DESCRIPTION).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"{DESCRIPTION}: {message}"):
        load_checkpoint(folder)


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"{WEIGHTS}: not a complete safetensors file"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", [b"sha256", b"shb256", b"sHa256"])
def test_contents_or_a_digest_whose_name_is_damaged_are_refused(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / "resume.safetensors"
    write_tensors(path, {"x": torch.ones(3)}, {"step": "2"})
    assert read_tensors(path)[1] == {"step": "2"}
    content = path.read_bytes().replace(b'"step":"2"', b'"step":"3"')
    path.write_bytes(content.replace(b"sha256", name))
    with pytest.raises(ValueError, match=r"resume.safetensors: the file is damaged"):
        read_tensors(path)
