"""Figures of a report page: losses and returns of one or two runs, calibration of forecasts."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from trajectory_transformer.analysis.forecast import LEVELS, Calibration
from trajectory_transformer.report.run import RunRecord

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
_LINES = ("-", "--")


def losses_figure(runs: Sequence[RunRecord], held_out: Sequence[Mapping[str, float]] = ()) -> Figure:
    """Training loss by kind of token; runs differ by line style.

    Dots are validation losses, a ring is around those of the best checkpoint. `held_out` are losses on other data, as
    crosses.
    """
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    panel = figure.subplots()
    kinds = list(dict.fromkeys(kind for run in runs for record in run.losses for kind in record.losses))
    for number, (run, line) in enumerate(zip(runs, _LINES, strict=False)):
        for color, kind in zip(COLORS * (1 + len(kinds) // len(COLORS)), kinds, strict=False):
            points = [(record.step, record.losses[kind]) for record in run.losses if kind in record.losses]
            if not points:
                continue
            label = kind if len(runs) == 1 else f"{plain(run.name)}: {kind}"
            panel.plot(*zip(*points, strict=True), line, color=color, label=label, linewidth=1.4)
            dots = [(record.step, record.validation[kind]) for record in run.losses if kind in record.validation]
            if dots:
                panel.plot(*zip(*dots, strict=True), ".", color=color, markersize=4)
            if run.best is not None and kind in run.best.validation:
                place = run.best.step, run.best.validation[kind]
                panel.plot(*place, "o", color=color, markersize=8, fillstyle="none")
            if number < len(held_out) and kind in held_out[number]:
                panel.plot(points[-1][0], held_out[number][kind], "x", color=color, markersize=8, clip_on=False)
    panel.set(xlabel="training step", ylabel="cross-entropy (nats)")
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def returns_figure(runs: Sequence[RunRecord]) -> Figure | None:
    """Return of every evaluated episode, and the mean with its interval; None without returns that differ."""
    rows = [
        (f"{run.name}, {name}" if len(runs) > 1 else name, np.asarray(result["returns"], dtype=np.float64), result)
        for run in runs
        for name, result in run.evaluations.items()
        if result.get("returns")
    ]
    if not rows or all(np.ptp(values) == 0 for _, values, _ in rows):
        return None
    figure = Figure(figsize=(7.5, 0.9 + 0.55 * len(rows)), layout="constrained")
    panel = figure.subplots()
    rng = np.random.default_rng(0)
    for place, (_, values, result) in enumerate(rows):
        panel.plot(
            values, place + rng.uniform(-0.16, 0.16, len(values)), "o", markersize=4, alpha=0.4, color="tab:blue"
        )
        metrics = result["metrics"]
        low, high = metrics.get("return_low", values.mean()), metrics.get("return_high", values.mean())
        panel.plot([low, high], [place, place], color="black", linewidth=2.5, solid_capstyle="butt")
        panel.plot(values.mean(), place, "D", color="black", markersize=6)
    panel.set_yticks(range(len(rows)), [plain(label) for label, _, _ in rows])
    panel.set(ylim=(len(rows) - 0.5, -0.5), xlabel="return of an episode; mean and 95 % interval in black")
    panel.grid(axis="x", alpha=0.3)
    panel.spines[["top", "right", "left"]].set_visible(False)
    return figure


def calibration_figure(found: Calibration) -> Figure:
    """By steps ahead: share of the truth inside the bands, and the error of the median."""
    figure = Figure(figsize=(7.5, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    ahead = np.arange(1, len(found.error) + 1)
    for level, color in zip(LEVELS, ("tab:orange", "tab:blue"), strict=True):
        left.plot(ahead, found.inside[level], color=color, label=f"inside the {level:.0%} band".replace("%", " %"))
        left.axhline(level, color=color, linestyle=":", linewidth=1)
    left.set(ylim=(0, 1.02), xlabel="steps ahead", ylabel="share of the truth")
    left.legend(frameon=False, fontsize=8, loc="lower left")
    right.plot(ahead, found.error, color="tab:blue", label="median of the forecast")
    right.plot(ahead, found.unchanged, color="gray", linestyle="--", label="nothing changes")
    right.set(xlabel="steps ahead", ylabel="error (standard deviations)")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def plain(text: str) -> str:
    """Text that Matplotlib does not read as a formula."""
    return text.replace("$", r"\$")
