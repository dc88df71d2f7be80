"""Scores of the baselines over their training, one picture for all tasks."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trajectory_transformer.files import read_json
from trajectory_transformer.report.locomotion import BASELINES, TASKS, method_scores

Curve = list[tuple[int, list[float]]]
"""Steps of training, and the score of each training seed then."""


def curves(results: str | Path) -> dict[str, dict[str, Curve]]:
    """Curves by task and method, from `baselines` in a folder of results; tasks without any are left out."""
    found: dict[str, dict[str, Curve]] = {}
    for task in TASKS:
        for label, suffix in BASELINES.items():
            path = Path(results) / "baselines" / f"{task}_{suffix}.json"
            points = read_json(path).get("curve", []) if path.is_file() else []
            if points:
                found.setdefault(task, {})[label] = [(point["step"], point["scores"]) for point in points]
    return found


def curves_figure(results: str | Path) -> Figure:
    """One panel per task: mean scores with standard errors over the share of training; ours as a dashed line."""
    found = curves(results)
    if not found:
        raise ValueError(f"{results}: no curves of baselines")
    ours = method_scores(results).get("TT quantile", {})
    rows = -(-len(found) // 3)
    figure = Figure(figsize=(9.0, 0.8 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, sharex=True, squeeze=False).ravel()
    for panel, (task, lines) in zip(panels, found.items(), strict=False):
        for index, label in enumerate(BASELINES):
            if label in lines:
                _draw(panel, lines[label], f"C{index}", label)
        if task in ours:
            panel.axhline(ours[task].mean, color="black", linestyle="--", linewidth=1.0, label="TT quantile")
        panel.set_title(task, fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(bottom=0.0)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    drawn = {str(line.get_label()): line for panel in panels for line in panel.lines}
    handles = {label: drawn[label] for label in (*BASELINES, "TT quantile") if label in drawn}
    figure.legend(handles.values(), handles, frameon=False, ncols=len(handles), loc="outside upper center")
    figure.supxlabel("percent of the training steps", fontsize="medium")
    figure.supylabel("normalised score", fontsize="medium")
    return figure


def _draw(axes: Axes, curve: Curve, color: str, label: str) -> None:
    """One method: a line, and a band of one standard error over training seeds."""
    steps = np.array([step for step, _ in curve])
    scores = np.array([each for _, each in curve])  # [points, seeds]
    share, mean = 100.0 * steps / steps[-1], scores.mean(axis=1)
    axes.plot(share, mean, color=color, linewidth=1.3, label=label)
    if scores.shape[1] > 1:
        error = scores.std(axis=1, ddof=1) / scores.shape[1] ** 0.5
        axes.fill_between(share, mean - error, mean + error, color=color, alpha=0.12, linewidth=0)
