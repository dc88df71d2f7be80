"""Commands from typed dataclasses: every field is a flag, its docstring the help. YAML files can set any of them."""

import json
import re
import shlex
import sys
from argparse import Action
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, get_args, get_type_hints

import yaml
from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    get_loader,
    set_loader,
    set_parsing_settings,
)

from trajectory_transformer.cli.terminal import printable
from trajectory_transformer.config import PRESETS, Sampler, dotted
from trajectory_transformer.files import parse_yaml, read_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_PRESET_GROUPS = ("tokens", "model", "train", "search")

_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)

_AUTHORS = "is part of --tokens.authors_conventions (preset reference)"
_OPTIMIZER = "is part of --train.optimizer"
_BACKEND = "is part of --train.backend"
# Flags of versions before 0.1, and what replaces them.
RENAMED = {
    "tokens.bin_value": _AUTHORS,
    "tokens.final_observation": _AUTHORS,
    "tokens.max_episode_steps": _AUTHORS,
    "tokens.loss_mask": _AUTHORS,
    "model.context_channels": "is now --model.map_channels",
    "train.epoch_size": "was removed: use --train.steps or --train.epochs",
    "train.final_lr_share": _OPTIMIZER,
    "train.betas": _OPTIMIZER,
    "train.weight_decay": _OPTIMIZER,
    "train.grad_clip": "was removed: gradients are clipped to a norm of 1",
    "train.log_every": "was removed: metrics come every hundredth of a run, at most every 20 steps",
    "train.seed": "is now --seed",
    "train.checkpoint_every": "is now --checkpoint_every",
    "train.precision": _BACKEND,
    "train.compile": _BACKEND,
    "train.graph": _BACKEND,
    "tensorboard": "is now --log tensorboard",
    "search.temperature": "is now --search.action.temperature",
    "search.action_top_k": "is now --search.action.top_k",
    "search.action_nucleus": "is now --search.action.nucleus",
    "search.action_middle": "is now --search.action.middle",
    "search.opening_nucleus": "is now --search.first_action.nucleus",
    "search.observation_top_k": "is now --search.observation.top_k",
    "search.observation_nucleus": "is now --search.observation.nucleus",
    "search.estimate": "was replaced: means are the default, and --percentile takes a percentile",
    "search.percentile": "is now --percentile",
    "search.discount": "is now --discount",
    "search.decoder": "is now --search.backend",
    "search.precision": "is now --search.backend fused or fused-float32",
}


class Command(Protocol):
    """A dataclass of settings that can be executed."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    positional: ClassVar[dict[str, str]]  # fields given by position, in order, and their help
    required: ClassVar[tuple[str, ...]]  # fields that must be given
    examples: ClassVar[tuple[str, ...]]  # commands that the help shows

    def execute(self) -> object:
        """Run the command."""


class HelpFormatter(DefaultHelpFormatter):
    """Types as a user writes them, and no list of choices twice."""

    def _expand_help(self, action: Action) -> str:
        text = super()._expand_help(action)
        text = re.sub(r"\(required, type: [^)]*\)", "(required)", text)  # null is only what was not given
        text = re.sub(r"type: (?:typing\.)?Literal\[[^]]*\], ", "", text)  # the choices are part of the flag
        text = re.sub(r"Optional\[Literal\[([^]]*)\]\]", r"\1, null", text)
        text = re.sub(r"Optional\[(.*)\], default", r"\1 | null, default", text)
        return re.sub(r"<class '(\w+)'>", r"\1", text)


class CommandParser(ArgumentParser):
    """Answers a mistake with one sentence and the names that would have been right."""

    required: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()  # of settings

    def format_help(self, *given: Any, **options: Any) -> str:
        """The help, with required arguments shown as such and examples at the end."""
        # Only here: a command answers a missing argument with a sentence of its own.
        for action in self._actions:
            if action.dest in self.required:
                action.required = True
                action.nargs = action.nargs if action.option_strings else None
        text = super().format_help(*given, **options)
        return "\n".join([text, "examples:", *(f"  {example}" for example in self.examples), ""])

    def error(self, message: str, *_: object, **__: object) -> NoReturn:
        """Exit with code 2."""
        if not self.exit_on_error:
            raise ArgumentError(None, message)  # the parser of a group within this one: its parent reports
        print(f"{self.prog}: error: {printable(self._explain(message) + _in_files(self.files))}", file=sys.stderr)
        sys.exit(2)

    def _explain(self, message: str) -> str:
        """The mistake, and the successor of a flag that was renamed, or the flags closest to an unknown one."""
        text = _one_line(message)
        unknown = re.search(r"(?:[Uu]nrecognized arguments: --?|unknown setting |[Kk]ey ['\"])([\w.-]+)", text)
        names = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        if unknown is None or f"--{unknown.group(1)}" in names:
            return text
        if unknown.group(1) in RENAMED:
            return f"--{unknown.group(1)} {RENAMED[unknown.group(1)]}"
        near = get_close_matches(f"--{unknown.group(1)}", names, n=3, cutoff=0.7)
        if near:
            return f"{text}; did you mean {' or '.join(near)}?"
        return f"{text}; valid are {' '.join(sorted(names))}"


def parse(command_name: str, command: type[Command], words: Sequence[str]) -> Command:
    """Read a command's flags into its dataclass; a value that it refuses is a ValueError.

    Where no preset is named, the command may choose one by its other settings, such as the device.
    """
    parser = _make_parser(command_name, command)
    parser.files = tuple(_config_files(words))
    for flag, value in _flags(words):
        if (flag == "--config" or flag[2:] in _groups(command)) and Path(value).is_file():
            _check_settings(Path(value))
    requested = _requested_preset(words)
    parsed = _read(parser, command, words, requested)
    chosen = None if requested else getattr(parsed, "usual_preset", None)
    return parsed if chosen is None else _read(parser, command, words, chosen)


def _make_parser(command_name: str, command: type[Command]) -> CommandParser:
    """The parser of a command's flags."""
    parser = CommandParser(prog=f"tt {command_name}", description=command.__doc__, formatter_class=HelpFormatter)
    parser.required, parser.examples = command.required, command.examples
    parser.allow_abbrev = False  # an abbreviated --preset would be missed below
    parser._negative_number_matcher = _NEGATIVE  # argparse takes -1e-05 for a flag
    parser.add_argument("--config", action="config", help="YAML file of settings; flags after it override it.")
    for field, text in command.positional.items():
        parser.add_argument(field, type=str | None, nargs="?", help=text)
    parser.add_class_arguments(command, None, skip=set(command.positional))
    own = set(command.__annotations__)
    for group in parser._action_groups:
        # What a command shares with others comes after what is its own.
        group._group_actions.sort(key=lambda action: action.dest.partition(".")[0] not in own)
        if group.title == (command.__doc__ or "").rstrip("."):
            group.title = "flags"  # the description says the rest
    return parser


def _read(parser: CommandParser, command: type[Command], words: Sequence[str], preset_name: str | None) -> Command:
    """Read a command's flags; those that are not given have the values of a preset."""
    presets = {str(known): preset for known, preset in PRESETS.items()}
    preset = presets.get(preset_name or "")
    own_groups = {field.name for field in fields(command)} & set(_PRESET_GROUPS)
    defaults: dict[str, Any] = {}
    if preset is not None:
        for own_group in own_groups:
            defaults |= _defaults(own_group, getattr(preset, own_group))
        flags = {word.partition("=")[0] for word in words}
        # Steps and epochs exclude each other, so a flag for one replaces the other in the preset.
        for flag, excluded in (("--train.steps", "train.epochs"), ("--train.epochs", "train.steps")):
            if flag in flags and excluded in defaults:
                defaults[excluded] = None
    if "search" in own_groups:
        # A middle replaces the other filters, so a filter that is given replaces a middle that is not.
        given = _given(command, words)
        if {"search.action.nucleus", "search.action.top_k"} & given and "search.action.middle" not in given:
            defaults["search.action.middle"] = None
    parser.set_defaults(defaults)
    parsed = parser.parse_args(list(words))
    for name in _groups(command):
        if parsed.get(name) is None:
            parser.error(f"--{name}: expected a mapping, got null; leave it out for the defaults")
    try:
        settings = parser.instantiate(parsed)
    except ValueError as error:
        raise ValueError(_one_line(str(error)) + _in_files(parser.files)) from error
    del settings["config"]
    hints = get_type_hints(command)
    empty = [
        name for name, value in vars(settings).items() if value is None and type(None) not in get_args(hints[name])
    ]
    if empty:
        raise ValueError(f"--{empty[0]}: expected a value, got null{_in_files(parser.files)}")
    made = command(**vars(settings))
    for path in parser.files:
        _refuse_code(path, made)
    return made


def _defaults(name: str, value: Any) -> dict[str, Any]:
    """Defaults of the flags of a group of settings; a group within it that may be null has a single flag."""
    if not is_dataclass(value):
        return {name: value}
    hints = get_type_hints(type(value))
    found: dict[str, Any] = {}
    for field in fields(value):
        key, inner = f"{name}.{field.name}", getattr(value, field.name)
        found |= {key: inner} if type(None) in get_args(hints[field.name]) else _defaults(key, inner)
    return found


def _given(command: type[Command], words: Sequence[str]) -> set[str]:
    """Dotted names of the settings that flags and files give."""
    names = {word.partition("=")[0].removeprefix("--") for word in words}
    prefixes = {"--config": ""} | {f"--{group}": f"{group}." for group in _groups(command)}
    for flag, value in _flags(words):
        if flag not in prefixes:
            continue
        try:
            settings = read_yaml(Path(value)) if Path(value).is_file() else _load_settings(value)
        except (yaml.YAMLError, ValueError):
            continue  # the parser reports it
        names |= {prefixes[flag] + key for key in dotted(settings)} if isinstance(settings, dict) else set()
    return names


def _in_files(files: Sequence[Path]) -> str:
    """Where settings came from that were not typed."""
    return f" (settings of {', '.join(map(str, files))})" if files else ""


def _load_settings(text: str) -> object:
    """YAML of a file or of the command line, without what could run code or exhaust memory."""
    if "*" in text and "&" in text:
        parse_yaml(text, "settings")  # refuses aliases
    value = _load_yaml(text)
    if _names_class(value):
        raise yaml.YAMLError("class_path is not supported: settings are plain values")
    return value


def _names_class(value: object) -> bool:
    if isinstance(value, dict):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list) and any(map(_names_class, value))


_load_yaml = get_loader("yaml")
set_loader("yaml", _load_settings, exceptions=(yaml.YAMLError, ValueError))


def _check_settings(path: Path) -> None:
    """Refuse a file of settings that could run code while it is read, or that decides what is trusted."""
    settings = read_yaml(path)
    if _names_class(settings):
        raise ValueError(f"{path}: class_path is not supported: settings are plain values")
    for name in ("trust", "config"):
        if isinstance(settings, dict) and name in settings:
            raise ValueError(f"{path}: {name} cannot be set in a file; type --{name} yourself")


def _refuse_code(path: Path, command: Command) -> None:
    """Refuse a file that decides to run code: only a user who typed --trust does."""
    settings = read_yaml(path)
    for name in ("env", "policy"):
        given = settings.get(name) if isinstance(settings, dict) else None
        # What was typed replaces what the file names.
        if given is None or given != getattr(command, name, None) or getattr(command, "trust", True):
            continue
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, str) and (":" in each or ".zip" in each):
                raise ValueError(
                    f"{path}: {name} {each!r} would run code; type --{name} yourself, or pass --trust true if you "
                    "trust where the file came from"
                )


@cache
def _groups(settings: type[Any]) -> tuple[str, ...]:
    """Dotted names of the groups of settings that always have a value."""
    return tuple(_find_groups(settings, ""))


def _find_groups(settings: type[Any], prefix: str) -> Iterator[str]:
    for field in fields(settings):
        if type(None) in get_args(get_type_hints(settings)[field.name]):
            continue
        if callable(field.default_factory) and is_dataclass(value := field.default_factory()):
            yield prefix + field.name
            yield from _find_groups(type(value), f"{prefix}{field.name}.")


def command_line(name: str, command: Command, *, leave_out: Sequence[str] = (), **replaced: object) -> str:
    """The words that repeat a command: its positional argument, and every flag that is not at its default.

    `leave_out` names fields that do not belong in it, `replaced` gives values that were determined while it ran.
    """
    values = {field.name: getattr(command, field.name) for field in fields(command)} | replaced
    words = [str(values[field]) for field in command.positional if values[field] is not None]
    return shlex.join(["tt", *name.split(), *words, *changed_flags(command, leave_out=leave_out, **replaced)])


def changed_flags(command: Command, *, leave_out: Sequence[str] = (), **replaced: object) -> list[str]:
    """Every flag of a command that is not at its default, each followed by its value.

    If `replaced` names a preset, the defaults are those of the preset.
    """
    words = []
    preset = {str(known): each for known, each in PRESETS.items()}.get(str(replaced.get("preset")))
    for field in fields(command):
        if field.name in command.positional or field.name in leave_out:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        if preset is not None and field.name in _PRESET_GROUPS:
            default = getattr(preset, field.name)
        words += _changed(field.name, replaced.get(field.name, getattr(command, field.name)), default)
    return words


def _changed(name: str, value: object, default: object) -> list[str]:
    """The flags that turn a default into a value."""
    if is_dataclass(value) and type(value) is type(default):
        words = [
            word
            for field in fields(value)
            for word in _changed(f"{name}.{field.name}", getattr(value, field.name), getattr(default, field.name))
        ]
        # Another filter alone would replace a middle that is the default.
        if isinstance(value, Sampler) and words and value.middle is not None and f"--{name}.middle" not in words:
            words += [f"--{name}.middle", _text(value.middle)]
        return words
    if value == default:
        return []
    if is_dataclass(value) and not isinstance(value, type):
        set_fields = {key: each for key, each in asdict(value).items() if each is not None}
        return [word for key, each in set_fields.items() for word in (f"--{name}.{key}", _text(each))]
    return [f"--{name}", _text(value)]


def _text(value: object) -> str:
    """A value as the command line reads it."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def _requested_preset(words: Sequence[str]) -> str | None:
    """The preset: it changes defaults, so it must be known before anything else is parsed."""
    preset = None
    for flag, value in _flags(words):
        if flag == "--preset":
            preset = value
        elif flag == "--config" and Path(value).is_file():
            preset = _preset_of_file(Path(value)) or preset
    return preset


def _config_files(words: Sequence[str]) -> list[Path]:
    """The files of settings that were given."""
    return [Path(value) for flag, value in _flags(words) if flag == "--config" and Path(value).is_file()]


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags and their values."""
    for index, word in enumerate(words):
        flag, given, value = word.partition("=")
        if not given:
            value = words[index + 1] if index + 1 < len(words) else ""
        yield flag, value


def _preset_of_file(path: Path) -> str | None:
    """The preset that a file of settings names."""
    settings = read_yaml(path)
    return str(settings["preset"]) if isinstance(settings, dict) and "preset" in settings else None


_MAPPING = "expected a mapping such as '{nucleus: 0.5}'"
# Messages of the parser library in plain words, applied in this order.
_PLAIN = (
    (r'Parser key "([\w.]+)":\s*', r"--\1: "),
    # How each type of a union was tried.
    (r"Does not validate.*?Errors: - (.*?) Given value type: .*? Given value: (.*)", r"\1, got \2"),
    (r" - Expected an? <class 'NoneType'>", " or null"),
    (r" or null, got Namespace\(.*\)", ""),  # a group within a group, whose own rule comes before
    (r"Group '([\w.]+)' does not accept option '([\w.]+)'", r"unknown setting \1.\2"),
    (r"^Option '([\w.]+)' is not accepted", r"unknown setting \1"),
    (r"--([\w.]+): Problem with given class_path.*?Option '(\w+)' is not accepted.*", r"unknown setting \1.\2"),
    (
        r"--([\w.]+): Problem with given class_path.*? --(\w+): .*?Errors: - (.*?)(?: or null)? Given value.*",
        r"--\1.\2: \3",
    ),
    (r"--[\w.]+: Unable to load config '.*?' - (?=--[\w.]+: (?!Unable))", ""),
    (r"Unable to load config ('.*?') - .*", r"expected a YAML file or a mapping, got \1"),
    (r"(?:Expected a dot import path string|Unexpected import path format): .*?(?= or null)", _MAPPING),
    (r"[Ee]xpected an? typing\.Literal\[(.*?)\]", r"expected one of \1"),
    (r"[Ee]xpected an? <class '(\w+)'>", r"expected \1"),
    (r"expected tuple", "expected a list in brackets"),
    (r"expected dict", "expected a mapping in braces"),
    (r"\. Got value: ", ", got "),
)


def _one_line(message: str) -> str:
    """An error of the parser library in one line of plain words."""
    text = " ".join(line.strip() for line in message.splitlines())
    for pattern, plain in _PLAIN:
        text = re.sub(pattern, plain, text)
    return text
