"""`run.json`: what a run was started with."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trajectory_transformer.checkpoint import model_config_from, token_config_from
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.sources.columns import Columns, parse_columns
from trajectory_transformer.files import naming, read_json, settings_from, write_atomically
from trajectory_transformer.tokens.tokenizer import CONVENTIONS
from trajectory_transformer.training.optim import GRAD_CLIP, RECIPES, OptimizerRecipe

RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that a run is a function of."""

    dataset: str | None = None  # a name that `load_dataset` reads; None for episodes in memory or shards alone
    columns: Columns | None = None  # how it is read
    shards: str | None = None
    source: str | None = None  # identifies the data
    init: str | None = None  # run folder whose weights and tokenizer it started from
    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    checkpoint_every: int = 500
    evaluate_every: int | None = None  # steps between evaluations by `tt train`
    evaluate_episodes: int = 10
    command: str = ""  # what started the run

    def write(self, folder: Path) -> None:
        """Store the settings in a run folder."""
        write_atomically(folder / RUN, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "RunSettings":
        """The settings of a run folder, also of one written before version 0.1."""
        with naming(folder / RUN, "not the description of a run", KeyError, TypeError, AttributeError):
            stored = read_json(folder / RUN)
            upgraded = _upgraded(stored)
        if upgraded is None:
            raise ValueError(
                f"{folder} was started before version 0.1 with settings that no longer exist, so it cannot be resumed; "
                "its checkpoint still loads (tt evaluate), or train again"
            )
        with naming(folder / RUN, "not the description of a run", KeyError, TypeError, AttributeError):
            known = {**stored, **upgraded}
            if known.get("columns") is not None:
                known["columns"] = parse_columns(known["columns"], str(folder / RUN), complete=False)
            known["tokens"] = token_config_from(known["tokens"])
            known["model"] = model_config_from(known["model"])
            known["train"] = _with_length(settings_from(TrainConfig, known["train"], "train"))
            return settings_from(cls, known)


def _with_length(train: TrainConfig) -> TrainConfig:
    """The same settings with a number of steps or epochs; runs that stored neither had 50 epochs."""
    return replace(train, epochs=50.0) if train.steps is None and train.epochs is None else train


def _upgraded(stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings of a run started before version 0.1 under their new names; None if they no longer exist."""
    old = stored["train"]
    if not isinstance(old, dict) or "betas" not in old:
        return {}
    tokens = stored["tokens"]
    details = ("bin_value", "final_observation", "max_episode_steps", "loss_mask")
    conventions = CONVENTIONS[tokens["loss_mask"] == "input"]
    recipe = OptimizerRecipe(tuple(old["betas"]), old["weight_decay"], old["final_lr_share"])
    optimizer = [name for name, known in RECIPES.items() if known == recipe]
    if (
        any(tokens[name] != getattr(conventions, name) for name in details)
        or not optimizer
        or old["epoch_size"] is not None
        or old["grad_clip"] != GRAD_CLIP
    ):
        return None
    kept = ("epochs", "steps", "batch_size", "learning_rate", "warmup_steps", "action_weight", "augment")
    return {
        "train": {
            **{name: old[name] for name in kept},
            "epochs": old["epochs"] if old["steps"] is None else None,
            "optimizer": optimizer[0],
            "backend": "eager" if old["precision"] == "float32" else "auto",
        },
        "seed": old["seed"],
        "checkpoint_every": old["checkpoint_every"],
    }
