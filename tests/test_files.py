"""Atomic writes: the target is complete or untouched."""

import subprocess
import sys
from pathlib import Path
from threading import Barrier, Thread

import pytest

from trajectory_transformer.files import replacing, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_is_written_and_no_temporary_file_remains(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "a.json", b"first")
    write_atomically(str(tmp_path / "new" / "a.json"), b"second")
    assert (tmp_path / "new" / "a.json").read_bytes() == b"second"
    assert names(tmp_path / "new") == ["a.json"]


def test_target_is_untouched_when_the_writer_raises(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as temporary:
        temporary.write_bytes(b"half of the new")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), replacing(tmp_path / "run") as temporary:
        temporary.mkdir()
        (temporary / "weights").write_bytes(b"half")
        raise RuntimeError
    assert names(tmp_path) == []
    with replacing(tmp_path / "run") as temporary:
        (temporary / "deep").mkdir(parents=True)
        (temporary / "deep" / "weights").write_bytes(b"whole")
        assert not (tmp_path / "run").exists()
    assert names(tmp_path) == ["run"]
    assert (tmp_path / "run" / "deep" / "weights").read_bytes() == b"whole"


def test_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "kept").touch()
    with pytest.raises(OSError), replacing(tmp_path / "run") as temporary:
        temporary.mkdir()
    assert names(tmp_path) == ["run"] and names(tmp_path / "run") == ["kept"]


def test_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a.bin"):
        pass
    assert names(tmp_path) == []


def test_two_writers_of_one_target_do_not_collide(tmp_path: Path) -> None:
    target, size, both_wrote = tmp_path / "a.bin", 100_000, Barrier(2)

    def write(letter: bytes) -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(letter * size)
            both_wrote.wait(timeout=30)

    threads = [Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in (b"a" * size, b"b" * size)
    assert names(tmp_path) == ["a.bin"]


def test_leftovers_of_a_killed_writer_do_not_block(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    script = (
        "import os, sys; from trajectory_transformer.files import replacing\n"
        "with replacing(sys.argv[1]) as temporary:\n    temporary.write_bytes(b'half')\n    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(target)], check=False).returncode == 9
    assert target.read_bytes() == b"old" and len(names(tmp_path)) == 2
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
