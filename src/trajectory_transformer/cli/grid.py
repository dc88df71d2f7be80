"""`tt grid`: run the same commands for every combination of values, on this machine or on a Ray cluster."""

import csv
import io
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.live import Live
from rich.table import Table
from rich.text import Text

from trajectory_transformer.cli.console import console
from trajectory_transformer.config import require
from trajectory_transformer.files import write_atomically
from trajectory_transformer.grid import (
    Cluster,
    Grid,
    LocalProcesses,
    RayCluster,
    State,
    last_line,
    load_grid,
    run_grid,
    runs_of,
)

_SHOWN_RUNS = 20
_STYLES: dict[State, str] = {"finished": "green", "failed": "red", "waiting": "dim"}


@dataclass(frozen=True, kw_only=True)
class RunGrid:
    """Run the same commands for every combination of values, on this machine or on a Ray cluster."""

    positional: ClassVar[dict[str, str]] = {"grid": "YAML file of the grid."}
    required: ClassVar[tuple[str, ...]] = ("grid",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt grid grid.yaml --out runs/grid",
        "tt grid grid.yaml --out /shared/grid --address ray://head:10001",
    )

    grid: Path | None = None
    """YAML file: axes (name: list of values), commands (of `tt`, with {axis} and {out} filled in), results (files to
    gather), and what one run needs: cpus, gpus, retries."""
    out: Path = Path("runs/grid")
    """Folder with a folder for each run. What is finished there is not repeated."""
    address: str | None = None
    """Address of a Ray cluster, or local to start one; null: processes of this machine."""
    parallel: int | None = None
    """Runs at a time on this machine; null: as many as fit."""

    def execute(self) -> None:
        """Run everything, show the progress, and write a table of the results."""
        import torch

        assert self.grid is not None, "required"
        require(self.parallel is None or self.parallel >= 1, "--parallel must be at least 1", self.parallel)
        require(
            self.parallel is None or self.address is None,
            "--parallel is for this machine: a cluster has room for what its machines offer",
            self.parallel,
        )
        grid = load_grid(self.grid)
        cluster: Cluster
        if self.address is None:
            cluster = LocalProcesses(grid, torch.cuda.device_count(), self.parallel)
        else:
            cluster = RayCluster(grid, self.address)
        total = len(runs_of(grid))
        console.print(f"{total} runs of {len(grid.commands)} commands in {self.out}")
        shown = Live(console=console, refresh_per_second=1) if console.is_terminal else nullcontext()
        try:
            with shown as live:
                printed: dict[str, State] = {}

                def show(states: dict[str, State]) -> None:
                    if live is not None:
                        live.update(progress_table(self.out, states))
                        return
                    for name, state in states.items():
                        if state != "waiting" and printed.get(name) != state:
                            done = sum(each != "waiting" for each in states.values())
                            console.print(f"{done} of {total}: {name} {state}")
                    printed.update(states)

                errors = run_grid(grid, self.out, cluster, on_change=show)
        finally:
            cluster.close()
        rows = result_rows(grid, self.out)
        if rows:
            write_atomically(self.out / "table.csv", as_csv(rows))
            console.print(f"wrote {self.out / 'table.csv'}")
        for name, error in errors.items():
            console.print(f"{name}: {error}")
        if errors:
            raise ValueError(
                f"{len(errors)} of {total} runs failed: {', '.join(errors)}; run the same command to retry"
            )


def progress_table(out: Path, states: dict[str, State]) -> Table:
    """How many runs are in which state, and the last line of those at work."""
    counts = Counter(states.values())
    title = ", ".join(f"{counts[state]} {state}" for state in _STYLES if counts[state])
    table = Table("run", "state", "last line", title=title, title_justify="left")
    lines = {name: last_line(out / name) for name, state in states.items() if state == "waiting"}
    working = [name for name, line in lines.items() if line]
    ended = [name for name, state in states.items() if state != "waiting"]
    for name in [*working, *ended[::-1]][:_SHOWN_RUNS]:
        at_work = name in working
        state = Text("working", "bold") if at_work else Text(states[name], _STYLES[states[name]])
        table.add_row(name, state, lines.get(name, "")[:80])
    return table


def result_rows(grid: Grid, out: Path) -> list[dict[str, object]]:
    """Values and metrics of every run that has result files with metrics."""
    rows: list[dict[str, object]] = []
    for run in runs_of(grid):
        metrics: dict[str, object] = {}
        for pattern in grid.results:
            for path in sorted((out / run.name).glob(pattern)):
                try:
                    found = json.loads(path.read_text(encoding="utf-8"))["metrics"]
                    metrics |= {f"{path.stem}.{name}": value for name, value in found.items()}
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # not a result file
        if metrics:
            rows.append({**run.values, **metrics})
    return rows


def as_csv(rows: list[dict[str, object]]) -> bytes:
    """A table whose columns are all names that occur."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
