"""The locomotion table and its bar chart: our scores beside the data, the baselines and the paper's numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TASKS = tuple(
    f"{env}-{kind}"
    for env in ("halfcheetah", "hopper", "walker2d")
    for kind in ("medium-expert", "medium", "medium-replay")
)
OURS = {"TT uniform": "uniform", "TT quantile": "quantile"}
BASELINES = {
    "BC": "bc",
    "TD3+BC": "td3bc",
    "IQL": "iql",
    "CQL": "cql",
    "BRAC": "brac",
    "DT": "dt",
    "MBOP": "mbop",
}
_COLORS = {
    "data": "lightgray",
    "best policy": "darkgray",
    "best policy, no noise": "gray",
    "TT uniform": "tab:cyan",
    "TT quantile": "tab:blue",
}
# Of the paper's table 1, for the D4RL datasets (v2), which are other data than ours.
PAPER = {
    "uniform": dict(zip(TASKS, (40.8, 44.0, 44.1, 106.0, 67.4, 99.4, 91.0, 81.3, 79.4), strict=True)),
    "quantile": dict(zip(TASKS, (95.0, 46.9, 41.9, 110.0, 61.1, 91.5, 101.9, 79.0, 82.6), strict=True)),
}


@dataclass(frozen=True)
class Score:
    """A mean with its standard errors over training seeds and over all episodes; references have none."""

    mean: float
    stderr: float | None = None
    stderr_episodes: float | None = None

    def __str__(self) -> str:
        """As the tables show it."""
        seeds = "" if self.stderr is None else f" ± {self.stderr:.1f}"
        episodes = "" if self.stderr_episodes is None else f" ({self.stderr_episodes:.1f})"
        return f"{self.mean:.1f}{seeds}{episodes}"


def method_scores(results: str | Path) -> dict[str, dict[str, Score]]:
    """Scores by method and task, from `locomotion` and `baselines` in a folder of results; others are left out."""
    folder = Path(results)
    found: dict[str, dict[str, Score]] = {}
    for label, suffix in {**OURS, **BASELINES}.items():
        group = "locomotion" if label in OURS else "baselines"
        scores = {}
        for task in TASKS:
            metrics = _metrics(folder / group / f"{task}_{suffix}.json")
            if metrics is not None:
                scores[task] = Score(
                    metrics["normalized_score"],
                    metrics.get("normalized_score_stderr"),
                    metrics.get("normalized_score_stderr_episodes"),
                )
        if scores:
            found[label] = scores
    return found


def reference_scores(results: str | Path) -> dict[str, dict[str, Score]]:
    """What scores are compared with, by name and task: the data, and the best policy in it."""
    names = {
        "data": "data_score",
        "best policy": "best_policy_noisy_score",
        "best policy, no noise": "best_policy_noiseless_score",
    }
    found: dict[str, dict[str, Score]] = {label: {} for label in names}
    for task in TASKS:
        for suffix in OURS.values():
            metrics = _metrics(Path(results) / "locomotion" / f"{task}_{suffix}.json")
            for label, name in names.items():
                if metrics is not None:
                    found[label][task] = Score(metrics[name])
    return {label: scores for label, scores in found.items() if scores}


def average(scores: Mapping[str, Score]) -> Score | None:
    """Mean over all nine tasks; None if some are missing. Errors of independent trainings add up in squares.

    It has an error only if all tasks have one.
    """
    if set(scores) != set(TASKS):
        return None

    def combined(errors: Sequence[float | None]) -> float | None:
        known = [error for error in errors if error is not None]
        return sum(error**2 for error in known) ** 0.5 / len(TASKS) if len(known) == len(TASKS) else None

    return Score(
        sum(score.mean for score in scores.values()) / len(TASKS),
        combined([score.stderr for score in scores.values()]),
        combined([score.stderr_episodes for score in scores.values()]),
    )


def locomotion_table(results: str | Path) -> str:
    """One row per task: references, ours, the baselines, and the paper's numbers for its own data."""
    paper = {f"paper, {suffix}": {task: Score(value) for task, value in PAPER[suffix].items()} for suffix in PAPER}
    methods = method_scores(results)
    if not methods:
        return f"No results in {Path(results).name}/locomotion or {Path(results).name}/baselines yet."
    columns = {**reference_scores(results), **methods, **paper}
    rows = [["task", *columns], ["---", *["--:"] * len(columns)]]
    for task in TASKS:
        if any(task in scores for scores in methods.values()):
            rows.append([task, *(str(scores.get(task, "-")) for scores in columns.values())])
    rows.append(["average", *(str(average(scores) or "-") for scores in columns.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def locomotion_figure(results: str | Path) -> Figure:
    """Bars with standard errors: our scores by task beside data and best policy; below, all averages."""
    references, methods = reference_scores(results), method_scores(results)
    by_task = {**references, **{label: scores for label, scores in methods.items() if label in OURS}}
    averages = {label: average(scores) for label, scores in {**references, **methods}.items()}
    complete = {label: mean for label, mean in averages.items() if mean is not None}
    if not set(complete) & set(methods):
        raise ValueError(f"{results}: no method has results for all nine tasks")
    figure = Figure(figsize=(9.0, 6.4), layout="constrained")
    above, below = figure.subplots(2)
    width = 0.8 / len(by_task)
    for index, (label, scores) in enumerate(by_task.items()):
        at = [TASKS.index(task) + (index - (len(by_task) - 1) / 2) * width for task in scores]
        _bars(above, at, list(scores.values()), width, [_COLORS[label]] * len(at), label)
    above.set_xticks(range(len(TASKS)), [task.replace("-", "\n") for task in TASKS], fontsize="small")
    above.legend(frameon=False, ncols=len(by_task), loc="lower left", bbox_to_anchor=(0.0, 1.0))
    above.set_ylabel("normalised score")
    shown = sorted(complete, key=lambda label: complete[label].mean)
    colors = [_COLORS.get(label, "tab:orange") for label in shown]
    _bars(below, range(len(shown)), [complete[label] for label in shown], 0.7, colors)
    below.bar_label(below.containers[-1], fmt="%.0f", padding=3)
    below.set_xticks(range(len(shown)), [name.replace(", ", ",\n") for name in shown], fontsize="small")
    below.set_ylabel("average of nine tasks")
    return figure


def _bars(
    axes: Axes, at: Sequence[float], scores: Sequence[Score], width: float, colors: Sequence[str], label: str = ""
) -> None:
    """Draw bars, with standard errors where they are known."""
    errors = [np.nan if score.stderr is None else score.stderr for score in scores]
    axes.bar(at, [score.mean for score in scores], width, yerr=errors, color=colors, capsize=2, label=label)
    axes.spines[["top", "right"]].set_visible(False)


def _metrics(path: Path) -> dict[str, float] | None:
    """Metrics of a result file; None if there is no such file."""
    if not path.is_file():
        return None
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return metrics
