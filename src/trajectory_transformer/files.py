"""Atomic writes, JSON and YAML that others wrote, settings in them, and modules of the user.

A write goes to a temporary file or folder, which is then renamed over the target.

A reader finds the old content or the new content, never a part of it. A writer that is killed leaves a temporary file
`NAME.*.tmp` next to the target. It does not block later writers and can be deleted.
"""

import functools
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

LOCK = "lock"  # file of a run folder that its training holds
_MAX_YAML = 2**20  # bytes; settings and recipes are written by hand
_MAX_INT = 2**63  # what tensors can hold

SettingsT = TypeVar("SettingsT")


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` to a file: if anything fails, the old file is untouched."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: str | Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block succeeds.

    The block must create a file or a folder at the temporary path. It is flushed to disk before the rename, and removed
    if the block raises. Missing parent folders are created. An existing file is replaced, or without `overwrite` kept;
    an existing folder can only be replaced if it is empty.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        publish(temporary, target, overwrite=overwrite)
    except FileExistsError:
        raise  # the work of the block is kept
    except BaseException:
        _remove(temporary)
        raise


def publish(temporary: Path, target: Path, *, overwrite: bool = True) -> None:
    """Flush a file or folder to disk and rename it.

    Without `overwrite`, a target that another process has made meanwhile is an error, and the temporary path stays.
    """
    for written in [*(temporary.rglob("*") if temporary.is_dir() else ()), temporary]:
        _sync(written)
    if overwrite:
        temporary.replace(target)
    else:
        _publish_new(temporary, target)
    # The rename itself is an entry of the parent folder, which has to be flushed too.
    _sync(target.parent)


def _publish_new(temporary: Path, target: Path) -> None:
    """Rename to a path that does not exist, also if several processes try at the same moment."""
    try:
        if temporary.is_dir():
            if target.exists():
                raise FileExistsError
            temporary.rename(target)  # fails if a folder with content has appeared
        else:
            target.hardlink_to(temporary)  # unlike a rename, it fails if the target exists
            temporary.unlink()
    except OSError as error:
        if target.exists():
            raise FileExistsError(
                f"{target} was created by another process meanwhile; what was written here is kept as {temporary}"
            ) from error
        temporary.rename(target)  # a file system without hard links


@contextmanager
def naming(place: str | Path, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, and ValueErrors that do not name the file, into a ValueError that does."""
    caught: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except caught as error:
        if isinstance(error, ValueError) and str(place) in str(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{place}: {what} ({reason})") from error


def read_json(path: str | Path) -> Any:
    """The content of a JSON file; a ValueError that names the file if it is damaged."""
    return parse_json(Path(path).read_bytes(), str(path))


def parse_json(text: str | bytes, place: str) -> Any:
    """The content of JSON text; `place` names its source in errors."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8, and numbers of thousands of digits
        raise ValueError(f"{place}: not valid JSON; the file may be truncated ({error})") from error


def settings_from(kind: type[SettingsT], stored: object, group: str = "") -> SettingsT:
    """A dataclass from JSON; refuses names that it does not have, and values of other types than its annotations say.

    Lists become tuples, whole numbers floats and mappings the dataclasses within it. `group` is its name in errors. A
    value that is a dataclass already is kept.
    """
    if not isinstance(stored, Mapping):
        raise ValueError(f"{group or 'the settings'} must be a mapping, got {_shown(stored)}")
    types, prefix = _annotations(cast(Any, kind)), f"{group}." if group else ""
    for name in stored:
        if name not in types:
            raise ValueError(f"unknown setting {prefix}{name}; valid are {', '.join(types)}")
    return kind(**{name: _typed(types[name], value, prefix + name) for name, value in stored.items()})


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)  # slower than all that is checked with it


def _typed(kind: Any, value: object, name: str) -> Any:
    """A value of JSON in the type of an annotation."""
    options = [each for each in get_args(kind) if each is not NoneType]
    if any(get_origin(each) is Literal and value in get_args(each) for each in options if isinstance(value, str)):
        return value
    if NoneType in get_args(kind):
        return None if value is None else _typed(options[0], value, name)
    origin: Any = get_origin(kind) or kind
    if origin is Literal:
        fits, expected = value in options, f"one of {', '.join(map(str, options))}"
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_typed(options[0], each, f"{name}[{index}]") for index, each in enumerate(value))
        fits, expected = False, "a list"
    elif origin is dict:
        fits, expected = isinstance(value, dict), "a mapping"
    elif is_dataclass(origin):
        return value if type(value) is kind else settings_from(kind, value, name)
    elif origin is float:
        if type(value) in (int, float) and _is_sane(value):
            return float(value)  # type: ignore[arg-type]
        fits, expected = False, "a finite number"
    elif origin is int:
        fits, expected = type(value) is int and _is_sane(value), "a whole number"
    else:
        assert origin in (bool, str), f"settings of type {kind} cannot be read"
        fits, expected = type(value) is origin, "true or false" if origin is bool else "text"
    if not fits:
        raise ValueError(f"{name} must be {expected}, got {_shown(value)}")
    return value


def _is_sane(number: Any) -> bool:
    return isfinite(number) if type(number) is float else abs(number) < _MAX_INT


def _shown(value: object) -> str:
    """A value as JSON has it, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_yaml(path: Traversable) -> Any:
    """The content of a YAML file; a ValueError that names the file if it is damaged or has aliases."""
    with path.open("rb") as file:
        content = file.read(_MAX_YAML + 1)
    if len(content) > _MAX_YAML:
        raise ValueError(f"{path}: a YAML file may have at most {_MAX_YAML:,} bytes")
    return parse_yaml(content, str(path))


def parse_yaml(text: str | bytes, place: str) -> Any:
    """The content of YAML text; `place` names its source in errors.

    Aliases are refused: a few hundred bytes of them can stand for billions of entries.
    """
    import yaml  # not needed by most commands

    try:
        alias = next((event for event in yaml.parse(text, yaml.SafeLoader) if isinstance(event, yaml.AliasEvent)), None)
        if alias is None:
            return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid YAML ({' '.join(str(error).split())})") from error
    raise ValueError(f"{place}: YAML aliases (*{alias.anchor}) are not supported; write the value out")


def file_sha256(path: str | Path) -> str:
    """SHA-256 of the content of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def allow_local_modules() -> None:
    """Let modules in the working directory be imported, as `python -m` does: `--env module:Id-v0`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


class FolderInUseError(ValueError):
    """Another process works in a folder."""


class FolderLock:
    """A folder that belongs to this process until `release`, or until the process ends in any way."""

    def __init__(self, path: Path, descriptor: int, before: str) -> None:
        """Hold an open and locked file."""
        self.path = path
        self.before = before  # what a process that was killed has left in the file
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let others work in the folder; the file is removed."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FolderLock":
        """Hold the folder for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()

    def __del__(self) -> None:
        """Let others work with the last reference, as at the end of the process; the file stays."""
        self._close()


def lock_folder(folder: Path, name: str = LOCK, note: str = "") -> FolderLock:
    """Take a folder for this process, by a file in it with the process and a note; an error says who has it.

    The operating system releases the lock of a process that was killed. Its file stays.
    """
    path = folder / name
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        before = os.read(descriptor, 2**16).decode(errors="replace")
        try:
            _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            holder = before.partition("\n")[0] or "another process"
            raise FolderInUseError(f"{folder}: in use by {holder}; wait until it ends, or stop it") from error
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # its holder has removed the file in between
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n{note}".encode(), 0)
    return FolderLock(path, descriptor, before)


class OutputFolder:
    """A folder that this process writes: nobody else may, from the first file on until the end of the block."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Lock a folder to resume; a new one is made by `prepare`. Without a path, nothing is done."""
        if path is not None and path.exists() and not resume:
            raise ValueError(f"{path} exists already; choose another folder or pass resume=True")
        self.path = path
        self._lock = lock_folder(path) if path is not None and path.exists() else None

    def prepare(self) -> None:
        """Make a new folder before the first file is written; one that another process made meanwhile is refused."""
        if self.path is None or self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise FolderInUseError(f"{self.path} was created by another process meanwhile") from error
        self._lock = lock_folder(self.path)

    def __enter__(self) -> "OutputFolder":
        """Write for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let others write."""
        if self._lock is not None:
            self._lock.release()


def _lock(descriptor: int) -> None:
    """Lock an open file, or raise an OSError at once."""
    try:
        import fcntl
    except ImportError:
        return  # not POSIX
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
