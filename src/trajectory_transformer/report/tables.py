"""Tables of measured numbers, written from result files into documents, never typed."""

import json
from pathlib import Path

from trajectory_transformer.checkpoint import write_aside

BEGIN, END = "<!-- results -->", "<!-- /results -->"

# Which metrics of a result are shown, in this order, and how.
SHOWN = {
    "success_rate": "goals reached",
    "path_ratio": "path / shortest path",
    "normalized_score": "normalised score",
    "return": "return",
    "cached_speedup": "cached / naive speed",
    "cached_speedup_sliding": "the same, window slides",
    "cost_per_step_20_over_5": "cost per step, horizon 20 / 5",
    "cost_per_step_20_over_5_sliding": "the same, window slides always",
    "cost_per_step_20_over_5_default": "the same, at 20 only",
    "tokens_per_second": "training tokens/s",
    "overhead_share": "share outside the model",
    "peak_mib": "peak memory (MiB)",
    "core_share": "cores used",
}


def results_table(folder: Path) -> str:
    """One row for every result file below a folder: what was measured, how it came out, the command behind it."""
    rows = ["| what | measured | device | command |", "|---|---|---|---|"]
    for path in sorted(folder.rglob("*.json")):
        result = json.loads(path.read_text())
        metrics = result["metrics"]
        shown = ", ".join(f"{text} {_number(metrics, name)}" for name, text in SHOWN.items() if name in metrics)
        name = path.relative_to(folder).with_suffix("").as_posix()
        link = f"[{name}]({folder.name}/{path.relative_to(folder).as_posix()})"
        rows.append(f"| {link} | {shown} | {result['device']} | `{result['command']}` |")
    return "\n".join(rows)


def write_tables(folder: Path, document: Path) -> None:
    """Put the table of a results folder between the marks of a document."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document}: a document needs the marks {BEGIN} and {END} around its table, found none")
    write_aside(document, f"{before}{BEGIN}\n{results_table(folder)}\n{END}{after}".encode())


def _number(metrics: dict[str, float], name: str) -> str:
    """A value with its standard error where it has one."""
    value, spread = metrics[name], metrics.get(f"{name}_stderr")
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if not spread else f"{text} ± {spread:.2g}"
