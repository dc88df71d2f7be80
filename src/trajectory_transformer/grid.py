"""Grids of runs, such as tasks x methods x seeds: the same commands for every combination.

A run is a list of `tt` commands in a folder of its own. Local processes or a Ray cluster run them; both give futures.
A command that was interrupted continues, finished ones are not repeated.
"""

import itertools
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import yaml

from trajectory_transformer.config import require
from trajectory_transformer.files import write_atomically

Value = str | int | float | bool
Files = dict[str, bytes]
"""Result files of a run by their paths in its folder."""

RESUMED = ("train", "baseline")  # commands that continue an interrupted run with --resume
LOG, STATE = "log.txt", "grid.json"
_RUNNING: set["subprocess.Popen[bytes]"] = set()  # commands of this process


@dataclass(frozen=True)
class Grid:
    """What runs, and what each run needs."""

    axes: dict[str, list[Value]]
    commands: tuple[str, ...]  # of `tt`, with {axis} and {out} to fill in
    results: tuple[str, ...] = ()  # files of a run folder to gather; patterns such as *.json
    cpus: int = 1  # of one run; also its number of threads
    gpus: float = 0.0  # of one run; 0.5 lets two share a GPU
    retries: int = 2  # after a process was killed or its machine was lost


@dataclass(frozen=True)
class Run:
    """One combination of values."""

    name: str
    values: dict[str, Value]
    commands: tuple[tuple[str, ...], ...]  # words after `tt`, with {out} to fill in
    results: tuple[str, ...]
    cpus: int
    retries: int


class RunError(Exception):
    """A command of a run ended with an error."""


def load_grid(path: str | Path) -> Grid:
    """Read the YAML file of a grid."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    require(isinstance(content, dict), f"{path} must be a mapping with axes and commands", content)
    known = ("axes", "commands", "results", "cpus", "gpus", "retries")
    unknown = next((name for name in content if name not in known), None)
    require(unknown is None, f"{path}: entries are {', '.join(known)}", unknown)
    axes, commands, results = content.get("axes"), content.get("commands"), content.get("results", [])
    require(_is_axes(axes), f"{path}: axes must be a mapping of names to lists of different values", axes)
    require(_is_words(commands) and bool(commands), f"{path}: commands must be a list of `tt` commands", commands)
    require(_is_words(results), f"{path}: results must be a list of file names", results)
    outside = next((each for each in results if Path(each).is_absolute() or ".." in Path(each).parts), None)
    require(outside is None, f"{path}: results lie in the folder of a run", outside)
    numbers = {name: content[name] for name in ("cpus", "gpus", "retries") if name in content}
    for name, value in numbers.items():
        fits = isinstance(value, int | (float if name == "gpus" else int)) and not isinstance(value, bool)
        least = 1 if name == "cpus" else 0
        kind = "a number" if name == "gpus" else "an integer"
        require(fits and value >= least, f"{path}: {name} must be {kind} of at least {least}", value)
    grid = Grid({name: list(values) for name, values in axes.items()}, tuple(commands), tuple(results), **numbers)
    runs_of(grid)  # refuses placeholders that no axis fills
    return grid


def _is_axes(axes: object) -> bool:
    if not isinstance(axes, dict) or not axes or not all(isinstance(name, str) and name != "out" for name in axes):
        return False
    return all(
        isinstance(values, list)
        and values
        and all(isinstance(value, str | int | float | bool) for value in values)
        and len({_slug(value) for value in values}) == len(values)
        for values in axes.values()
    )


def _is_words(words: object) -> bool:
    return isinstance(words, list) and all(isinstance(word, str) and word.strip() for word in words)


def _slug(value: Value) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip(".-") or "_"


def runs_of(grid: Grid) -> list[Run]:
    """One run for every combination of values, the first axis slowest."""
    runs = []
    for combination in itertools.product(*grid.axes.values()):
        values = dict(zip(grid.axes, combination, strict=True))
        commands = tuple(_filled(command, values) for command in grid.commands)
        name = "_".join(map(_slug, combination))
        runs.append(Run(name, values, commands, grid.results, grid.cpus, grid.retries))
    return runs


def _filled(command: str, values: Mapping[str, Value]) -> tuple[str, ...]:
    """The words of a command, its placeholders filled in; {out} stays."""
    words = shlex.split(command)
    words = words[1:] if words[:1] == ["tt"] else words
    require(bool(words), "a command of a grid must name a command of tt", command)
    try:
        return tuple(word.format(**{**values, "out": "{out}"}) for word in words)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in (*values, "out"))
        raise ValueError(f"cannot fill in {command!r}: placeholders are {names}; write {{{{ for a brace") from error


def execute_run(run: Run, folder: str | Path, environment: Mapping[str, str] | None = None) -> Files:
    """Run the commands that are not finished, one after the other, and return the result files.

    What the commands print goes to log.txt. A process that is killed is started again, at most `retries` times.
    `environment` has variables that are set for the commands.
    """
    # The number of threads can change the last bits of a result.
    variables = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": str(run.cpus)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    commands = [[word.replace("{out}", str(folder)) for word in command] for command in run.commands]
    for number in range(_finished(folder, run), len(commands)):
        for attempt in itertools.count():
            code = _start(commands[number], folder, variables)
            if code == 0:
                break
            if code > 0 or attempt >= run.retries:
                ended = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
                shown = shlex.join(["tt", *commands[number]])
                raise RunError(f"{shown} {ended}; {folder / LOG} ends with:\n{_tail(folder / LOG)}")
        _write_state(folder, run, number + 1)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in (STATE, *run.results)
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def _start(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> int:
    """Run one command to its end; returns its exit code, negative if a signal ended it."""
    words = [sys.executable, "-c", _FOLLOW_PARENT, sys.executable, "-m", "trajectory_transformer", *resumed(command)]
    with (folder / LOG).open("ab") as log:
        log.write(f"$ {shlex.join(['tt', *words[6:]])}\n".encode())
        log.flush()
        with subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=dict(variables)) as process:
            _RUNNING.add(process)
            try:
                return process.wait()
            finally:
                _RUNNING.discard(process)


# A run must not go on where nobody waits for it: another machine may have started it again.
_FOLLOW_PARENT = (
    "import ctypes, os, sys\n"
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def resumed(command: Sequence[str]) -> list[str]:
    """The command that continues an interrupted one, or the same command."""
    words = list(command)
    if words[0] not in RESUMED or "--out" not in words:
        return words
    out = words[words.index("--out") + 1]
    if not (Path(out) / "run.json").exists():
        return words
    first_flag = next(index for index, word in enumerate(words) if word.startswith("--"))
    device = words[words.index("--device") :][:2] if "--device" in words else []
    return [*words[:first_flag], "--resume", out, *device]


def _finished(folder: Path, run: Run) -> int:
    """Number of commands that an earlier call has finished."""
    path = folder / STATE
    if not path.exists():
        return 0
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        same, finished = state["commands"] == [list(command) for command in run.commands], int(state["finished"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: delete the folder to repeat the run") from error
    require(same, f"{folder} was made by other commands: choose another --out", run.name)
    return finished


def _write_state(folder: Path, run: Run, finished: int) -> None:
    state = {"values": run.values, "commands": [list(command) for command in run.commands], "finished": finished}
    write_atomically(folder / STATE, (json.dumps(state, indent=2) + "\n").encode())


def is_complete(run: Run, folder: Path) -> bool:
    """Whether all commands of a run are finished."""
    return _finished(folder, run) == len(run.commands)


def last_line(folder: Path) -> str:
    """What a run printed last; empty on a machine that does not share its folder."""
    lines = _tail(folder / LOG, 1)
    return lines.replace("\r", "\n").splitlines()[-1].strip() if lines.strip() else ""


def _tail(path: Path, lines: int = 15) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 10_000, 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


class Cluster(Protocol):
    """Starts runs somewhere."""

    def submit(self, run: Run, folder: Path) -> "Future[Files]":
        """Start a run as soon as there is room for it."""

    def close(self) -> None:
        """Stop what runs, and start nothing more."""


class LocalProcesses:
    """As many runs at a time as fit this machine, or as given."""

    def __init__(self, grid: Grid, num_gpus: int, parallel: int | None = None) -> None:
        """Give every run its share of the CPU cores and of a GPU."""
        room = int(num_gpus / grid.gpus) if grid.gpus else max((os.cpu_count() or 1) // grid.cpus, 1)
        require(
            room > 0, "gpus must not exceed the number of GPUs of this machine, which has " + str(num_gpus), grid.gpus
        )
        self.parallel = parallel or room
        self._pool = ThreadPoolExecutor(self.parallel)
        self._places: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for number in range(self.parallel):
            several = grid.gpus and num_gpus > 1
            self._places.put({"CUDA_VISIBLE_DEVICES": str(number % num_gpus)} if several else {})

    def submit(self, run: Run, folder: Path) -> "Future[Files]":
        """Start a run as soon as there is room for it."""
        return self._pool.submit(self._execute, run, folder)

    def _execute(self, run: Run, folder: Path) -> Files:
        place = self._places.get()
        try:
            return execute_run(run, folder, place)
        finally:
            self._places.put(place)

    def close(self) -> None:
        """Stop what runs, and start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_RUNNING):
            process.send_signal(signal.SIGINT)  # training writes a checkpoint


class RayCluster:
    """The machines of a Ray cluster. The package must be installed on all of them."""

    def __init__(self, grid: Grid, address: str) -> None:
        """Connect to a cluster; `local` starts one on this machine."""
        try:
            import ray
        except ImportError as error:
            raise ImportError("--address needs Ray: pip install 'trajectory-transformer[ray]'") from error
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from error
        self._close = ray.shutdown
        # `max_retries` is about machines that are lost. A command that fails would fail again.
        self._execute = ray.remote(num_cpus=grid.cpus, num_gpus=grid.gpus, max_retries=grid.retries)(execute_run)

    def submit(self, run: Run, folder: Path) -> "Future[Files]":
        """Start a run as soon as there is room for it."""
        future: Future[Files] = self._execute.remote(run, str(folder.absolute())).future()
        return future

    def close(self) -> None:
        """Stop what runs, and start nothing more."""
        self._close()


State = Literal["waiting", "finished", "failed"]


def run_grid(
    grid: Grid, out: str | Path, cluster: Cluster, *, on_change: Callable[[dict[str, State]], None] | None = None
) -> dict[str, str]:
    """Run all runs of a grid that are not finished, each in a folder of its own in `out`; returns errors by run.

    An error does not stop the other runs. `on_change` is called every second with the state of every run. Result files
    of other machines are written to the folder.
    """
    out, runs = Path(out), runs_of(grid)
    states: dict[str, State] = {run.name: "finished" if is_complete(run, out / run.name) else "waiting" for run in runs}
    pending = {cluster.submit(run, out / run.name): run for run in runs if states[run.name] == "waiting"}
    errors: dict[str, str] = {}
    while pending:
        if on_change is not None:
            on_change(states)
        done, _ = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            run = pending.pop(future)
            try:
                files = future.result()
            except Exception as error:  # Ray has exceptions of its own
                states[run.name], errors[run.name] = "failed", str(error.__cause__ or error)
                continue
            for name, content in files.items():
                path = out / run.name / name
                if not path.exists() or path.read_bytes() != content:
                    write_atomically(path, content)
            states[run.name] = "finished"
    if on_change is not None:
        on_change(states)
    return errors
