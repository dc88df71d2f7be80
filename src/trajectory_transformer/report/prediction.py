"""Figures of prediction studies, from the curves in their result files."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trajectory_transformer.analysis.summary import Curve
from trajectory_transformer.report.plots import plain_label

LABELS = {"tt": "Trajectory Transformer", "markov": "Markovian variant", "pets": "PETS"}
COLORS = {"tt": "tab:blue", "markov": "tab:orange", "pets": "tab:red"}


@dataclass(frozen=True)
class Panel:
    """One study: curves by predictor, and the discrete oracle."""

    title: str
    curves: Mapping[str, Curve]
    oracle: float


def likelihood_figure(*panels: Panel) -> Figure:
    """Log-likelihood above and squared error below against the step, studies side by side; bands: standard errors."""
    figure = Figure(figsize=(4.6 * len(panels) + 0.6, 5.6), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    for column, panel in enumerate(panels):
        upper, lower = axes[0, column], axes[1, column]
        for number, (name, curve) in enumerate(panel.curves.items()):
            color = COLORS.get(name, f"C{number + 4}")
            _draw(upper, curve, "log_prob", name, color)
            _draw(lower, curve, "squared_error", name, color)
        upper.axhline(panel.oracle, color="gray", linestyle="--", label="discrete oracle")
        upper.set_title(panel.title)
        lower.set(xlabel="prediction step", yscale="log")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        for each in (upper, lower):
            each.grid(alpha=0.3)
            each.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("log-likelihood (nats)")
    axes[1, 0].set_ylabel("squared error of the mean\n(variances of the data)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _draw(panel: Axes, curve: Curve, kind: str, name: str, color: str) -> None:
    mean, stderr = (
        np.array([np.nan if value is None else value for value in curve[key]]) for key in (kind, f"{kind}_stderr")
    )
    steps = np.arange(1, len(mean) + 1)
    panel.plot(steps, mean, color=color, label=plain_label(LABELS.get(name, name)))
    panel.fill_between(steps, mean - stderr, mean + stderr, color=color, alpha=0.2, linewidth=0)
