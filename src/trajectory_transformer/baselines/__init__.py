"""Offline reinforcement learning baselines: one file per algorithm, one training loop for all of them."""

from trajectory_transformer.baselines.model import Baseline, BaselinePolicy
from trajectory_transformer.baselines.presets import PRESETS
from trajectory_transformer.baselines.runs import BaselineRun, resume_baseline, start_baseline, train_baseline
from trajectory_transformer.baselines.train import BaselineMetrics, BaselineTrainer

__all__ = [
    "PRESETS",
    "Baseline",
    "BaselineMetrics",
    "BaselinePolicy",
    "BaselineRun",
    "BaselineTrainer",
    "resume_baseline",
    "start_baseline",
    "train_baseline",
]
