"""Atomic writes, and modules of the user.

A write goes to a temporary file or folder, which is then renamed over the target.

A reader finds the old content or the new content, never a part of it. A writer that is killed leaves a temporary file
`NAME.*.tmp` next to the target. It does not block later writers and can be deleted.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` to a file: if anything fails, the old file is untouched."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block succeeds.

    The block must create a file or a folder at the temporary path. It is flushed to disk before the rename, and removed
    if the block raises. Missing parent folders are created. An existing file is replaced; an existing folder can only
    be replaced if it is empty.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        for written in [*(temporary.rglob("*") if temporary.is_dir() else ()), temporary]:
            _sync(written)
        temporary.replace(target)
    except BaseException:
        _remove(temporary)
        raise
    # The rename itself is an entry of the parent folder, which has to be flushed too.
    _sync(target.parent)


def allow_local_modules() -> None:
    """Let modules in the working directory be imported, as `python -m` does: `--env module:Id-v0`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
