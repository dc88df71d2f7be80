"""Turn recorded trajectories into a controller: the Trajectory Transformer."""

from trajectory_transformer.config import PRESETS, ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, load_npz, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.rollout import Policy, Step, make_envs, rollout
from trajectory_transformer.search.beam import Objective, Plan, beam_search, likelihood_search, median_continuation
from trajectory_transformer.search.decoder import Candidates
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.predict import predict

__all__ = [
    "PRESETS",
    "Candidates",
    "Dataset",
    "Dimension",
    "Episode",
    "ModelConfig",
    "Objective",
    "Plan",
    "Planner",
    "Policy",
    "SearchConfig",
    "Step",
    "TokenConfig",
    "TrainConfig",
    "TrajectoryModel",
    "beam_search",
    "discounted_return",
    "likelihood_search",
    "load_npz",
    "log_likelihood",
    "make_envs",
    "median_continuation",
    "predict",
    "rollout",
    "save_npz",
]
