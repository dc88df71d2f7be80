"""Baselines that train on several datasets of equal sizes in the same steps, every seed on every dataset."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajectory_transformer.baselines import Baseline, BaselineMetrics, BaselineTrainer
from trajectory_transformer.baselines.algorithm import Settings
from trajectory_transformer.baselines.data import Learner
from trajectory_transformer.baselines.runs import make_trainer
from trajectory_transformer.baselines.train import Backend
from trajectory_transformer.data.episode import Dataset


def make_together(
    name: str,
    settings: Settings,
    datasets: Sequence[Dataset],
    seeds: Sequence[int],
    device: torch.device,
    backend: Backend = "auto",
) -> tuple[BaselineTrainer[Any], Baseline]:
    """A trainer at step 0 and what it trains: first all seeds of the first dataset, then those of the next."""
    learners = [Learner(seed, index) for index in range(len(datasets)) for seed in seeds]
    return make_trainer(name, settings, datasets, learners, device=device, backend=backend)


def save_apart(baseline: Baseline, datasets: Sequence[Dataset], seeds: Sequence[int], folders: Sequence[Path]) -> None:
    """Save one checkpoint per dataset, with all seeds."""
    for index, (dataset, folder) in enumerate(zip(datasets, folders, strict=True)):
        own = baseline.take(range(index * len(seeds), (index + 1) * len(seeds)))
        replace(own, metadata=dict(dataset.metadata)).save(folder)


def mean_losses(metrics: BaselineMetrics) -> dict[str, float]:
    """Mean of each loss over all learners."""
    return {name: float(np.mean(values)) for name, values in metrics.losses.items()}


def progress_line(name: str, metrics: BaselineMetrics) -> str:
    """Losses, speed and time left."""
    losses = ", ".join(f"{loss} {value:.3g}" for loss, value in mean_losses(metrics).items())
    speed, left = metrics.steps_per_second, metrics.seconds_left
    return f"{name} step {metrics.step}: {losses}; {speed:,.0f} steps/s, {left:.0f} s left"
