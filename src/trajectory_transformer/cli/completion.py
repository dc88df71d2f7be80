"""`tt completion`: a script that completes commands, flags and their values in a shell."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import ClassVar, Literal

from trajectory_transformer.cli import COMMANDS

_SCRIPT = """# Completion of tt for bash. Load it with: source <(tt completion bash)
_tt() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} name=${{COMP_WORDS[1]}} words=
    # Bash takes --flag=value apart at the equals sign.
    if [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; elif [[ $word == = ]]; then word=; fi
    case "$name" in {groups}) name="$name ${{COMP_WORDS[2]}}" ;; esac
    if [[ $COMP_CWORD == 1 ]]; then
        words="{commands}"
    else
        case "$name $before" in
{values}
        esac
        if [[ -z $words && $before != --* ]]; then
            case "$name" in
{flags}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tt tt"""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands and flags in a shell."""

    positional: ClassVar[dict[str, str]] = {"shell": "bash."}
    required: ClassVar[tuple[str, ...]] = ("shell",)
    examples: ClassVar[tuple[str, ...]] = (
        "source <(tt completion bash)                   # this shell",
        "tt completion bash >> ~/.bash_completion       # every shell",
    )

    shell: str | None = None
    """bash."""

    def execute(self) -> None:
        """Print."""
        if self.shell != "bash":
            raise ValueError(f"the shell must be bash, got {self.shell}")
        print(bash_script())


def bash_script() -> str:
    """The script for bash."""
    groups: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    values, flags = [], []
    for name, command in COMMANDS.items():
        known = {f"--{flag}": choices for flag, choices in _flags(command)}
        flags.append(f'                "{name}"*) words="{" ".join(sorted([*known, "--config", "--help"]))}" ;;')
        values += [
            f'            "{name} {flag}") words="{" ".join(choices)}" ;;' for flag, choices in known.items() if choices
        ]
    several = {first: seconds for first, seconds in groups.items() if seconds}
    values += [f'            "{first}"*" {first}") words="{" ".join(each)}" ;;' for first, each in several.items()]
    return _SCRIPT.format(
        groups="|".join(several), commands=" ".join(groups), values="\n".join(values), flags="\n".join(flags)
    )


def _flags(settings: type[typing.Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Dotted names of all flags of a dataclass, with the values that they can have."""
    hints = typing.get_type_hints(settings)
    positional = getattr(settings, "positional", {})
    for field in fields(settings):
        inner = [each for each in _alternatives(hints[field.name]) if isinstance(each, type) and is_dataclass(each)]
        if inner:
            yield from _flags(inner[0], f"{prefix}{field.name}.")
        elif field.name not in positional:
            yield prefix + field.name, tuple(_choices(hints[field.name]))


def _alternatives(hint: typing.Any) -> tuple[typing.Any, ...]:
    """The types of a union."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _choices(hint: typing.Any) -> Iterator[str]:
    """The values of a Literal or a bool."""
    for each in _alternatives(hint):
        if typing.get_origin(each) is Literal:
            yield from map(str, typing.get_args(each))
        elif each is bool:
            yield from ("true", "false")
