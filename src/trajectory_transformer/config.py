"""Settings of every stage as frozen dataclasses, and presets that set all of them at once.

Plain values only: no files, clocks, random names or classes. A setting exists because a user would change it. Details
that only reproduce the authors' code are grouped in one switch, `tokens.authors_conventions`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from math import inf, isfinite
from typing import Any, Literal

FIRST_SEED = 1_000_000
"""Episode i of an evaluation is reset with this seed + i by default; data is collected with other seeds."""


def require(condition: bool, rule: str, found: object) -> None:
    """Raise a ValueError that states the rule and the value that breaks it."""
    if not condition:
        raise ValueError(f"{rule}, got {found}")


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings under dotted names, as flags have them: {"action": {"top_k": 1}} -> {"action.top_k": 1}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = dotted(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": each for key, each in inner.items()}
    return flat


def differences(name: str, known: object, given: object) -> str:
    """What differs between known and given settings, for messages: "expected model.width 16, got 32"."""
    plain = [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in (known, given)]
    old, new = (dotted({name: each}) for each in plain)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"expected {key} {old.get(key)}, got {new.get(key)}" for key in changed)


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """How episodes become tokens."""

    num_bins: int = 100
    """Bins per dimension. The vocabulary of each dimension has one more token, the stop token."""
    discretizer: Literal["quantile", "uniform"] = "quantile"
    """Bins of equal mass in the data, or of equal width between its minimum and maximum."""
    goal_dims: tuple[int, ...] = ()
    """Observation dimensions whose final values are prepended as the goal; empty for no goal."""
    rewards: bool = True
    """Whether each transition holds its reward and return-to-go."""
    discount: float = 0.99
    """Discount of the return-to-go."""
    value_includes_reward: bool = False
    """Whether the return-to-go of a step includes the step's own reward (as in the paper) or not (as in its code)."""
    termination_penalty: float | Literal["auto"] | None = None
    """Replaces the reward of a step that terminated the task; null keeps rewards as recorded. auto: -30 times the mean
    absolute reward if longer episodes of the data have higher returns, so that an early end is a failure; else null."""
    truncated: Literal["stop", "continue"] = "continue"
    """Return-to-go after a truncated episode: nothing more, or the episode's mean reward forever."""
    authors_conventions: bool = False
    """Follow the authors' code in details: bins decode to midpoints, final states are left out, no window starts at the
    last step of an episode, a prediction counts where its input is real, and stop tokens are trained on up to step
    1000."""

    def __post_init__(self) -> None:
        """Refuse values that no stage can use."""
        require(self.num_bins >= 2, "tokens.num_bins must be at least 2: one bin tells nothing", self.num_bins)
        require(self.num_bins <= 32767, "tokens.num_bins must be at most 32767", self.num_bins)
        require(
            not isinstance(self.termination_penalty, float) or isfinite(self.termination_penalty),
            "tokens.termination_penalty must be finite",
            self.termination_penalty,
        )
        require(0.0 <= self.discount <= 1.0, "tokens.discount must lie in [0, 1]", self.discount)
        require(
            self.truncated == "stop" or self.discount < 1.0,
            "tokens.truncated continue needs a tokens.discount below 1 (set tokens.truncated stop for a discount of 1)",
            self.discount,
        )
        require(min(self.goal_dims, default=0) >= 0, "tokens.goal_dims must not be negative", self.goal_dims)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT."""

    window: int = 10
    """Transitions in one training window, and the most that the model can attend to."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads per block."""
    width: int = 128
    """Size of each token's hidden state."""
    dropout: float = 0.0
    """Dropout probability in embeddings, attention and residual branches during training."""
    map_channels: int = 32
    """Channels of the convolutional encoder for maps, if the episodes have maps; 0 ignores the maps."""

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
    """What training computes."""

    epochs: float | None = None
    """Passes over all windows of the dataset; null: 2, but at least 2,000 steps, unless steps are given."""
    steps: int | None = None
    """Optimizer steps, instead of epochs."""
    batch_size: int = 256
    """Windows per step."""
    learning_rate: float = 4e-3
    """Peak learning rate; it decays with one cosine."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; null: one pass over the data, at most a tenth of the run."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """adamw: the authors' code (betas 0.9 and 0.95, weight decay 0.1 on linear layers and heads, down to a tenth of the
    peak rate). adam: the paper (betas 0.9 and 0.999, no weight decay, down to zero)."""
    action_weight: float = 5.0
    """Loss weight of action tokens; all others have weight 1."""
    augment: Literal["none", "grid"] = "none"
    """grid: rotate, mirror and shift agents on square maps (MiniGrid) at random."""
    validation: float = 0.0
    """Share of the episodes that is held out to measure the loss on; the weights with the smallest one are kept. 0:
    train on all episodes."""
    patience: int | None = None
    """Stop after this many validations in a row without a smaller loss (there are at most 50 in a run); null: never."""
    backend: Literal["auto", "eager", "compiled", "fused"] = "auto"
    """eager: float32, operation by operation. compiled: torch.compile, bfloat16 matmuls and a CUDA graph. fused: Triton
    kernels and a CUDA graph. auto: the fastest one that the device and the model allow."""

    def __post_init__(self) -> None:
        """Refuse a run that could not start."""
        require(self.batch_size >= 1, "train.batch_size must be at least 1", self.batch_size)
        require(self.epochs is None or 0 < self.epochs < inf, "train.epochs must be above 0", self.epochs)
        require(
            self.epochs is None or self.steps is None,
            "train.epochs and train.steps exclude each other: set one of them to null",
            f"{self.epochs} and {self.steps}",
        )
        require(self.steps is None or self.steps >= 1, "train.steps must be at least 1", self.steps)
        for name in ("warmup_steps", "action_weight"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"train.{name} must not be negative", value)
        require(0.0 <= self.validation < 1.0, "train.validation must lie in [0, 1)", self.validation)
        require(self.patience is None or self.patience >= 1, "train.patience must be at least 1", self.patience)
        require(
            self.patience is None or self.validation > 0.0,
            "train.patience needs held-out episodes: set train.validation, for example 0.05",
            f"patience {self.patience}",
        )
        require(self.learning_rate > 0, "train.learning_rate must be above 0", self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How one kind of token is sampled from the predicted distribution."""

    temperature: float = 1.0
    """Sharpens (below 1) or flattens (above 1) the distribution."""
    top_k: int | None = None
    """Sample from this many most likely tokens; null for all."""
    nucleus: float | None = None
    """Sample from the most likely tokens that hold this share of the probability mass; null for all."""
    middle: float | None = None
    """Sample from the bins around the median that hold this share of the mass; replaces top_k and nucleus. Categories
    have no order: actions with categories are sampled from a nucleus of the same share instead."""

    def __post_init__(self) -> None:
        """Refuse a distribution that could not be sampled."""
        require(self.temperature > 0, "a sampler's temperature must be above 0", self.temperature)
        require(self.top_k is None or self.top_k >= 1, "a sampler's top_k must be at least 1", self.top_k)
        require(
            self.nucleus is None or 0.0 < self.nucleus <= 1.0, "a sampler's nucleus must lie in (0, 1]", self.nucleus
        )
        # With less, rounding could leave no bin where the median falls exactly between two bins.
        require(
            self.middle is None or 0.001 <= self.middle <= 1.0,
            "a sampler's middle must lie in [0.001, 1]",
            self.middle,
        )

    @property
    def greedy(self) -> bool:
        """Whether it always takes the most likely token."""
        return self.top_k == 1 and self.middle is None


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """One search, and how often it is repeated."""

    beam_width: int = 32
    """Candidates kept after each selection."""
    horizon: int = 5
    """Transitions planned ahead of the current state."""
    context: int = 4
    """Past transitions in the prompt, at most."""
    window: int | None = None
    """Transitions the model attends to while planning; older ones slide out. null: as many as in training."""
    expansion: int = 2
    """Actions sampled for each candidate when planning for return."""
    action: Sampler = field(default_factory=lambda: Sampler(middle=0.4))
    """How actions are sampled."""
    first_action: Sampler | None = field(default_factory=Sampler)
    """How the first action of an episode is sampled; null, or without a context: like all others."""
    observation: Sampler = field(default_factory=lambda: Sampler(top_k=1))
    """How states are sampled; top_k 1 predicts the most likely state."""
    reward: Sampler = field(default_factory=lambda: Sampler(top_k=1))
    """How the reward and value tokens of a candidate are sampled; top_k 1 appends the most likely ones. Candidates are
    ranked by the whole predicted distribution in any case."""
    imitate: Literal["mode", "median"] = "mode"
    """What imitation and goal reaching take from the predictions: the most likely continuation that a beam search
    finds, or the median of each dimension in turn."""
    replan_every: int = 1
    """Actions taken from one plan before the next plan is made."""
    backend: Literal["auto", "fused", "fused-float32", "cached", "cached-bfloat16", "naive"] = "auto"
    """fused: CUDA kernels in bfloat16 (or float32) and a CUDA graph. cached: an exact key/value cache; cached-bfloat16
    rounds its matmuls, keys and values. naive: a full forward pass per token, for comparison. auto: fused on a GPU that
    supports it, else cached."""

    def __post_init__(self) -> None:
        """Refuse a search that could not take a step."""
        for name in ("beam_width", "horizon", "expansion"):
            require(getattr(self, name) >= 1, f"search.{name} must be at least 1", getattr(self, name))
        require(self.context >= 0, "search.context must not be negative", self.context)
        require(self.window is None or self.window >= 1, "search.window must be at least 1", self.window)
        require(
            1 <= self.replan_every <= self.horizon,
            f"search.replan_every must lie between 1 and the horizon of {self.horizon}",
            self.replan_every,
        )


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    """The ensemble and its training. Sizes, rate and weight decay are those of Chua et al. for halfcheetah."""

    num_networks: int = 7
    """Networks that are trained, each on its own bootstrap sample of the data."""
    num_elites: int = 5
    """Networks that predict: those with the smallest held-out loss."""
    num_layers: int = 4
    """Hidden layers."""
    width: int = 200
    """Units of each hidden layer."""
    rewards: bool = False
    """Whether the networks predict rewards as well."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    weight_decay: float = 1e-4
    """L2 penalty of the output layer; that of the hidden layers is 0.25, 0.5, 0.75, 0.75, ... times as large."""
    batch_size: int = 256
    """Transitions per network and step."""
    epochs: int = 100
    """Passes over the data, at most."""
    patience: int = 5
    """Training ends after this many passes in which the held-out loss of no network improved."""
    held_out: float = 0.1
    """Share of the transitions that is not trained on. With 0 training runs to its end and keeps the last weights."""
    tf32: bool = True
    """Whether matmuls of the training round their inputs to TF32 on a GPU; predictions never do."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built or trained."""
        for name in ("num_networks", "num_elites", "num_layers", "width", "batch_size", "epochs", "patience"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        require(
            self.num_elites <= self.num_networks,
            f"num_elites must be at most the {self.num_networks} networks",
            self.num_elites,
        )
        require(self.learning_rate > 0, "learning_rate must be above 0", self.learning_rate)
        require(self.weight_decay >= 0, "weight_decay must not be negative", self.weight_decay)
        require(0 <= self.held_out < 1, "held_out must lie in [0, 1)", self.held_out)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe from data to plan."""

    tokens: TokenConfig = field(default_factory=TokenConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


PresetName = Literal[
    "default",
    "small",
    "paper",
    "reference",
    "halfcheetah",
    "halfcheetah-medium-expert",
    "hopper-medium-replay",
    "walker2d-medium-expert",
    "walker2d-medium-replay",
]


def _reference(epochs: int = 50, **search: object) -> Preset:
    """The recipe of the authors' released code, with a task's own epochs and search settings."""
    plain = SearchConfig(
        beam_width=128, horizon=15, context=4, window=5, action=Sampler(nucleus=0.4), first_action=None
    )
    return Preset(
        tokens=TokenConfig(termination_penalty=-100.0, truncated="stop", authors_conventions=True),
        model=ModelConfig(dropout=0.1),
        # An epoch is a million windows, whatever the size of the dataset.
        train=TrainConfig(steps=epochs * 1_000_000 // 256, learning_rate=6e-4),
        search=replace(plain, **search),  # type: ignore[arg-type]
    )


PRESETS: dict[PresetName, Preset] = {
    "default": Preset(tokens=TokenConfig(termination_penalty="auto")),
    # Minutes on the CPU of a laptop; `tt train` takes it where there is no GPU.
    "small": Preset(
        tokens=TokenConfig(termination_penalty="auto"),
        model=ModelConfig(window=5, num_layers=2, width=64, dropout=0.0),
        train=TrainConfig(steps=4500, batch_size=64, learning_rate=2e-3),
    ),
    "paper": Preset(
        tokens=TokenConfig(value_includes_reward=True, truncated="stop"),
        model=ModelConfig(dropout=0.1),
        train=TrainConfig(epochs=80, learning_rate=2.5e-4, warmup_steps=2000, optimizer="adam", action_weight=1.0),
        search=SearchConfig(beam_width=256, horizon=15, context=5, action=Sampler(top_k=20), first_action=None),
    ),
    "reference": _reference(),
    # Tasks with settings of their own in the authors' code.
    "halfcheetah": _reference(beam_width=32, horizon=5),
    "halfcheetah-medium-expert": _reference(beam_width=32),
    "walker2d-medium-expert": _reference(horizon=5),
    "hopper-medium-replay": _reference(epochs=80),
    "walker2d-medium-replay": _reference(epochs=80, beam_width=32, horizon=20, action=Sampler(top_k=40)),
}
