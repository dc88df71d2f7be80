"""What all commands share: the console, progress bars, and the rule that nothing is overwritten unasked."""

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from trajectory_transformer.cli.terminal import printable
from trajectory_transformer.files import LOCK, lock_folder
from trajectory_transformer.results import two_digits

LINE_SECONDS = 10.0  # between two lines of progress in a file
_CENTURY = 3_155_760_000  # seconds; the longest remaining time that is shown


class PlainConsole(Console):
    """Prints names from files as they are: without markup, emoji codes or control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string passes here, also the cells of tables."""
        return super().render_str(printable(text), **options)


console = PlainConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)


def claim(*paths: Path | None, overwrite: bool = False) -> None:
    """Refuse paths that exist or cannot be written, before any work starts.

    With `overwrite`, a folder that exists is removed, unless another process works in it. A file stays until the new
    one replaces it.
    """
    given = [path for path in paths if path is not None]
    for path in given:
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists already; choose another path, or replace it with --overwrite true")
        _check_writable(path)
    twice = next((path for index, path in enumerate(given) if path in given[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice} would be written twice; choose different paths")
    for path in given:
        if path.is_dir():
            with lock_folder(path) if (path / LOCK).is_file() else nullcontext():  # refuses one that is in use
                shutil.rmtree(path)


def _check_writable(path: Path) -> None:
    """Refuse a path where no file can be created, for example below a file or in a read-only folder."""
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {folder}: {error.strerror}") from error


class ProgressLines(Progress):
    """Progress for output that is not a terminal: a line now and then, and one at the end."""

    def start(self) -> None:
        """Draw nothing; remember when the first line is due."""
        self._due = time.monotonic() + LINE_SECONDS

    def stop(self) -> None:
        """Print the end of all tasks."""
        for task in self.tasks:
            if not self.disable and task.completed:
                self._print(task)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and print it if a line is due."""
        super().update(task_id, **changes)
        self._print_if_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task, and print it if a line is due."""
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def refresh(self) -> None:
        """Draw nothing."""

    def _print_if_due(self, task_id: TaskID) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            self._print(self._tasks[task_id])

    def _print(self, task: Task) -> None:
        shown = [str(value) for value in task.fields.values() if value]
        elapsed = timedelta(seconds=int(task.elapsed or 0))
        parts = [f"{task.description} {task.completed:g}/{task.total or 0:g}", *shown, str(elapsed)]
        if not task.finished and task.time_remaining is not None:
            parts.append(f"{timedelta(seconds=min(int(task.time_remaining), _CENTURY))} left")
        console.print(", ".join(parts), markup=False)


def progress_bar(*fields: str) -> Progress:
    """A progress bar with count, elapsed and remaining time; `fields` are shown as they are updated.

    Where the output goes to a file, it is lines instead of a bar.
    """
    if not (console.is_terminal or console.is_jupyter):
        return ProgressLines(console=console)
    columns = [TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in fields]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def metrics_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Means with standard errors, intervals and counts, one row each."""
    table = Table("metric", "mean", "std. error", "95 % interval", "n", title=title, title_justify="left")
    for name, value in metrics.items():
        if name.endswith(("_stderr", "_n", "_low", "_high")):
            continue
        count = metrics.get(f"{name}_n")
        interval = f"{metrics[f'{name}_low']:.4g} to {metrics[f'{name}_high']:.4g}" if f"{name}_low" in metrics else ""
        table.add_row(
            name,
            f"{value:.4g}",
            two_digits(metrics.get(f"{name}_stderr")),
            interval,
            "" if count is None else f"{count:.0f}",
        )
    return table
