"""Settings: what is refused, and that the presets are the recipes they name."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from trajectory_transformer.config import (
    PRESETS,
    ModelConfig,
    Preset,
    PresetName,
    SearchConfig,
    TokenConfig,
    TrainConfig,
)

Config = TokenConfig | ModelConfig | TrainConfig | SearchConfig


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TokenConfig, {"num_bins": 0}, "tokens.num_bins must be at least 1, got 0"),
        (TokenConfig, {"discount": 1.01}, r"tokens.discount must lie in \[0, 1\], got 1.01"),
        (TokenConfig, {"discount": -0.1}, r"tokens.discount must lie in \[0, 1\], got -0.1"),
        (TokenConfig, {"discount": float("nan")}, r"tokens.discount must lie in \[0, 1\], got nan"),
        (
            TokenConfig,
            {"truncated": "continue", "discount": 1.0},
            "tokens.truncated continue needs a tokens.discount below 1, got 1.0",
        ),
        (TokenConfig, {"goal_dims": (0, -1)}, r"tokens.goal_dims must not be negative, got \(0, -1\)"),
        (TokenConfig, {"max_episode_steps": 0}, "tokens.max_episode_steps must be at least 1, got 0"),
        (ModelConfig, {"window": 0}, "model.window must be at least 1, got 0"),
        (ModelConfig, {"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
        (ModelConfig, {"num_heads": 0}, "model.num_heads must be at least 1, got 0"),
        (ModelConfig, {"width": -8}, "model.width must be at least 1, got -8"),
        (ModelConfig, {"width": 10, "num_heads": 4}, "model.width must be a multiple of 4 heads, got 10"),
        (ModelConfig, {"dropout": 1.0}, r"model.dropout must lie in \[0, 1\), got 1.0"),
        (ModelConfig, {"dropout": -0.1}, r"model.dropout must lie in \[0, 1\), got -0.1"),
        (TrainConfig, {"batch_size": 0}, "train.batch_size must be at least 1, got 0"),
        (TrainConfig, {"checkpoint_every": 0}, "train.checkpoint_every must be at least 1, got 0"),
        (TrainConfig, {"log_every": 0}, "train.log_every must be at least 1, got 0"),
        (TrainConfig, {"epochs": 0.0}, "train.epochs must be above 0, got 0.0"),
        (TrainConfig, {"steps": 0}, "train.steps must be at least 1, got 0"),
        (TrainConfig, {"learning_rate": 0.0}, "train.learning_rate must be above 0, got 0.0"),
        (TrainConfig, {"learning_rate": float("nan")}, "train.learning_rate must be above 0, got nan"),
        (TrainConfig, {"grad_clip": 0.0}, "train.grad_clip must be above 0, got 0.0"),
        (TrainConfig, {"seed": -1}, "train.seed must not be negative, got -1"),
        (SearchConfig, {"beam_width": 0}, "search.beam_width must be at least 1, got 0"),
        (SearchConfig, {"horizon": 0, "replan_every": 0}, "search.horizon must be at least 1, got 0"),
        (SearchConfig, {"context": -1}, "search.context must not be negative, got -1"),
        (SearchConfig, {"window": 0}, "search.window must be at least 1, got 0"),
        (SearchConfig, {"horizon": 3, "replan_every": 4}, "between 1 and the horizon of 3, got 4"),
        (SearchConfig, {"replan_every": 0}, "search.replan_every must lie between 1 and the horizon of 5, got 0"),
        (SearchConfig, {"expansion": 0}, "search.expansion must be at least 1, got 0"),
        (SearchConfig, {"temperature": 0.0}, "search.temperature must be above 0, got 0.0"),
        (SearchConfig, {"percentile": 1.0}, r"search.percentile must lie in \(0, 1\), got 1.0"),
        (SearchConfig, {"discount": 1.5}, r"search.discount must lie in \[0, 1\], got 1.5"),
        (SearchConfig, {"action_top_k": 0}, "search.action_top_k must be at least 1, got 0"),
        (SearchConfig, {"observation_top_k": 0}, "search.observation_top_k must be at least 1, got 0"),
        (SearchConfig, {"action_nucleus": 0.0}, r"search.action_nucleus must lie in \(0, 1\], got 0.0"),
        (SearchConfig, {"action_middle": 1.2}, r"search.action_middle must lie in \[0.001, 1\], got 1.2"),
        (SearchConfig, {"action_middle": 1e-9}, r"search.action_middle must lie in \[0.001, 1\], got 1e-09"),
        (SearchConfig, {"opening_nucleus": 1.5}, r"search.opening_nucleus must lie in \(0, 1\], got 1.5"),
        (SearchConfig, {"observation_nucleus": 1.1}, r"search.observation_nucleus must lie in \(0, 1\], got 1.1"),
        # Settings that would otherwise train something other than what was asked for, without a word.
        (TokenConfig, {"num_bins": 40_000}, "tokens.num_bins .*, got 40000"),  # a token has two bytes
        (TokenConfig, {"termination_penalty": float("nan")}, "tokens.termination_penalty .*, got nan"),
        (TrainConfig, {"epoch_size": 0}, "train.epoch_size must be at least 1, got 0"),
        (TrainConfig, {"epochs": float("inf")}, "train.epochs .*, got inf"),
        (TrainConfig, {"warmup_steps": -1}, "train.warmup_steps must not be negative, got -1"),
        (TrainConfig, {"final_lr_share": 1.5}, r"train.final_lr_share must lie in \[0, 1\], got 1.5"),
        (TrainConfig, {"betas": (0.9, 1.0)}, r"train.betas must lie in \[0, 1\), got \(0.9, 1.0\)"),
        (TrainConfig, {"weight_decay": -0.1}, "train.weight_decay must not be negative, got -0.1"),
        (TrainConfig, {"action_weight": -1.0}, "train.action_weight must not be negative, got -1.0"),
    ],
)
def test_a_bad_value_is_refused_with_the_rule_and_the_fact(
    kind: type[Config], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@pytest.mark.parametrize("kind", [TokenConfig, ModelConfig, TrainConfig, SearchConfig])
def test_defaults_are_valid_and_frozen(kind: type[Config]) -> None:
    config = kind()
    assert replace(config) == config
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, 1)


def test_the_default_preset_holds_the_defaults() -> None:
    assert PRESETS["default"] == Preset()


@pytest.mark.parametrize(
    ("name", "beam_width", "horizon", "top_k", "nucleus"),
    [
        ("paper", 256, 15, 20, None),
        ("reference", 128, 15, None, 0.4),
        ("halfcheetah", 32, 5, None, 0.4),
        ("halfcheetah-medium-expert", 32, 15, None, 0.4),
        ("walker2d-medium-expert", 128, 5, None, 0.4),
        ("walker2d-medium-replay", 32, 20, 40, None),
    ],
)
def test_searches_are_as_wide_and_as_long_as_the_authors(
    name: PresetName, beam_width: int, horizon: int, top_k: int | None, nucleus: float | None
) -> None:
    plan = PRESETS[name].plan
    assert (plan.beam_width, plan.horizon, plan.action_top_k, plan.action_nucleus) == (
        beam_width,
        horizon,
        top_k,
        nucleus,
    )
    assert plan.expansion == 2
    if name != "paper":  # a task's search is all that the authors' code sets apart
        assert replace(PRESETS[name], plan=PRESETS["reference"].plan) == PRESETS["reference"]


def test_all_presets_share_the_papers_model() -> None:
    for preset in PRESETS.values():
        assert preset.model == ModelConfig(window=10, num_layers=4, num_heads=4, width=128, dropout=0.1)
        assert (preset.tokens.num_bins, preset.tokens.discount) == (100, 0.99)


def test_the_paper_preset_is_the_papers_recipe() -> None:
    paper = PRESETS["paper"]
    assert (paper.train.learning_rate, paper.train.warmup_steps, paper.train.epochs) == (2.5e-4, 2000, 80)
    assert (paper.train.betas, paper.train.weight_decay) == ((0.9, 0.999), 0.0)  # plain Adam
    assert paper.train.action_weight == 1.0
    assert paper.tokens.value_includes_reward
    assert paper.tokens.termination_penalty is None
    assert (paper.plan.beam_width, paper.plan.horizon, paper.plan.context) == (256, 15, 5)


def test_the_reference_preset_is_the_released_codes_recipe() -> None:
    reference = PRESETS["reference"]
    assert (reference.train.learning_rate, reference.train.betas) == (6e-4, (0.9, 0.95))
    assert (reference.train.weight_decay, reference.train.grad_clip) == (0.1, 1.0)
    assert reference.train.warmup_steps is None  # one pass over the data
    assert (reference.train.epochs, reference.train.epoch_size) == (50, 1_000_000)
    assert reference.train.action_weight == 5.0
    assert not reference.tokens.value_includes_reward
    assert reference.tokens.termination_penalty == -100.0
    assert reference.tokens.max_episode_steps == 1000
    assert (reference.tokens.discretizer, reference.tokens.bin_value) == ("quantile", "midpoint")
    assert (reference.plan.beam_width, reference.plan.horizon) == (128, 15)
    # At most five transitions in a pass, the current one among them.
    assert (reference.plan.context, reference.plan.window) == (4, 5)


def test_the_presets_differ_wherever_the_recipes_do() -> None:
    paper, reference = PRESETS["paper"], PRESETS["reference"]
    for part, names in {
        "tokens": ["value_includes_reward", "termination_penalty"],
        "train": ["learning_rate", "warmup_steps", "epochs", "betas", "weight_decay", "action_weight"],
        "plan": ["beam_width", "context"],
    }.items():
        for name in names:
            assert getattr(getattr(paper, part), name) != getattr(getattr(reference, part), name), name
