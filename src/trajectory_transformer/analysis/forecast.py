"""How good forecasts are: bands of sampled futures, the share of the truth inside them, and the error by distance."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory_transformer.data.episode import DoubleArray, Episode, FloatArray
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.predict import Prediction, predict, recorded

LEVELS = (0.5, 0.9)
"""Shares of the samples that the two bands hold."""
TRUSTED_ERROR = 0.5
"""A forecast is trusted while the error of its median is below this many standard deviations of the data."""


@dataclass(frozen=True)
class Bands:
    """Median and central bands of sampled futures, NaN where every sample has ended."""

    low: DoubleArray  # [H, O], lower end of the 90 % band
    lower: DoubleArray  # [H, O], lower end of the 50 % band
    middle: DoubleArray  # [H, O]
    upper: DoubleArray  # [H, O]
    high: DoubleArray  # [H, O]


def bands_of(samples: DoubleArray) -> Bands:
    """Bands of samples [N, H, O]; samples that have ended are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps at which every sample has ended have no quantiles
        return Bands(*np.nanquantile(samples, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0))


def share_inside(samples: DoubleArray, truth: DoubleArray, level: float) -> DoubleArray:
    """How much of the truth lies in the central `level` of the samples: samples [N, ...], truth [...] -> [...] in 0..1.

    Binned samples often equal the truth. Such a truth covers an interval of quantiles, from the share of the samples
    below it to that of the samples not above it, and counts with the part of the interval that lies inside. The mean is
    `level` for a calibrated forecast, with bins of any width. NaN where every sample has ended.
    """
    ended = np.isnan(samples)
    count = (~ended).sum(axis=0)
    with np.errstate(invalid="ignore"):
        first = np.where(ended, False, samples < truth).sum(axis=0) / count
        last = np.where(ended, False, samples <= truth).sum(axis=0) / count
    low, high = (1.0 - level) / 2, (1.0 + level) / 2
    width = last - first
    inside = np.clip(np.minimum(last, high) - np.maximum(first, low), 0.0, None) / np.where(width > 0, width, 1.0)
    point = ((first > low) & (first < high)).astype(np.float64)
    return np.where(np.isnan(width), np.nan, np.where(width > 0, inside, point))


@dataclass(frozen=True)
class Calibration:
    """Forecasts of one episode from several steps, compared with the recording, by steps ahead."""

    starts: tuple[int, ...]
    inside: dict[float, DoubleArray]  # by level: [H], share of the truth inside the band
    error: DoubleArray  # [H], of the median, in standard deviations of the data
    unchanged: DoubleArray  # [H], the same error of "nothing changes"

    def share(self, level: float) -> float:
        """Share of the truth inside a band, over all steps ahead; NaN if nothing varies or every sample has ended."""
        known = self.inside[level][np.isfinite(self.inside[level])]
        return float(known.mean()) if len(known) else float("nan")

    @property
    def trusted_steps(self) -> int:
        """Steps ahead before the error first reaches `TRUSTED_ERROR`, or that of "nothing changes"."""
        bad = ~(self.error < TRUSTED_ERROR) | ~((self.error <= self.unchanged) | (self.error < 0.1 * TRUSTED_ERROR))
        return int(np.argmax(bad)) if bad.any() else len(bad)


def calibration(
    model: TrajectoryModel,
    episode: Episode,
    *,
    horizon: int,
    num_starts: int = 8,
    num_samples: int = 64,
    seed: int = 0,
    context: int = 4,
    given_actions: bool = True,
    spread: FloatArray | DoubleArray | None = None,
) -> Calibration:
    """Forecast an episode from evenly spaced steps.

    `spread` [O] is the standard deviation of the data; None: that of the episode.
    """
    last = len(episode) - horizon
    if horizon < 1 or last < 0:
        raise ValueError(f"the episode has {len(episode)} steps, got a horizon of {horizon}")
    starts = tuple(np.unique(np.linspace(0, last, min(num_starts, last + 1)).astype(int)).tolist())
    predictions = [
        predict(
            model,
            episode,
            start=start,
            horizon=horizon,
            num_samples=num_samples,
            seed=seed,
            context=context,
            given_actions=given_actions,
        )
        for start in starts
    ]
    return compared(model, episode, starts, predictions, spread)


def compared(
    model: TrajectoryModel,
    episode: Episode,
    starts: Sequence[int],
    predictions: Sequence[Prediction],
    spread: FloatArray | DoubleArray | None = None,
) -> Calibration:
    """Compare predictions from some steps of an episode with what was recorded; constant dimensions do not count."""
    tokenizer = model.tokenizer
    horizon = predictions[0].observations.shape[1]
    slots = tokenizer.layout.observation
    deviation: DoubleArray = np.asarray(episode.observations.std(axis=0) if spread is None else spread, np.float64)
    varies = deviation > 1e-8
    inside: dict[float, list[DoubleArray]] = {level: [] for level in LEVELS}
    errors, unchanged = [], []
    for start, prediction in zip(starts, predictions, strict=True):
        truth = recorded(episode, start, horizon).astype(np.float64)
        # The truth as a bin, like the samples: a sample cannot come closer to it than its bin.
        binned = tokenizer.discretizer.decode(tokenizer.encode_states(truth), slots)
        for level in LEVELS:
            inside[level].append(share_inside(prediction.observations, binned, level)[:, varies])
        scaled = np.abs(np.stack([bands_of(prediction.observations).middle, _still(episode, start, horizon)]) - truth)
        errors.append((scaled[0] / np.maximum(deviation, 1e-8))[:, varies])
        unchanged.append((scaled[1] / np.maximum(deviation, 1e-8))[:, varies])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step at which every sample has ended has no mean
        return Calibration(
            starts=tuple(starts),
            inside={level: np.nanmean(np.stack(parts), axis=(0, 2)) for level, parts in inside.items()},
            error=np.nanmean(np.stack(errors), axis=(0, 2)),
            unchanged=np.nanmean(np.stack(unchanged), axis=(0, 2)),
        )


def _still(episode: Episode, start: int, horizon: int) -> DoubleArray:
    """The forecast that nothing changes [H, O]."""
    return np.repeat(episode.observations[start : start + 1].astype(np.float64), horizon, axis=0)
