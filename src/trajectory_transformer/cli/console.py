"""What every command shares: the screen, the device, and the rule that nothing is overwritten unasked."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trajectory_transformer.results import two_digits

console = Console(highlight=False, soft_wrap=True)


def device_of(name: str) -> torch.device:
    """A device by name; `auto` takes the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} was asked for, but torch finds no GPU here; use --device cpu")
    return device


def claim(path: Path, *, overwrite: bool = False) -> None:
    """Refuse to write where something is already; with `overwrite`, clear it away."""
    if not path.exists():
        return
    if not overwrite:
        raise ValueError(f"{path} exists already; choose another place with --out or remove it")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def progress_bar(*fields: str) -> Progress:
    """A bar with count, time spent and time left; `fields` are shown as they are updated."""
    columns = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
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
    """Means with standard errors and counts, one row each."""
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
