"""Vary single conventions of the authors' code in tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from trajectory_transformer.tokens.tokenizer import CONVENTIONS, Conventions


@contextmanager
def authors_conventions(conventions: Conventions) -> Iterator[None]:
    """Let `tokens.authors_conventions` stand for other conventions within a block."""
    original = CONVENTIONS[True]
    CONVENTIONS[True] = conventions
    try:
        yield
    finally:
        CONVENTIONS[True] = original
