"""Commands as a user types them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trajectory_transformer.cli import main


@pytest.fixture
def tt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Type a command in an empty folder, with no Minari datasets: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def run(*words: object) -> tuple[int, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:  # how the flag parser leaves
            assert isinstance(error.code, int)
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def refused(tt: Callable[..., tuple[int, str]]) -> Callable[..., None]:
    """Type a command that must be answered with exit code 2 and one sentence that holds a pattern."""

    def check(pattern: str, *words: object) -> None:
        code, text = tt(*words)
        assert code == 2, text
        assert len(text.strip().splitlines()) == 1, text
        assert re.search(pattern, text), text

    return check
