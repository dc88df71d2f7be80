"""A run that starts from another one: its settings, and the data it can be trained on."""

from dataclasses import replace
from pathlib import Path

from trajectory_transformer.config import ModelConfig, TokenConfig, differences
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import layout_of


def settings_of_init(
    init: str | Path, tokens: TokenConfig | None, model: ModelConfig | None
) -> tuple[TokenConfig, ModelConfig]:
    """Token and model settings of the run to start from; refuses other ones."""
    initial = TrajectoryModel.load(init)
    known = initial.tokenizer.config, initial.gpt.config
    if tokens is not None and tokens.termination_penalty == "auto":
        tokens = replace(tokens, termination_penalty=initial.tokenizer.config.termination_penalty)
    for name, given, stored in zip(("tokens", "model"), (tokens, model), known, strict=True):
        if given is not None and given != stored:
            raise ValueError(
                f"a run that starts from {init} has its {name} settings ({differences(name, stored, given)}); "
                f"leave out {name}"
            )
    return known


def check_same_dimensions(initial: TrajectoryModel, dataset: Dataset) -> None:
    """Refuse to continue with data of other dimensions than the model was trained on."""
    layout = layout_of(dataset, initial.tokenizer.config)
    if not initial.gpt.config.map_channels:
        layout = replace(layout, map_shape=())
    if layout != initial.layout:
        raise ValueError(
            f"the model to start from was trained on {_sizes(initial.layout)}, the dataset has {_sizes(layout)}"
        )
    for kind in ("observation_dimensions", "action_dimensions"):
        # Checkpoints of earlier versions do not name the dimensions.
        for known, given in zip(getattr(initial.tokenizer, kind), getattr(dataset, kind), strict=False):
            if (known.categories, known.labels) != (given.categories, given.labels):
                raise ValueError(
                    f"{given.name} has {_values(given)}, and the model to start from was trained with {_values(known)}"
                )


def _sizes(layout: TokenLayout) -> str:
    maps = f" and maps of shape {layout.map_shape}" if layout.map_shape else ""
    return f"{layout.observation_dim} observation and {layout.action_dim} action dimensions{maps}"


def _values(dimension: Dimension) -> str:
    labels = f" ({', '.join(map(str, dimension.labels))})" if dimension.labels else ""
    return f"{dimension.categories} categories{labels}" if dimension.categories else "numbers"
