"""A study from a dataset of held-out episodes to the numbers of a result file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trajectory_transformer.analysis.likelihood import Edges
from trajectory_transformer.analysis.predictors import EnsemblePredictor, Predictor, TransformerPredictor
from trajectory_transformer.analysis.study import (
    Actions,
    StudyConfig,
    find_starts,
    held_out_masks,
    one_step_log_prob,
    oracle_of,
    run_study,
)
from trajectory_transformer.analysis.summary import Curve, curve_of, study_metrics
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.results import mean_and_error

SUFFIXES: dict[Actions, str] = {"policy": "", "recorded": "_recorded"}
"""Of metrics, by the actions that futures take."""


@dataclass(frozen=True)
class Study:
    """What a study found."""

    metrics: dict[str, float]
    curves: dict[Actions, dict[str, Curve]]  # by actions and predictor
    oracle: float
    details: dict[str, Any]  # settings and starts, for the result file


def study_dataset(
    predictors: Mapping[str, Predictor],
    dataset: Dataset,
    config: StudyConfig,
    *,
    num_starts: int = 8,
    context: int = 9,
    hidden: float = 0.0,
    actions: Sequence[Actions] = ("policy",),
    edges: Edges | None = None,
    on_done: Callable[[str, float], None] | None = None,
) -> Study:
    """Compare predictors on held-out episodes.

    Args:
        predictors: by name.
        dataset: held-out episodes.
        config: steps, samples, floor and seed.
        num_starts: starts to average over, at most.
        context: transitions before a start that predictors may read.
        hidden: probability with which each entry of every state is hidden; the mask is fixed by the seed.
        actions: whether predictors also predict the actions (`policy`), take the recorded ones, or one after the other.
        edges: bins of all histograms; by default those of the first Trajectory Transformer.
        on_done: called with the name of a predictor and the seconds it took.
    """
    require(len(predictors) >= 1 and len(actions) >= 1, "a study needs predictors and actions", list(predictors))
    _check_dims(predictors, dataset)
    bins = next((each.edges for each in predictors.values() if isinstance(each, TransformerPredictor)), edges)
    if edges is not None:
        bins = edges
    if bins is None:
        raise ValueError("a study needs a Trajectory Transformer, whose bins are those of all histograms")
    episodes = dataset.episodes
    masks = held_out_masks(episodes, hidden, config.seed)
    starts = find_starts(
        episodes, count=num_starts, horizon=config.horizon, context=context, seed=config.seed, masks=masks
    )
    deviations = np.concatenate([episode.observations for episode in episodes]).astype(np.float64).std(axis=0)
    scale = np.where(deviations > 0, deviations, 1.0)
    masked = "_masked" if hidden else ""
    metrics: dict[str, float] = {}
    curves: dict[Actions, dict[str, Curve]] = {}
    seconds: dict[str, float] = {}
    for kind in actions:
        found = run_study(predictors, starts, bins, scale, config, actions=kind, on_done=on_done)
        metrics |= study_metrics(found, suffix=SUFFIXES[kind] + masked)
        curves[kind] = {name: curve_of(each) for name, each in found.items()}
        seconds |= {f"{name}{SUFFIXES[kind]}": round(each.seconds, 2) for name, each in found.items()}
    for name, values in one_step_log_prob(predictors, episodes, context=context, seed=config.seed, masks=masks).items():
        metrics |= mean_and_error(f"{name}_one_step_logp{masked}", values.tolist())
    oracle = oracle_of(bins, starts)
    metrics[f"oracle_logp{masked}"] = oracle
    details = {
        "settings": {**asdict(config), "context": context, "hidden": hidden, "actions": list(actions)},
        "curves": curves,
        "seconds_predicting": seconds,
        "starts": [{"episode": each.episode, "step": each.step, "visits": len(each.visited)} for each in starts],
        "ranges": [[float(bounds[0]), float(bounds[-1])] for bounds in bins],
        "num_bins": [len(bounds) - 1 for bounds in bins],
    }
    return Study(metrics, curves, oracle, details)


def _check_dims(predictors: Mapping[str, Predictor], dataset: Dataset) -> None:
    """Refuse predictors of other states or actions than those of the dataset."""
    have = (dataset.observation_dim, dataset.action_dim)
    for name, each in predictors.items():
        if isinstance(each, TransformerPredictor):
            wanted = (each.model.layout.observation_dim, each.model.layout.action_dim)
        elif isinstance(each, EnsemblePredictor):
            wanted = (each.ensemble.observation_dim, each.ensemble.action_dim)
        else:
            continue
        require(have == wanted, f"the dataset must have the {wanted} observation and action dimensions of {name}", have)
