"""The prediction study of the paper: how likely is what happened, step by step, under what each predictor expected?

From fixed starts, each predictor samples futures; their marginals at every step are compared with the states that the
recorded policy visited from the same start in held-out episodes (`likelihood`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from trajectory_transformer.analysis.likelihood import (
    Edges,
    discrete_oracle,
    gaussian_log_prob,
    histogram_likelihood,
    oracle_log_prob,
    squared_error,
)
from trajectory_transformer.analysis.masking import masked_states, observation_masks
from trajectory_transformer.analysis.predictors import EnsemblePredictor, Past, Predictor
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import DoubleArray, Episode, FloatArray
from trajectory_transformer.randomness import stream_seed

log = logging.getLogger(__name__)

Actions = Literal["policy", "recorded"]
"""Whether predictors also predict the actions, or take the recorded ones."""
FLOOR = 1e-4
"""Default of the smallest probability of a bin: a tenth of the mass of one of 1,000 samples."""
_ONE_STEP_ROWS = 4096  # held-out transitions that measure one-step likelihoods, at most


@dataclass(frozen=True)
class Start:
    """A state in a held-out episode, what came before it, and what followed it."""

    state: FloatArray  # [O]; NaN for unobserved entries, also in the past
    past_states: FloatArray  # [C, O]
    past_actions: FloatArray  # [C, A]
    actions: FloatArray  # [H, A], recorded in the first reference
    visited: DoubleArray  # [R, H, O], fully observed; NaN after the end of a reference
    episode: int  # index of the first reference
    step: int


def find_starts(
    episodes: Sequence[Episode],
    *,
    count: int,
    horizon: int,
    context: int,
    seed: int,
    masks: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> list[Start]:
    """Starts in held-out episodes, at most `count`, each in another group of episodes.

    Episodes with the same first state form a group, and start at the last state that all of them have in common:
    what follows are several visits from one start, the longest one first. A single episode starts at a random step that
    at least `context` transitions precede, if it is long enough, and `horizon` follow.
    """
    require(count >= 1 and horizon >= 1, "a study needs at least 1 start and 1 step", (count, horizon))
    require(context >= 0, "the context must not be negative", context)
    groups: dict[bytes, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault(episode.observations[0].tobytes(), []).append(index)
    rng = np.random.default_rng(stream_seed(seed))
    found: list[Start] = []
    left_out = 0
    for key in rng.permutation(len(groups)).tolist():
        members = sorted(list(groups.values())[key], key=lambda index: -len(episodes[index]))
        latest = len(episodes[members[0]]) - horizon
        if len(members) > 1:
            step = _last_common([episodes[index].observations for index in members])
            if step > latest:
                left_out += 1
                continue
        elif latest >= 0:
            step = int(rng.integers(min(context, latest), latest + 1))
        else:
            continue
        found.append(_start(episodes, members, step, horizon=horizon, context=context, masks=masks))
        if len(found) == count:
            break
    if not found:
        longest = max(map(len, episodes))
        raise ValueError(f"no held-out episode has {horizon} steps after a start, the longest has {longest}")
    if left_out:
        log.warning("%d of the starts left out: all visits from them are shorter than %d steps", left_out, horizon)
    return found


def _start(
    episodes: Sequence[Episode],
    members: Sequence[int],
    step: int,
    *,
    horizon: int,
    context: int,
    masks: Sequence[npt.NDArray[np.bool_]] | None,
) -> Start:
    first = episodes[members[0]]
    states = first.observations if masks is None else masked_states(first.observations, masks[members[0]])
    begin = max(step - context, 0)
    visited = np.full((len(members), horizon, first.observations.shape[1]), np.nan)
    for row, index in zip(visited, members, strict=True):
        after = episodes[index].observations[step + 1 : step + 1 + horizon]
        row[: len(after)] = after
    return Start(
        state=states[step],
        past_states=states[begin:step],
        past_actions=first.actions[begin:step],
        actions=first.actions[step : step + horizon],
        visited=visited,
        episode=members[0],
        step=step,
    )


def _last_common(paths: Sequence[FloatArray]) -> int:
    """Index of the last state that all paths share from their beginning on."""
    length = min(map(len, paths))
    same = np.all([(path[:length] == paths[0][:length]).all(axis=1) for path in paths], axis=0)
    return int(same.cumprod().sum()) - 1


@dataclass(frozen=True)
class Curves:
    """One predictor over the steps of the study, for each of S starts [S, H]: means over the visits of a start."""

    log_prob: DoubleArray  # under the histograms
    zeros: DoubleArray  # entries of a state without mass, which count with the floor
    squared_error: DoubleArray  # of the mean, in deviations of the data, mean over dimensions
    ended: DoubleArray  # share of the samples that predict the end of the episode
    gaussian: DoubleArray | None  # log-likelihood under Gaussian marginals; only for ensembles
    seconds: float


@dataclass(frozen=True)
class StudyConfig:
    """The settings of a study."""

    horizon: int = 100
    samples: int = 1000
    floor: float = FLOOR
    seed: int = 0


def run_study(
    predictors: Mapping[str, Predictor],
    starts: Sequence[Start],
    edges: Edges,
    scale: DoubleArray,
    config: StudyConfig,
    *,
    actions: Actions = "policy",
    on_done: Callable[[str, float], None] | None = None,
) -> dict[str, Curves]:
    """Curves of every predictor. With recorded actions, only the first visit of each start counts, whose they are.

    `edges` are the bins of all histograms, `scale` [O] the deviations of the data.
    """
    require(actions in ("policy", "recorded"), "actions must be policy or recorded", repr(actions))
    found = {}
    for name, predictor in predictors.items():
        began = time.perf_counter()
        rows = [_curve(each, predictor, edges, scale, config, actions) for each in _batches(starts)]
        order = np.argsort(np.concatenate([[index for index, _ in each] for each in _batches(starts)]))
        log_prob, zeros, error, ended, gaussian = (
            np.concatenate([row[part] for row in rows])[order] for part in range(5)
        )
        seconds = time.perf_counter() - began
        own_gaussian = gaussian if isinstance(predictor, EnsemblePredictor) else None
        found[name] = Curves(log_prob, zeros, error, ended, own_gaussian, seconds)
        if on_done is not None:
            on_done(name, seconds)
    return found


def _batches(starts: Sequence[Start]) -> Iterator[list[tuple[int, Start]]]:
    """Starts with equally long pasts, with their places."""
    ordered = sorted(enumerate(starts), key=lambda pair: len(pair[1].past_states))
    for _, group in groupby(ordered, key=lambda pair: len(pair[1].past_states)):
        yield list(group)


def _curve(
    batch: Sequence[tuple[int, Start]],
    predictor: Predictor,
    edges: Edges,
    scale: DoubleArray,
    config: StudyConfig,
    actions: Actions,
) -> tuple[DoubleArray, ...]:
    starts = [start for _, start in batch]
    futures = predictor.predict(
        np.stack([start.state for start in starts]),
        Past(np.stack([start.past_states for start in starts]), np.stack([start.past_actions for start in starts])),
        np.stack([start.actions for start in starts]) if actions == "recorded" else None,
        config.horizon,
        config.samples,
        seed=stream_seed(config.seed, batch[0][0]),
    )
    rows = []
    for start, states, ended in zip(starts, futures.states, futures.ended, strict=True):
        visited = start.visited[:1] if actions == "recorded" else start.visited
        found = histogram_likelihood(states, ended, visited, edges, floor=config.floor)
        gaussian = gaussian_log_prob(states, ended, visited, edges)
        error = squared_error(states, ended, visited, scale)
        means = [_over_visits(part) for part in (found.log_prob, found.zeros, error)]
        rows.append((*means, ended.mean(axis=0), _over_visits(gaussian)))
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def _over_visits(values: DoubleArray) -> DoubleArray:
    """Mean over visits that have not ended: [R, H] -> [H]; NaN where all have, or nothing was predicted."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    return np.where(count, np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def one_step_log_prob(
    predictors: Mapping[str, Predictor],
    episodes: Sequence[Episode],
    *,
    context: int,
    seed: int,
    masks: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> dict[str, DoubleArray]:
    """Log-densities of held-out transitions after at least `context` others: the same transitions for all [N].

    Given the mask, only observed entries count.
    """
    states = [
        episode.observations if masks is None else masked_states(episode.observations, masks[index])
        for index, episode in enumerate(episodes)
    ]
    places = [(index, step) for index, episode in enumerate(episodes) for step in range(context, len(episode))]
    require(len(places) > 0, f"held-out episodes must be longer than the context of {context}", "none")
    rng = np.random.default_rng(stream_seed(seed, 1))
    chosen = [places[row] for row in rng.permutation(len(places))[:_ONE_STEP_ROWS].tolist()]
    now = np.stack([states[index][step] for index, step in chosen])
    past = Past(
        np.stack([states[index][step - context : step] for index, step in chosen]),
        np.stack([episodes[index].actions[step - context : step] for index, step in chosen]),
    )
    action = np.stack([episodes[index].actions[step] for index, step in chosen])
    following = np.stack([states[index][step + 1] for index, step in chosen])
    return {name: each.log_prob(now, past, action, following) for name, each in predictors.items()}


def oracle_of(edges: Edges, starts: Sequence[Start]) -> float:
    """The discrete oracle: in closed form for bins of equal width, else its mean over the visited states."""
    if all(len(bounds) < 2 or np.allclose(np.diff(bounds), np.diff(bounds)[0], rtol=1e-3) for bounds in edges):
        return discrete_oracle(edges)
    visited = np.concatenate([start.visited.reshape(-1, start.visited.shape[-1]) for start in starts])
    return float(oracle_log_prob(visited[~np.isnan(visited).any(axis=1)], edges).mean())


def held_out_masks(
    episodes: Sequence[Episode], probability: float, seed: int
) -> tuple[npt.NDArray[np.bool_], ...] | None:
    """Masks of held-out episodes, from another stream than those of training; None without masking."""
    return observation_masks(episodes, probability, stream_seed(seed, 1) % 2**31) if probability else None
