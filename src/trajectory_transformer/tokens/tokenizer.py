"""Episodes to tokens and back: layout, discretizer and settings as one object."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import (
    Dataset,
    Dimension,
    DoubleArray,
    Episode,
    default_dimensions,
    returns_to_go,
)
from trajectory_transformer.tokens.discretizer import Discretizer, TokenArray
from trajectory_transformer.tokens.layout import TokenLayout

Reals = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Conventions:
    """Details on which this package and the authors' code differ (`tokens.authors_conventions`)."""

    bin_value: Literal["mean", "midpoint"] = "mean"  # what a bin decodes to
    final_observation: bool = True  # whether the state after the last action is part of the data
    max_episode_steps: int | None = None  # stop tokens after termination are trained on up to this step
    loss_mask: Literal["target", "input"] = "target"  # a prediction counts where its target or its input is real


PENALTY_IN_REWARDS = 30  # mean absolute rewards that an early end costs; -100 in hopper, as in the authors' code
CONVENTIONS = {
    False: Conventions(),
    True: Conventions(bin_value="midpoint", final_observation=False, max_episode_steps=1000, loss_mask="input"),
}


@dataclass(frozen=True)
class Decoded:
    """Transitions in real units, NaN for stop tokens: where the end of the episode is predicted."""

    states: DoubleArray  # [..., h, O], or [..., h + 1, O] if the tokens end with a state
    actions: DoubleArray  # [..., h, A]
    rewards: DoubleArray | None  # [..., h]; None for a layout without rewards


@dataclass(frozen=True)
class Tokenizer:
    """Encodes episodes, builds prompts and decodes tokens."""

    layout: TokenLayout
    discretizer: Discretizer
    config: TokenConfig
    observation_dimensions: tuple[Dimension, ...] = ()  # [O]; empty: continuous, named "observation 0", ...
    action_dimensions: tuple[Dimension, ...] = ()  # [A]

    def __post_init__(self) -> None:
        """Fill in default dimensions; without data, an automatic termination penalty is none."""
        object.__setattr__(self, "config", with_penalty(self.config, ()))
        for kind, count in (("observation", self.layout.observation_dim), ("action", self.layout.action_dim)):
            if not getattr(self, f"{kind}_dimensions"):
                object.__setattr__(self, f"{kind}_dimensions", default_dimensions(kind, count))

    @classmethod
    def fit(cls, dataset: Dataset, config: TokenConfig) -> "Tokenizer":
        """Fit the bins of every slot on all steps of a dataset."""
        layout = layout_of(dataset, config)
        config = with_penalty(config, dataset)
        parts = [slot_values(episode, config) for episode in dataset]
        slots = [column for part in zip(*parts, strict=True) for column in np.concatenate(part).T]
        discretizer = fit_discretizer(slots, dataset, config)
        return cls(layout, discretizer, config, dataset.observation_dimensions, dataset.action_dimensions)

    @property
    def conventions(self) -> Conventions:
        """The details of the authors' code, or ours."""
        return CONVENTIONS[self.config.authors_conventions]

    @property
    def stop(self) -> int:
        """The stop token."""
        return self.discretizer.stop

    def encode(self, *episodes: Episode) -> TokenArray:
        """Token rows of episodes, one after the other: [T (+ 1), D] each.

        The row of a final state has stop tokens in its other slots.
        """
        layout = self.layout
        parts = [slot_values(episode, self.config) for episode in episodes]
        observations, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows = np.full((len(observations), layout.size), self.stop, dtype=np.int64)
        rows[:, layout.observation] = self.discretizer.encode(observations, layout.observation)
        rest = slice(layout.observation_dim, layout.size)
        pairs = zip(parts, episodes, strict=True)
        acted = np.concatenate([np.arange(len(columns[0])) < len(episode) for columns, episode in pairs])
        rows[acted, rest] = self.discretizer.encode(np.concatenate(others, axis=1), rest)
        return rows

    def encode_states(self, observations: Reals) -> TokenArray:
        """Tokens of states: observations [..., O] -> [..., O]."""
        return self.discretizer.encode(observations, self.layout.observation)

    def far_outside(self, observations: Reals) -> npt.NDArray[np.bool_]:
        """Where states leave the range of the training data by more than its width: [..., O] -> [..., O]."""
        low, high = self._trusted_range
        return np.asarray((observations < low) | (observations > high))

    @functools.cached_property
    def _observed_range(self) -> tuple[DoubleArray, DoubleArray]:
        """Smallest and largest observation of each dimension in training: [O], [O]."""
        edges = self.discretizer.edges[self.layout.observation]
        return np.array([each[0] for each in edges]), np.array([each[-1] for each in edges])

    @functools.cached_property
    def _trusted_range(self) -> tuple[DoubleArray, DoubleArray]:
        """The observed range with a margin of its width: [O], [O]."""
        low, high = self._observed_range
        width = high - low
        margin = np.where(width > 0, width, 0.1 * np.maximum(np.abs(low), 1.0))
        return low - margin, high + margin

    def describe_outside(self, observation: Reals) -> str | None:
        """The first entry of a state that is far outside the training range, as a sentence: observation [O]."""
        outside = np.flatnonzero(self.far_outside(observation))
        if not len(outside):
            return None
        dim, (low, high) = int(outside[0]), self._observed_range
        name = self.observation_dimensions[dim].name
        return f"{name} is {observation[dim]:.4g}, in training it was {low[dim]:.4g} to {high[dim]:.4g}"

    def encode_goals(self, goals: Reals) -> TokenArray:
        """Tokens of goals, in the bins of the observation dimensions they refer to: goals [N, >= G] -> [N, G]."""
        encode = self.discretizer.encode
        tokens = [encode(goals[:, i : i + 1], slice(dim, dim + 1)) for i, dim in enumerate(self.config.goal_dims)]
        return np.concatenate(tokens, axis=1) if tokens else np.zeros((len(goals), 0), dtype=np.int64)

    def goals_of(self, episodes: Sequence[Episode]) -> TokenArray:
        """Goal tokens of recorded episodes, from their final states: [N, G]."""
        return self.encode_goals(np.stack([each.observations[-1, list(self.config.goal_dims)] for each in episodes]))

    def transition(self, state: TokenArray, action: TokenArray, reward: float) -> TokenArray:
        """The row of a past transition: state tokens [O], action tokens [A] -> [D]."""
        if not self.layout.rewards:
            return np.concatenate([state, action])
        slot = self.layout.reward
        reward_token = self.discretizer.encode(np.array([reward]), slice(slot, slot + 1))
        # The return that will follow is not known yet. No token attends to it; the top bin fills the slot.
        return np.concatenate([state, action, reward_token, [self.discretizer.num_bins - 1]])

    def prompt(self, goal: TokenArray, past: Sequence[TokenArray], state: TokenArray) -> TokenArray:
        """What a search starts from: goal tokens [G], rows of past transitions [D], state tokens [O] -> [L]."""
        return np.concatenate([goal, *past, state])

    def decode(self, state: TokenArray, tokens: TokenArray) -> Decoded:
        """Real units of a continuation: state tokens [..., O], then tokens [..., n] from the first action on."""
        layout = self.layout
        tokens = np.concatenate([state, tokens], axis=-1)
        num_actions = (tokens.shape[-1] - layout.observation_dim + layout.size - 1) // layout.size
        missing = -tokens.shape[-1] % layout.size
        padding = np.full((*tokens.shape[:-1], missing), self.stop)
        rows = np.concatenate([tokens, padding], axis=-1).reshape(*tokens.shape[:-1], -1, layout.size)
        acted = rows[..., :num_actions, :]
        rewards = None
        if layout.rewards:
            slot = slice(layout.reward, layout.reward + 1)
            rewards = self.discretizer.decode(acted[..., slot], slot)[..., 0]
        return Decoded(
            states=self.discretizer.decode(rows[..., layout.observation], layout.observation),
            actions=self.discretizer.decode(acted[..., layout.action], layout.action),
            rewards=rewards,
        )

    def decode_action(self, tokens: TokenArray) -> DoubleArray:
        """Real units of actions: tokens [..., A] -> [..., A]."""
        return self.discretizer.decode(tokens, self.layout.action)


def layout_of(dataset: Dataset, config: TokenConfig) -> TokenLayout:
    """The slots of a dataset's transitions."""
    if max(config.goal_dims, default=-1) >= dataset.observation_dim:
        raise ValueError(
            f"tokens.goal_dims must lie below the {dataset.observation_dim} observation dimensions, "
            f"got {config.goal_dims}"
        )
    if config.rewards and not dataset.has_rewards:
        raise ValueError("tokens.rewards needs recorded rewards, the dataset has none: set --tokens.rewards false")
    return TokenLayout(
        len(config.goal_dims), dataset.observation_dim, dataset.action_dim, config.rewards, dataset.map_shape
    )


def slot_values(episode: Episode, config: TokenConfig) -> list[DoubleArray]:
    """Real values of all slots of an episode: observations [T (+ 1), O], actions [T, A], r [T, 1], v [T, 1]."""
    last = len(episode) + CONVENTIONS[config.authors_conventions].final_observation
    columns = [episode.observations[:last].astype(np.float64), episode.actions.astype(np.float64)]
    if config.rewards:
        rewards, after = rewards_of(episode, config)
        values = returns_to_go(rewards, config.discount, include_own=config.value_includes_reward, after=after)
        columns += [rewards[:, None], values[:, None]]
    return columns


def with_penalty(config: TokenConfig, episodes: Iterable[Episode]) -> TokenConfig:
    """Settings with a termination penalty that is a number or None: `auto` depends on the data."""
    if config.termination_penalty != "auto":
        return config
    facts = [
        (len(episode), episode.total_reward, float(np.abs(episode.rewards).sum()), episode.terminated)
        for episode in episodes
        if config.rewards and episode.rewards is not None
    ]
    lengths, returns, sizes, terminated = np.array(facts).reshape(-1, 4).T
    # The covariance of length and return, up to a factor.
    longer_is_better = float(((lengths - lengths.mean()) * returns).sum()) > 0.0 if facts else False
    penalty = -PENALTY_IN_REWARDS * float(sizes.sum() / lengths.sum()) if longer_is_better else None
    return replace(config, termination_penalty=penalty if terminated.any() else None)


def rewards_of(episode: Episode, config: TokenConfig) -> tuple[DoubleArray, float]:
    """Rewards that the model is trained on [T], and the discounted return after the last step."""
    assert episode.rewards is not None
    rewards = episode.rewards.astype(np.float64)
    assert config.termination_penalty != "auto", "with_penalty() makes it a number"
    if episode.terminated and config.termination_penalty is not None:
        rewards[-1] = config.termination_penalty
    goes_on = config.truncated == "continue" and not episode.terminated
    return rewards, float(rewards.mean()) / (1.0 - config.discount) if goes_on else 0.0


def fit_discretizer(slots: Sequence[DoubleArray], dataset: Dataset, config: TokenConfig) -> Discretizer:
    """Fit the values of every slot; `dataset` tells which dimensions are categories."""
    # Observations with more categories than bins are treated as numbers: neighbours share a bin.
    observed = [each.categories for each in dataset.observation_dimensions]
    observed = [count if count <= config.num_bins else 0 for count in observed]
    others = len(slots) - dataset.observation_dim - dataset.action_dim
    categories = (*observed, *(each.categories for each in dataset.action_dimensions), *[0] * others)
    bin_value = CONVENTIONS[config.authors_conventions].bin_value
    return Discretizer.fit(slots, config.num_bins, edges=config.discretizer, bin_value=bin_value, categories=categories)
