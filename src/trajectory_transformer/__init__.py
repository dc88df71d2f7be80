"""Turn recorded trajectories into a controller: the Trajectory Transformer."""

from trajectory_transformer.config import PRESETS, ModelConfig, PlanConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode, load_npz, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.policies import PlanningPolicy, Policy, Step
from trajectory_transformer.rollout import make_envs, rollout

__all__ = [
    "PRESETS",
    "Dataset",
    "Episode",
    "ModelConfig",
    "PlanConfig",
    "PlanningPolicy",
    "Policy",
    "Step",
    "TokenConfig",
    "TrainConfig",
    "TrajectoryModel",
    "load_npz",
    "make_envs",
    "rollout",
    "save_npz",
]
