"""A self-contained HTML report of a run: metrics, settings and images."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trajectory_transformer.config import dotted
from trajectory_transformer.files import write_atomically

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #ddd; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1.5rem 0; } img { max-width: 100%; }
code { background: #f2f2f2; padding: .1rem .3rem; overflow-wrap: anywhere; } figcaption { color: #555; }
"""

CAPTIONS = {
    "routes.png": "Routes of the planner to held-out goals, coloured from start (dark) to end (bright).",
    "demonstrations.png": "Some of the training demonstrations: an agent that reaches random goals.",
    "loss.png": "Training loss: cross-entropy of the tokens.",
}


def write_report(run: str | Path, *, place: str, pictures: Sequence[str]) -> Path:
    """Write `report.html` from the result file, the checkpoint description and the images of a run folder."""
    run = Path(run)
    result = json.loads((run / "evaluation.json").read_text())
    description = json.loads((run / "checkpoint.json").read_text())
    metrics = result["metrics"]
    goals = metrics["success_rate_n"]
    summary = f"{metrics['success_rate'] * goals:.0f} of {goals:.0f} goals reached"
    if "path_ratio" in metrics:
        summary += f", with paths {metrics['path_ratio']:.2f} times as long as the shortest path"
    settings = {
        "tokens": description["tokens"],
        "model": description["model"],
        "search": result["settings"]["search"],
        "data": description["metadata"],
    }
    body = [
        f"<h1>Goals reached {html.escape(place)}</h1>",
        f"<p><strong>{html.escape(summary)}.</strong></p>",
        "<p>A GPT was trained on tokens of demonstrations: the final state of an episode first, then states and "
        "actions in turn. To act, the planner puts the goal first and finds the most likely continuation by beam "
        "search. It takes the first action of that plan and then plans again. No rewards were used.</p>",
        *(_picture(run / name) for name in pictures),
        "<h2>Metrics</h2>",
        _metrics(metrics),
        f"<p>Measured by <code>{html.escape(result['command'])}</code> in {result['seconds']:.0f} s on "
        f"{html.escape(result['device'])}, commit <code>{html.escape(result['commit'][:12])}</code>.</p>",
        "<h2>Settings</h2>",
        *(f"<h3>{name}</h3>{_settings(values)}" for name, values in settings.items()),
    ]
    page = "<!doctype html><html lang='en'><meta charset='utf-8'>"
    page += f"<meta name='viewport' content='width=device-width'><title>{html.escape(summary)}</title>"
    page += f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    path = run / "report.html"
    write_atomically(path, page.encode())
    return path


def _picture(path: Path) -> str:
    """An image embedded in the page, so that the page is a single file."""
    data = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(CAPTIONS.get(path.name, path.stem))
    return (
        f"<figure><img alt='{caption}' src='data:image/png;base64,{data}'><figcaption>{caption}</figcaption></figure>"
    )


def _metrics(metrics: Mapping[str, float]) -> str:
    rows = ["<tr><th>metric</th>"]
    rows[0] += "".join(f"<th class='number'>{name}</th>" for name in ("mean", "standard error", "n")) + "</tr>"
    for name, value in metrics.items():
        if name.endswith(("_stderr", "_n", "_low", "_high")):
            continue
        cells = [value, metrics.get(f"{name}_stderr"), metrics.get(f"{name}_n")]
        numbers = "".join(f"<td class='number'>{'' if cell is None else format(cell, '.4g')}</td>" for cell in cells)
        rows.append(f"<tr><td>{html.escape(name)}</td>{numbers}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _settings(values: Mapping[str, object]) -> str:
    """Settings as the command line has them: dotted names, null for None."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in dotted(values).items()}
    rows = [f"<tr><td>{html.escape(key)}</td><td>{html.escape(text)}</td></tr>" for key, text in texts.items()]
    return f"<table>{''.join(rows)}</table>"
