"""What all commands share: the console, progress bars, and the rule that nothing is overwritten unasked."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trajectory_transformer.cli.terminal import printable
from trajectory_transformer.results import two_digits


class PlainConsole(Console):
    """Prints names from files as they are: without markup, emoji codes or control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string passes here, also the cells of tables."""
        return super().render_str(printable(text), **options)


console = PlainConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)


def claim(*paths: Path | None, overwrite: bool = False) -> None:
    """Refuse paths that exist or cannot be written, before any work starts.

    With `overwrite`, a folder that exists is removed. A file stays until the new one replaces it.
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
            shutil.rmtree(path)


def _check_writable(path: Path) -> None:
    """Refuse a path where no file can be created, for example below a file or in a read-only folder."""
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {folder}: {error.strerror}") from error


def progress_bar(*fields: str) -> Progress:
    """A progress bar with count, elapsed and remaining time; `fields` are shown as they are updated."""
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
        spread, count = metrics.get(f"{name}_stderr"), metrics.get(f"{name}_n")
        interval = f"{metrics[f'{name}_low']:.4g} to {metrics[f'{name}_high']:.4g}" if f"{name}_low" in metrics else ""
        table.add_row(
            name,
            f"{value:.4g}",
            "" if spread is None else two_digits(spread),
            interval,
            "" if count is None else f"{count:.0f}",
        )
    return table
