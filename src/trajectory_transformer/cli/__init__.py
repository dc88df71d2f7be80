"""The command `tt`: parses what a user types, and calls the Python API.

Only what the standard library offers is imported here: a list of all commands must not take seconds, and Ctrl-C must
stop `tt` at any moment.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

from trajectory_transformer.cli.terminal import printable, show_warnings

if TYPE_CHECKING:
    from trajectory_transformer.cli.parser import Command

__all__ = ["main"]

# Where each command is, and the first line of its help.
SUMMARIES: dict[str, tuple[str, str]] = {
    "demo": ("demo:Demo", "Collect demonstrations, train a model, and plan to goals; four rooms take a few minutes."),
    "collect": ("collect:Collect", "Run policies in an environment and write their episodes as a dataset."),
    "data show": ("data:Show", "Describe a dataset: episodes, returns, every dimension, and its tokens."),
    "data convert": ("data:Convert", "Convert a dataset to another format: Minari, .npz, .hdf5, .parquet or .csv."),
    "data split": ("data:Split", "Split a dataset into episodes to train on and held-out ones, by a seed."),
    "train": ("train:Train", "Train a model on a dataset, or resume a run that was stopped."),
    "import": ("importing:Import", "Convert a state_*.pt file of the authors' code to a run folder that can plan."),
    "baseline": (
        "baseline:TrainBaseline",
        "Train a baseline (BC, TD3+BC, IQL, CQL, BRAC, DT, MBOP) on a dataset, or resume a run that was stopped.",
    ),
    "pets": (
        "pets:FitPets",
        "Fit a probabilistic ensemble (PETS) and clone the policy of a dataset, for `tt study`.",
    ),
    "evaluate": (
        "evaluate:Evaluate",
        "Play episodes with a trained model or baseline and report return, success rate and normalised score.",
    ),
    "predict": (
        "predict:Predict",
        "Sample futures of a recorded episode and plot them against what was recorded.",
    ),
    "study": (
        "study:CompareStudy",
        "Compare how well predictors foresee held-out episodes: log-likelihood and error at every step.",
    ),
    "attention": (
        "attention:Attention",
        "Draw the attention maps of all layers and heads over a window of a recorded episode, and score the heads.",
    ),
    "report": (
        "report:Report",
        "Write the page of a run (or of two runs side by side), or tables of result files into documents.",
    ),
    "grid": (
        "grid:RunGrid",
        "Run the same commands for every combination of values, on this machine or on a Ray cluster.",
    ),
    "view": ("view:View", "Open a local page with the plans, forecasts, attention and data of a run."),
    "completion": ("completion:Completion", "Print a script that completes commands and flags in a shell."),
}


class _Commands(Mapping[str, "type[Command]"]):
    """The commands by name; one is imported when it is looked up."""

    def __getitem__(self, name: str) -> "type[Command]":
        module, _, attribute = SUMMARIES[name][0].partition(":")
        command: type[Command] = getattr(import_module(f"{__name__}.{module}"), attribute)
        return command

    def __contains__(self, name: object) -> bool:
        return name in SUMMARIES  # without an import

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


COMMANDS = _Commands()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 2 for invalid input, 130 when the user stopped it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        from importlib.metadata import version

        print(version("trajectory-transformer"))
        return 0
    if words[:1] == ["predict"] and "--study" in words:  # an alias of `tt study`
        words = ["study", *(word for word in words[1:] if word != "--study")]
    group = words[0] if words and any(command.startswith(f"{words[0]} ") for command in COMMANDS) else ""
    rest = words[1:] if group else words
    if not rest or rest[0] in ("-h", "--help"):
        print(_overview(group))
        return 0 if rest else 2
    name = " ".join(words[:2]) if group else words[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"tt: error: no command {printable(name)!r}; {hint}valid are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    show_warnings()
    try:
        with _stopped_at_once(name):
            from trajectory_transformer.cli.parser import parse

            command = parse(name, COMMANDS[name], words[len(name.split()) :])
            if name != "completion":
                import_module("torch")  # what the command needs first: it takes seconds
        command.execute()
    except (ValueError, OSError, ImportError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"tt {name}: error: {printable(text)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"tt {name}: {printable(str(stop)) or 'stopped'}", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _stopped_at_once(name: str) -> Iterator[None]:
    """End the process at Ctrl-C while modules are imported.

    Nothing has been started yet, and an exception within an import can turn into another one or print a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, f"tt {name}: stopped\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _overview(group: str) -> str:
    """All commands of a group (or all commands) with the first line of their help."""
    shown = {name: summary for name, (_, summary) in SUMMARIES.items() if name.startswith(group)}
    width = max(map(len, shown)) + 2
    lines = [f"  {name:{width}}{summary}" for name, summary in shown.items()]
    intro = ["Turn recorded trajectories into a controller.", "", "usage: tt COMMAND [flags]", ""]
    outro = ["", "tt COMMAND --help lists the flags of a command. --config FILE.yaml can set any of them."]
    return "\n".join([*intro, *lines, *outro])
