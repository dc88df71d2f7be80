"""Settings of every stage as frozen dataclasses, and the presets that name whole sets of them.

Plain values only: no files, clocks or random names. The defaults are the authors' released recipe with its faults
mended; `PRESETS` holds the two recipes to the letter (docs/concepts.md lists the differences).
"""

from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Literal


def require(condition: bool, rule: str, found: object) -> None:
    """Raise the one kind of error a bad setting gets: the rule, then the fact."""
    if not condition:
        raise ValueError(f"{rule}, got {found}")


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """How episodes become tokens."""

    num_bins: int = 100
    """Bins per dimension; one more token, the stop token, is added to each."""
    discretizer: Literal["quantile", "uniform"] = "quantile"
    """Bins of equal mass in the data, or of equal width between its extremes."""
    bin_value: Literal["mean", "midpoint"] = "mean"
    """What a bin decodes to: the mean of the data in it, or the middle of its edges."""
    goal_dims: tuple[int, ...] = ()
    """Observation dimensions of the final state that are put first as the goal; empty for no goal."""
    rewards: bool = True
    """Whether each transition carries its reward and return-to-go."""
    discount: float = 0.99
    """Discount of the return-to-go."""
    value_includes_reward: bool = False
    """Whether the return-to-go of a step counts the step's own reward (the paper) or not (its code)."""
    termination_penalty: float | None = None
    """Replaces the reward of a step that truly ended the task; null leaves rewards as recorded."""
    truncated: Literal["stop", "continue"] = "stop"
    """What a return-to-go counts after a recording that the task did not end: nothing, or its mean reward for ever."""
    final_observation: bool = True
    """Whether the state after the last action is part of the data."""
    max_episode_steps: int | None = None
    """Stop tokens that follow a true end are trained on up to this step of the episode; null: without limit."""
    loss_mask: Literal["target", "input"] = "target"
    """A prediction counts where its target is real, or (the authors' code) where its input is."""

    def __post_init__(self) -> None:
        """Refuse values no stage could work with."""
        require(self.num_bins >= 1, "tokens.num_bins must be at least 1", self.num_bins)
        require(self.num_bins <= 32767, "tokens.num_bins must be at most 32767", self.num_bins)
        require(
            self.termination_penalty is None or isfinite(self.termination_penalty),
            "tokens.termination_penalty must be finite",
            self.termination_penalty,
        )
        require(0.0 <= self.discount <= 1.0, "tokens.discount must lie in [0, 1]", self.discount)
        require(
            self.truncated == "stop" or self.discount < 1.0,
            "tokens.truncated continue needs a tokens.discount below 1",
            self.discount,
        )
        require(min(self.goal_dims, default=0) >= 0, "tokens.goal_dims must not be negative", self.goal_dims)
        require(
            self.max_episode_steps is None or self.max_episode_steps >= 1,
            "tokens.max_episode_steps must be at least 1",
            self.max_episode_steps,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT."""

    window: int = 10
    """Transitions the model sees at once."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads per block."""
    width: int = 128
    """Size of each token's hidden state."""
    dropout: float = 0.1
    """Share of activations dropped in training, in embeddings, attention and residual branches."""
    map_channels: int = 32
    """Channels of the encoder that reads each episode's context (a map), where the data has one; 0: it is not read."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        require(self.map_channels >= 0, "model.map_channels must not be negative", self.map_channels)
        for name in ("window", "num_layers", "num_heads", "width"):
            require(getattr(self, name) >= 1, f"model.{name} must be at least 1", getattr(self, name))
        require(
            self.width % self.num_heads == 0, f"model.width must be a multiple of {self.num_heads} heads", self.width
        )
        require(0.0 <= self.dropout < 1.0, "model.dropout must lie in [0, 1)", self.dropout)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    epochs: float = 50.0
    """Passes over the data (see epoch_size)."""
    epoch_size: int | None = None
    """Windows that count as one epoch; null: every window of the dataset once."""
    steps: int | None = None
    """Optimiser steps; overrides epochs."""
    batch_size: int = 256
    """Windows per step."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    warmup_steps: int | None = None
    """Steps over which the rate climbs to its peak; null: one pass over the data, a tenth of the run at most."""
    final_lr_share: float = 0.1
    """Share of the peak rate that the cosine ends at."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on the weights of linear layers only."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    action_weight: float = 5.0
    """Loss weight of action tokens; the others weigh 1."""
    seed: int = 0
    """Of the initial weights, the batches and the dropout."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 20
    """Steps between metrics."""
    augment: Literal["none", "grid"] = "none"
    """What else windows are shown as: `grid` turns, mirrors and shifts agents on a square map (MiniGrid) at random."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the products in the model; auto: bf16 on a GPU that has it, float32 elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch compiles the loss; auto: on a GPU, where a C compiler is found."""
    graph: bool = True
    """Whether a process alone on a GPU records a whole step as a CUDA graph and replays it."""

    def __post_init__(self) -> None:
        """Refuse a run that could not start."""
        for name in ("batch_size", "checkpoint_every", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name} must be at least 1", getattr(self, name))
        require(0 < self.epochs < inf, "train.epochs must be above 0", self.epochs)
        for name in ("epoch_size", "steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"train.{name} must be at least 1", value)
        for name in ("warmup_steps", "weight_decay", "action_weight"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"train.{name} must not be negative", value)
        require(0.0 <= self.final_lr_share <= 1.0, "train.final_lr_share must lie in [0, 1]", self.final_lr_share)
        require(min(self.betas) >= 0.0 and max(self.betas) < 1.0, "train.betas must lie in [0, 1)", self.betas)
        require(self.learning_rate > 0, "train.learning_rate must be above 0", self.learning_rate)
        require(self.grad_clip > 0, "train.grad_clip must be above 0", self.grad_clip)
        require(self.seed >= 0, "train.seed must not be negative", self.seed)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """One search, and how often it is repeated."""

    beam_width: int = 32
    """Candidates kept after every selection."""
    horizon: int = 5
    """Transitions planned ahead of the current state."""
    context: int = 4
    """Past transitions a plan starts from, at most."""
    window: int | None = None
    """Transitions the model sees at once while planning; older ones slide out. null: as many as in training."""
    expansion: int = 2
    """Actions sampled for every candidate (planning for return)."""
    temperature: float = 1.0
    """Sharpens (below 1) or flattens (above 1) the distributions sampled from."""
    action_top_k: int | None = None
    """Sample actions from so many most likely tokens only."""
    action_nucleus: float | None = 0.4
    """Sample actions from the most likely tokens that hold this share of the mass; null for all."""
    action_middle: float | None = None
    """Sample actions from the bins around the median that hold this share of the mass, half on either side; takes the
    place of the two filters above. For numbers whose limits hold much of the mass."""
    opening_nucleus: float | None = None
    """Sample the first action of an episode, which decides whose behaviour is followed, from the most likely tokens
    that hold this share of the mass; null: as all others."""
    observation_top_k: int | None = 1
    """Sample states from so many most likely tokens only; 1 predicts the most likely state."""
    observation_nucleus: float | None = None
    """Sample states from the most likely tokens that hold this share of the mass; null for all."""
    imitate: Literal["mode", "median"] = "mode"
    """What plans without an objective (imitation, goals) take of the predictions: their mode, the most likely
    continuation that a beam search finds; or their median, number by number, the same however bins are cut."""
    estimate: Literal["mean", "percentile", "sampled"] = "mean"
    """How a predicted reward or value is summed up: its mean, a percentile, or one sample."""
    percentile: float = 0.5
    """Share of the predicted mass below the estimate, for search.estimate percentile."""
    discount: float | None = None
    """Discount of rewards along a plan; null: as in training."""
    replan_every: int = 1
    """Actions taken from one plan before the next is made."""
    decoder: Literal["auto", "fused", "cached", "naive"] = "auto"
    """cached is the exact key/value cache, fused the same with one kernel for a run of slots (on GPUs), naive a full
    forward pass per token (slow, for comparison). auto: fused on a GPU where it can be, else cached."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Numbers that the fused decoder multiplies. auto: bf16 where the model's sizes allow it."""

    def __post_init__(self) -> None:
        """Refuse a search that could not take a step."""
        require(self.beam_width >= 1, "search.beam_width must be at least 1", self.beam_width)
        require(self.horizon >= 1, "search.horizon must be at least 1", self.horizon)
        require(self.context >= 0, "search.context must not be negative", self.context)
        require(self.expansion >= 1, "search.expansion must be at least 1", self.expansion)
        require(self.temperature > 0, "search.temperature must be above 0", self.temperature)
        require(0.0 < self.percentile < 1.0, "search.percentile must lie in (0, 1)", self.percentile)
        require(self.discount is None or 0 <= self.discount <= 1, "search.discount must lie in [0, 1]", self.discount)
        for name in ("action_top_k", "observation_top_k"):
            count = getattr(self, name)
            require(count is None or count >= 1, f"search.{name} must be at least 1", count)
        for name in ("action_nucleus", "opening_nucleus", "observation_nucleus"):
            share = getattr(self, name)
            require(share is None or 0.0 < share <= 1.0, f"search.{name} must lie in (0, 1]", share)
        # With less, rounding could leave nothing where the median falls exactly between two bins.
        middle = self.action_middle
        require(middle is None or 0.001 <= middle <= 1.0, "search.action_middle must lie in [0.001, 1]", middle)
        require(self.window is None or self.window >= 1, "search.window must be at least 1", self.window)
        require(
            1 <= self.replan_every <= self.horizon,
            f"search.replan_every must lie between 1 and the horizon of {self.horizon}",
            self.replan_every,
        )


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe from data to plan."""

    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: SearchConfig = field(default_factory=SearchConfig)


PresetName = Literal[
    "default",
    "paper",
    "reference",
    "halfcheetah",
    "halfcheetah-medium-expert",
    "walker2d-medium-expert",
    "walker2d-medium-replay",
]

_REFERENCE = Preset(
    tokens=TokenConfig(
        bin_value="midpoint",
        termination_penalty=-100.0,
        final_observation=False,
        max_episode_steps=1000,
        loss_mask="input",
    ),
    train=TrainConfig(epochs=50, epoch_size=1_000_000),
    plan=SearchConfig(beam_width=128, horizon=15, context=4, window=5),
)

PRESETS: dict[PresetName, Preset] = {
    "default": Preset(),
    "paper": Preset(
        tokens=TokenConfig(value_includes_reward=True, final_observation=False),
        train=TrainConfig(
            epochs=80,
            learning_rate=2.5e-4,
            warmup_steps=2000,
            final_lr_share=0.0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            action_weight=1.0,
        ),
        plan=SearchConfig(beam_width=256, horizon=15, context=5, action_top_k=20, action_nucleus=None),
    ),
    "reference": _REFERENCE,
    # The tasks whose search the authors' code sets apart.
    "halfcheetah": replace(_REFERENCE, plan=replace(_REFERENCE.plan, beam_width=32, horizon=5)),
    "halfcheetah-medium-expert": replace(_REFERENCE, plan=replace(_REFERENCE.plan, beam_width=32)),
    "walker2d-medium-expert": replace(_REFERENCE, plan=replace(_REFERENCE.plan, horizon=5)),
    "walker2d-medium-replay": replace(
        _REFERENCE,
        plan=replace(_REFERENCE.plan, beam_width=32, horizon=20, action_top_k=40, action_nucleus=None),
    ),
}
