"""`tt view` as a user types it."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ((), "name the run folder"),
        (("nowhere",), "nowhere: no such checkpoint folder, and not a model of this package"),
        ((".", "--port", 70000), r"--port must lie in \[0, 65535\]"),
    ],
)
def test_the_command_refuses(words: tuple[object, ...], pattern: str, refused: Callable[..., None]) -> None:
    refused(pattern, "view", *words)
