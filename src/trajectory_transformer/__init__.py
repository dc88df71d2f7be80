"""Turn recorded trajectories into a controller: the Trajectory Transformer.

from trajectory_transformer import Planner, evaluate, load_dataset, train

model = train(load_dataset("log.csv"), out="runs/log")
planner = Planner(model)
action = planner.act(observation)
"""

from trajectory_transformer.baselines import Baseline, BaselineMetrics, BaselinePolicy, train_baseline
from trajectory_transformer.collect import collect
from trajectory_transformer.config import (
    PRESETS,
    ModelConfig,
    Preset,
    Sampler,
    SearchConfig,
    TokenConfig,
    TrainConfig,
)
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.data.sources import Columns, load_dataset, save_dataset
from trajectory_transformer.evaluate import Evaluation, evaluate
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner, PlanTrace
from trajectory_transformer.rollout import Policy, Step, make_envs, rollout
from trajectory_transformer.runs import train
from trajectory_transformer.search.beam import Objective, Plan
from trajectory_transformer.search.decoder import Candidates
from trajectory_transformer.search.objectives import QFunction, discounted_return, log_likelihood, q_guided
from trajectory_transformer.search.predict import Prediction, predict
from trajectory_transformer.tokens.tokenizer import Tokenizer
from trajectory_transformer.training.train import Metrics

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Baseline",
    "BaselineMetrics",
    "BaselinePolicy",
    "Candidates",
    "Columns",
    "Dataset",
    "Dimension",
    "Episode",
    "Evaluation",
    "Metrics",
    "ModelConfig",
    "Objective",
    "Plan",
    "PlanTrace",
    "Planner",
    "Policy",
    "Prediction",
    "Preset",
    "QFunction",
    "Sampler",
    "SearchConfig",
    "Step",
    "TokenConfig",
    "Tokenizer",
    "TrainConfig",
    "TrajectoryModel",
    "__version__",
    "collect",
    "discounted_return",
    "evaluate",
    "load_dataset",
    "log_likelihood",
    "make_envs",
    "predict",
    "q_guided",
    "rollout",
    "save_dataset",
    "train",
    "train_baseline",
]
