"""Studies as numbers for result files: metrics at some steps, and whole curves with their errors over starts."""

from collections.abc import Mapping, Sequence

import numpy as np

from trajectory_transformer.analysis.study import Curves
from trajectory_transformer.data.episode import DoubleArray
from trajectory_transformer.results import mean_and_error

STEPS = (1, 10, 25, 50, 100)
"""Steps that have metrics of their own, besides the last one."""
Curve = dict[str, list[float | None]]
"""Values at every step by kind: `log_prob`, `log_prob_stderr`, `squared_error`, ...; null where nothing was visited."""


def study_metrics(studied: Mapping[str, Curves], *, suffix: str = "") -> dict[str, float]:
    """Means over starts with standard errors: `tt_logp_100`, `tt_logp_100_stderr`, `tt_mse_100`, ..."""
    metrics: dict[str, float] = {}
    for name, curves in studied.items():
        kinds = {"logp": curves.log_prob, "mse": curves.squared_error, "gaussian_logp": curves.gaussian}
        for kind, values in kinds.items():
            if values is not None:
                for step in metric_steps(values.shape[1]):
                    metrics |= _at_step(f"{name}_{kind}_{step}{suffix}", values[:, step - 1])
    return metrics


def metric_steps(horizon: int) -> list[int]:
    """Steps with metrics of their own."""
    return sorted({step for step in STEPS if step <= horizon} | {horizon})


def _at_step(name: str, values: DoubleArray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    return mean_and_error(name, known.tolist())


def curve_of(curves: Curves) -> Curve:
    """Means over starts at every step, and their standard errors."""
    kinds = {
        "log_prob": curves.log_prob,
        "squared_error": curves.squared_error,
        "zeros": curves.zeros,
        "ended": curves.ended,
    }
    if curves.gaussian is not None:
        kinds["gaussian_log_prob"] = curves.gaussian
    return mean_curve(kinds)


def mean_curve(kinds: Mapping[str, DoubleArray]) -> Curve:
    """Means and standard errors over the first dimension of arrays [S, H] by kind."""
    found: Curve = {}
    for kind, values in kinds.items():
        columns = [column[~np.isnan(column)] for column in values.T]
        summaries = [mean_and_error("x", column.tolist()) if len(column) else {} for column in columns]
        found[kind] = [each.get("x") for each in summaries]
        found[f"{kind}_stderr"] = [each.get("x_stderr") for each in summaries]
    return found


def joined_curves(curves: Sequence[Curve]) -> Curve:
    """Curves of several training seeds as one: means, and standard errors over the seeds."""
    kinds = {
        kind: np.array([[np.nan if value is None else value for value in each[kind]] for each in curves])
        for kind in curves[0]
        if not kind.endswith("_stderr")
    }
    return mean_curve(kinds)
