"""Mutation of files with a fixed seed: what a command does with the damaged copy."""

import contextlib
import functools
import io
import json
import os
import select
import shutil
import signal
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from tests.attack.corpus import Target
from trajectory_transformer.cli import COMMANDS, parser
from trajectory_transformer.cli.parser import Command

SECONDS = 30  # after which a command counts as hanging
KILL_SECONDS = 40  # after which its process is killed: no signal handler of Python runs within a library in C
_TEXTS = (
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"99999999999999999999",
    b"true",
    b"\x00",
    b"\xff\xfe",
)


@dataclass(frozen=True)
class Outcome:
    """What a command did with a damaged file: `refused`, `unharmed` (exit code 0), `raw`, `silent` or `hang`."""

    kind: str
    text: str


class _Hang(BaseException):
    """The command took too long."""


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """A damaged copy: truncated, bits flipped, blocks removed, repeated or overwritten, numbers replaced."""
    data = bytearray(content)
    size = max(len(data), 1)
    kind = int(rng.integers(8))
    start = int(rng.integers(size))
    length = int(rng.integers(1, 64))
    if kind == 0:
        return bytes(data[:start])
    if kind == 1:
        for place in rng.integers(size, size=int(rng.integers(1, 16))).tolist():
            data[place] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        del data[start : start + length]
    elif kind == 3:
        data[start:start] = data[start : start + length] * int(rng.integers(1, 5))
    elif kind == 4:
        data[start : start + length] = rng.bytes(length)
    elif kind == 5:
        data[start : start + length] = bytes([int(rng.choice([0, 255]))]) * length
    else:
        return _replace_value(bytes(data), rng)
    return bytes(data)


def damaged(target: Target, content: bytes, rng: np.random.Generator) -> bytes:
    """A damaged copy of the file of a target, or of one member of it."""
    if not target.member:
        return mutate(content, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(out, "w") as copy:
        for name in whole.namelist():
            part = whole.read(name)
            # Bytes in the middle of pickles are left alone: what they would do is not a question of this package.
            change = _replace_value if name == "data" else mutate
            copy.writestr(zipfile.ZipInfo(name), change(part, rng) if name == target.member else part)
    return out.getvalue()


def _replace_value(content: bytes, rng: np.random.Generator) -> bytes:
    """Text with one value replaced: in JSON any node, else a word."""
    text = _TEXTS[int(rng.integers(len(_TEXTS)))]
    try:
        tree = json.loads(content)
        places = list(_places(tree))
        parent, key = places[int(rng.integers(len(places)))]
        parent[key] = json.loads(text) if text not in (b"\x00", b"\xff\xfe", b"1e999") else "\x1b["
        return json.dumps(tree).encode()
    except (ValueError, IndexError):
        words = content.split(b" ")
        words[int(rng.integers(len(words)))] = text
        return b" ".join(words)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from _places(value)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise if a block takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_parse = parser.parse
_parse_once = functools.cache(_parse)


def remember(words: list[str]) -> None:
    """Parse a command for those who will be forked from this process."""
    name = next(each for each in COMMANDS if words[: len(each.split())] == each.split())
    _parse_once(name, COMMANDS[name], tuple(words[len(name.split()) :]))


@contextmanager
def remembered_commands() -> Iterator[None]:
    """Parse the same words only once: it takes ten times as long as reading a small file."""

    def parse(command_name: str, command: type[Command], words: Sequence[str]) -> Command:
        # A file of settings is read while the words are parsed.
        if "--config" in words:
            return _parse(command_name, command, words)
        return _parse_once(command_name, command, tuple(words))

    parser.parse = parse  # where the command line looks it up
    try:
        yield
    finally:
        parser.parse = _parse


def attack(
    target: Target, corpus: Path, folder: Path, content: bytes, main: Callable[[list[str]], int], expected: str = ""
) -> Outcome:
    """Run the command of a target on a copy of the corpus with one file replaced.

    `expected` is what the command prints for the undamaged file. If a checksum covers the contents, anything else that
    is accepted is `silent`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    top = Path(target.file).parts[0]
    paths = [Path(word.strip("[]")) for word in target.words if "{}" in word]
    needed = {top, *(path.parts[1] for path in paths)}
    needed |= {f"{name}.columns.yaml" for name in list(needed)}
    folder.mkdir(parents=True)
    for name in needed:
        source = corpus / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.is_file():
            shutil.copy(source, folder / name)
    (folder / target.file).write_bytes(content)
    words = [word.replace("{}", str(folder)) for word in target.words]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _limited(), remembered_commands():
            code = main(words)
    except _Hang:
        return Outcome("hang", f"longer than {SECONDS} s")
    except SystemExit as error:
        code = int(error.code) if isinstance(error.code, int) else 1
    except Exception:
        return Outcome("raw", traceback.format_exc())
    text = out.getvalue()
    if code == 0:
        changed = content != (corpus / target.file).read_bytes()
        is_silent = target.protected and changed and (text != expected or target.words[:2] != ("data", "show"))
        return Outcome("silent" if is_silent else "unharmed", text)
    # What a settings file says may be a policy or environment that does not exist: the error names that.
    named = any(name in text for name in (Path(target.file).name, str(folder), "corpus/data-v0"))
    if code != 2 or "Traceback" in text or not (named or target.name == "config"):
        return Outcome("raw", f"exit code {code}: {text}")
    return Outcome("refused", text)


def outcomes_in_forks(
    outcome: Callable[[int], Outcome], numbers: range, folder: Path, kill_seconds: float = KILL_SECONDS
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every number, computed in a fork with this working folder.

    A fork that says nothing for `kill_seconds` is killed: a `hang`. One that ends by itself, for example by a
    segmentation fault, is `raw`. Another fork then goes on with the next number.
    """
    left = numbers
    while left:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _become(outcome, left, folder, write)
        os.close(write)
        chunk, rest = b"+", b""
        while left and chunk and select.select([read], [], [], kill_seconds)[0]:
            chunk = os.read(read, 65536)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield left[0], Outcome(*json.loads(line))
                left = left[1:]
        os.close(read)
        is_hanging = bool(left and chunk)
        if is_hanging:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if left:
            text = f"killed after {kill_seconds:g} s" if is_hanging else f"the process ended with {code}"
            yield left[0], Outcome("hang" if is_hanging else "raw", text)
            left = left[1:]


def _become(outcome: Callable[[int], Outcome], numbers: range, folder: Path, write: int) -> None:
    """The fork: one line of JSON per number."""
    try:
        os.chdir(folder)  # a damaged path may be relative
        for number in numbers:
            found = outcome(number)
            os.write(write, json.dumps([found.kind, found.text[-2000:]]).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # without the clean-up of the parent
