"""Settings: values that are refused, and the recipes that the presets stand for."""

import inspect
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from trajectory_transformer.config import (
    PRESETS,
    ModelConfig,
    Preset,
    PresetName,
    Sampler,
    SearchConfig,
    TokenConfig,
    TrainConfig,
)
from trajectory_transformer.training.optim import DEFAULT_EPOCHS, MIN_STEPS, RECIPES

Config = TokenConfig | ModelConfig | TrainConfig | Sampler | SearchConfig


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TokenConfig, {"num_bins": 1}, "tokens.num_bins must be at least 2: one bin tells nothing, got 1"),
        (TokenConfig, {"discount": 1.01}, r"tokens.discount must lie in \[0, 1\], got 1.01"),
        (TokenConfig, {"discount": -0.1}, r"tokens.discount must lie in \[0, 1\], got -0.1"),
        (TokenConfig, {"discount": float("nan")}, r"tokens.discount must lie in \[0, 1\], got nan"),
        (
            TokenConfig,
            {"truncated": "continue", "discount": 1.0},
            "tokens.truncated continue needs a tokens.discount below 1 .*, got 1.0",
        ),
        (TokenConfig, {"goal_dims": (0, -1)}, r"tokens.goal_dims must not be negative, got \(0, -1\)"),
        (ModelConfig, {"window": 0}, "model.window must be at least 1, got 0"),
        (ModelConfig, {"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
        (ModelConfig, {"num_heads": 0}, "model.num_heads must be at least 1, got 0"),
        (ModelConfig, {"width": -8}, "model.width must be at least 1, got -8"),
        (ModelConfig, {"width": 10, "num_heads": 4}, "model.width must be a multiple of 4 heads, got 10"),
        (ModelConfig, {"dropout": 1.0}, r"model.dropout must lie in \[0, 1\), got 1.0"),
        (ModelConfig, {"map_channels": -1}, "model.map_channels must not be negative, got -1"),
        (ModelConfig, {"dropout": -0.1}, r"model.dropout must lie in \[0, 1\), got -0.1"),
        (TrainConfig, {"batch_size": 0}, "train.batch_size must be at least 1, got 0"),
        (TrainConfig, {"epochs": 0.0}, "train.epochs must be above 0, got 0.0"),
        (TrainConfig, {"epochs": 2.0, "steps": 9}, "train.epochs and train.steps exclude each other.*, got 2.0 and 9"),
        (TrainConfig, {"steps": 0}, "train.steps must be at least 1, got 0"),
        (TrainConfig, {"learning_rate": 0.0}, "train.learning_rate must be above 0, got 0.0"),
        (TrainConfig, {"learning_rate": float("nan")}, "train.learning_rate must be above 0, got nan"),
        (SearchConfig, {"beam_width": 0}, "search.beam_width must be at least 1, got 0"),
        (SearchConfig, {"horizon": 0, "replan_every": 0}, "search.horizon must be at least 1, got 0"),
        (SearchConfig, {"context": -1}, "search.context must not be negative, got -1"),
        (SearchConfig, {"window": 0}, "search.window must be at least 1, got 0"),
        (SearchConfig, {"horizon": 3, "replan_every": 4}, "between 1 and the horizon of 3, got 4"),
        (SearchConfig, {"replan_every": 0}, "search.replan_every must lie between 1 and the horizon of 5, got 0"),
        (SearchConfig, {"expansion": 0}, "search.expansion must be at least 1, got 0"),
        (Sampler, {"temperature": 0.0}, "a sampler's temperature must be above 0, got 0.0"),
        (Sampler, {"top_k": 0}, "a sampler's top_k must be at least 1, got 0"),
        (Sampler, {"nucleus": 0.0}, r"a sampler's nucleus must lie in \(0, 1\], got 0.0"),
        (Sampler, {"nucleus": 1.1}, r"a sampler's nucleus must lie in \(0, 1\], got 1.1"),
        (Sampler, {"middle": 1.2}, r"a sampler's middle must lie in \[0.001, 1\], got 1.2"),
        (Sampler, {"middle": 1e-9}, r"a sampler's middle must lie in \[0.001, 1\], got 1e-09"),
        # Settings that would otherwise silently train something else.
        (TokenConfig, {"num_bins": 40_000}, "tokens.num_bins .*, got 40000"),  # a token has two bytes
        (TokenConfig, {"termination_penalty": float("nan")}, "tokens.termination_penalty .*, got nan"),
        (TrainConfig, {"epochs": float("inf")}, "train.epochs .*, got inf"),
        (TrainConfig, {"warmup_steps": -1}, "train.warmup_steps must not be negative, got -1"),
        (TrainConfig, {"action_weight": -1.0}, "train.action_weight must not be negative, got -1.0"),
    ],
)
def test_a_bad_value_is_refused_with_the_rule_and_the_value(
    kind: type[Config], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@pytest.mark.parametrize("kind", [TokenConfig, ModelConfig, TrainConfig, Sampler, SearchConfig])
def test_defaults_are_valid_and_frozen(kind: type[Config]) -> None:
    config = kind()
    assert replace(config) == config
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, 1)


def test_the_default_preset_holds_the_defaults_and_looks_at_the_data_for_a_penalty() -> None:
    assert PRESETS["default"] == Preset(tokens=TokenConfig(termination_penalty="auto"))


def test_the_default_preset_is_the_recipe_for_continuous_control() -> None:
    default = PRESETS["default"]
    assert (default.tokens.discretizer, default.tokens.truncated, default.tokens.discount) == (
        "quantile",
        "continue",
        0.99,
    )
    assert (default.train.optimizer, default.train.learning_rate) == ("adamw", 4e-3)
    assert (default.train.epochs, default.train.steps) == (None, None)
    assert f"null: {DEFAULT_EPOCHS:g}, but at least {MIN_STEPS:,} steps" in inspect.getsource(TrainConfig)
    assert default.search.action == Sampler(middle=0.4) and default.search.first_action == Sampler()
    small = PRESETS["small"]
    assert small.search == default.search and small.tokens == default.tokens


@pytest.mark.parametrize(
    ("name", "beam_width", "horizon", "top_k", "nucleus"),
    [
        ("paper", 256, 15, 20, None),
        ("reference", 128, 15, None, 0.4),
        ("halfcheetah", 32, 5, None, 0.4),
        ("halfcheetah-medium-expert", 32, 15, None, 0.4),
        ("walker2d-medium-expert", 128, 5, None, 0.4),
        ("hopper-medium-replay", 128, 15, None, 0.4),
        ("walker2d-medium-replay", 32, 20, 40, None),
    ],
)
def test_searches_have_the_sizes_of_the_authors(
    name: PresetName, beam_width: int, horizon: int, top_k: int | None, nucleus: float | None
) -> None:
    search = PRESETS[name].search
    assert (search.beam_width, search.horizon) == (beam_width, horizon)
    assert search.action == Sampler(top_k=top_k, nucleus=nucleus)
    assert search.observation == search.reward == Sampler(top_k=1) and search.first_action is None
    assert search.expansion == 2
    if name != "paper":  # tasks differ in their search, and in how long they train
        epochs = 80 if name in ("hopper-medium-replay", "walker2d-medium-replay") else 50
        train = replace(PRESETS["reference"].train, steps=epochs * 1_000_000 // 256)
        assert PRESETS[name] == replace(PRESETS["reference"], search=search, train=train)


def test_all_presets_but_small_share_the_model_of_the_paper() -> None:
    for name, preset in PRESETS.items():
        if name == "small":
            continue
        dropout = 0.0 if name == "default" else 0.1
        assert preset.model == ModelConfig(window=10, num_layers=4, num_heads=4, width=128, dropout=dropout)
        assert (preset.tokens.num_bins, preset.tokens.discount) == (100, 0.99)


def test_the_paper_preset_is_the_recipe_of_the_paper() -> None:
    paper = PRESETS["paper"]
    assert (paper.train.learning_rate, paper.train.warmup_steps, paper.train.epochs) == (2.5e-4, 2000, 80)
    recipe = RECIPES[paper.train.optimizer]
    assert (recipe.betas, recipe.weight_decay, recipe.final_share) == ((0.9, 0.999), 0.0, 0.0)  # plain Adam
    assert paper.train.action_weight == 1.0
    assert paper.tokens.value_includes_reward
    assert paper.tokens.termination_penalty is None
    assert (paper.search.beam_width, paper.search.horizon, paper.search.context) == (256, 15, 5)


def test_the_reference_preset_is_the_recipe_of_the_released_code() -> None:
    reference = PRESETS["reference"]
    recipe = RECIPES[reference.train.optimizer]
    assert (reference.train.learning_rate, recipe.betas) == (6e-4, (0.9, 0.95))
    assert (recipe.weight_decay, recipe.final_share) == (0.1, 0.1)
    assert reference.train.warmup_steps is None  # one pass over the data
    assert reference.train.steps == 195_312  # 50 epochs of a million windows in batches of 256
    assert reference.train.action_weight == 5.0
    assert not reference.tokens.value_includes_reward
    assert reference.tokens.termination_penalty == -100.0
    assert reference.tokens.discretizer == "quantile" and reference.tokens.authors_conventions
    assert (reference.search.beam_width, reference.search.horizon) == (128, 15)
    # At most five transitions in a pass, including the current one.
    assert (reference.search.context, reference.search.window) == (4, 5)


def test_only_presets_of_the_released_code_follow_its_conventions() -> None:
    ours = {name for name, preset in PRESETS.items() if not preset.tokens.authors_conventions}
    assert ours == {"default", "small", "paper"}


def test_the_paper_and_reference_presets_differ_where_the_recipes_do() -> None:
    paper, reference = PRESETS["paper"], PRESETS["reference"]
    for part, names in {
        "tokens": ["value_includes_reward", "termination_penalty"],
        "train": ["learning_rate", "warmup_steps", "epochs", "optimizer", "action_weight"],
        "search": ["beam_width", "context", "action"],
    }.items():
        for name in names:
            assert getattr(getattr(paper, part), name) != getattr(getattr(reference, part), name), name
