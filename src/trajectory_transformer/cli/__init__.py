"""The command `tt`: parses what a user types, and calls the Python API."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

from trajectory_transformer.cli.baseline import TrainBaseline
from trajectory_transformer.cli.collect import Collect
from trajectory_transformer.cli.data import Convert, Show
from trajectory_transformer.cli.demo import Demo
from trajectory_transformer.cli.evaluate import Evaluate
from trajectory_transformer.cli.importing import Import
from trajectory_transformer.cli.parser import Command, parse
from trajectory_transformer.cli.predict import Predict
from trajectory_transformer.cli.report import Report
from trajectory_transformer.cli.train import Train
from trajectory_transformer.cli.view import View

__all__ = ["main"]

COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "collect": Collect,
    "data show": Show,
    "data convert": Convert,
    "train": Train,
    "import": Import,
    "baseline": TrainBaseline,
    "evaluate": Evaluate,
    "predict": Predict,
    "report": Report,
    "view": View,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 2 for invalid input, 130 when the user stopped it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(version("trajectory-transformer"))
        return 0
    group = words[0] if words and any(command.startswith(f"{words[0]} ") for command in COMMANDS) else ""
    rest = words[1:] if group else words
    if not rest or rest[0] in ("-h", "--help"):
        print(_overview(group))
        return 0 if rest else 2
    name = " ".join(words[:2]) if group else words[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"tt: error: no command {name!r}; {hint}valid are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        parse(name, COMMANDS[name], words[len(name.split()) :]).execute()
    except (ValueError, OSError, ImportError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"tt {name}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tt {name}: stopped", file=sys.stderr)
        return 130
    return 0


def _overview(group: str) -> str:
    """All commands of a group (or all commands) with the first line of their help."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown)) + 2
    lines = [f"  {name:{width}}{(command.__doc__ or '').splitlines()[0]}" for name, command in shown.items()]
    intro = ["Turn recorded trajectories into a controller.", "", "usage: tt COMMAND [flags]", ""]
    outro = ["", "tt COMMAND --help lists the flags of a command. --config FILE.yaml can set any of them."]
    return "\n".join([*intro, *lines, *outro])
