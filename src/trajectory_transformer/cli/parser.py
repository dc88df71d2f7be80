"""Commands from typed dataclasses: every field is a flag, its docstring the help, a YAML file may set any of them."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, ClassVar, NoReturn, Protocol

from jsonargparse import ArgumentParser, set_parsing_settings

from trajectory_transformer.config import PRESETS

set_parsing_settings(docstring_parse_attribute_docstrings=True)

# Which part of a preset fills which group of flags.
_PRESET_GROUPS = {"tokens": "tokens", "model": "model", "train": "train", "search": "plan"}


class Command(Protocol):
    """A dataclass of settings that can be carried out."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    positional: ClassVar[dict[str, str]]  # at most one field given by position, and its help

    def execute(self) -> object:
        """Do it."""


class CommandParser(ArgumentParser):
    """Answers a mistake with one sentence and the names that would have been right."""

    def error(self, message: str, *_: object, **__: object) -> NoReturn:
        """Leave with exit code 2."""
        print(f"{self.prog}: error: {_one_line(message)}{self._hint(message)}", file=sys.stderr)
        sys.exit(2)

    def _hint(self, message: str) -> str:
        """The nearest flags to one that does not exist, or all there are."""
        message = re.sub(r"Group '([\w.]+)' does not accept option '", r"does not accept option '\1.", message)
        unknown = re.search(r"(?:[Uu]nrecognized arguments: -*|option '|[Kk]ey ['\"])([\w.-]+)", message)
        names = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        if unknown is None or f"--{unknown.group(1)}" in names:
            return ""
        near = get_close_matches(f"--{unknown.group(1)}", names, n=3, cutoff=0.7)
        if near:
            return f"; did you mean {' or '.join(near)}?"
        return f"; valid are {' '.join(sorted(names))}"


def parse(name: str, command: type[Command], words: Sequence[str]) -> Command:
    """Read a command's flags into its dataclass; a value that it refuses is a ValueError."""
    parser = CommandParser(prog=f"tt {name}", description=command.__doc__)
    parser.add_argument("--config", action="config", help="YAML file of settings; flags after it override it.")
    for field, text in command.positional.items():
        parser.add_argument(field, type=str | None, nargs="?", help=text)
    parser.add_class_arguments(command, None, skip=set(command.positional))
    presets = {str(known): preset for known, preset in PRESETS.items()}
    preset = presets.get(_asked_preset(words) or "")
    if preset is not None:
        chosen = asdict(preset)
        groups = {field.name for field in fields(command)} & set(_PRESET_GROUPS)
        defaults = {f"{group}.{key}": value for group in groups for key, value in chosen[_PRESET_GROUPS[group]].items()}
        parser.set_defaults(defaults)
    settings = parser.instantiate(parser.parse_args(list(words)))
    del settings["config"]
    return command(**vars(settings))


def _asked_preset(words: Sequence[str]) -> str | None:
    """The preset asked for: it changes defaults, so it must be known before anything else is read."""
    for index, word in enumerate(words):
        if word.startswith("--preset="):
            return word.partition("=")[2]
        if word == "--preset" and index + 1 < len(words):
            return words[index + 1]
    return None


def _one_line(message: str) -> str:
    """A complaint of the parser in one line, without its account of how types are tried one after the other."""
    text = " ".join(line.strip() for line in message.splitlines())
    text = re.sub(r'Parser key "([\w.]+)":\s*', r"--\1: ", text)
    text = re.sub(r"Does not validate.*?Errors: - (.*?) Given value type: .*? Given value: (.*)", r"\1, got \2", text)
    text = re.sub(r"Expected an? <class '(\w+)'>", r"expected \1", text).replace("NoneType", "null")
    return text.replace(" - expected", " or")
