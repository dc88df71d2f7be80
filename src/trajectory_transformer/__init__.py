"""Turn recorded trajectories into a controller: the Trajectory Transformer.

from trajectory_transformer import Planner, evaluate, load_dataset, train

model = train(load_dataset("log.csv"), out="runs/log")
planner = Planner(model)
action = planner.act(observation)
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from trajectory_transformer.pretrained import from_pretrained, push_to_hub, save_pretrained
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
    "from_pretrained",
    "load_dataset",
    "log_likelihood",
    "make_envs",
    "predict",
    "push_to_hub",
    "q_guided",
    "rollout",
    "save_dataset",
    "save_pretrained",
    "train",
    "train_baseline",
]

# Where each public name is defined. A name is imported when it is first used, so that `tt --help` need not wait for
# torch.
_HOMES = {
    "baselines": ("Baseline", "BaselineMetrics", "BaselinePolicy", "train_baseline"),
    "collect": ("collect",),
    "config": ("PRESETS", "ModelConfig", "Preset", "Sampler", "SearchConfig", "TokenConfig", "TrainConfig"),
    "data.episode": ("Dataset", "Dimension", "Episode"),
    "data.sources": ("Columns", "load_dataset", "save_dataset"),
    "evaluate": ("Evaluation", "evaluate"),
    "model.trajectory_model": ("TrajectoryModel",),
    "planner": ("PlanTrace", "Planner"),
    "pretrained": ("from_pretrained", "push_to_hub", "save_pretrained"),
    "rollout": ("Policy", "Step", "make_envs", "rollout"),
    "runs": ("train",),
    "search.beam": ("Objective", "Plan"),
    "search.decoder": ("Candidates",),
    "search.objectives": ("QFunction", "discounted_return", "log_likelihood", "q_guided"),
    "search.predict": ("Prediction", "predict"),
    "tokens.tokenizer": ("Tokenizer",),
    "training.train": ("Metrics",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """This package: its public names are imported on first use."""

    def __getattr__(self, name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module `evaluate` would otherwise hide the function of that name.
        if not (isinstance(value, ModuleType) and name in _MODULES):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
