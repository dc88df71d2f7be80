"""Episodes to tokens, and tokens to the windows a model is trained on.

A window is W transitions from any step of an episode, the goal in front. Past the end of an episode every slot holds
the stop token: trained on where the task truly ended, weightless where only the recording did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode, returns_to_go
from trajectory_transformer.tokens.discretizer import Discretizer
from trajectory_transformer.tokens.layout import TokenLayout


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


def episode_columns(episode: Episode, config: TokenConfig) -> list[DoubleArray]:
    """Real values behind the slots of an episode: observations [T (+ 1), O], actions [T, A], r [T, 1], v [T, 1]."""
    last = len(episode) + config.final_observation
    columns = [episode.observations[:last].astype(np.float64), episode.actions.astype(np.float64)]
    if config.rewards:
        rewards, after = rewards_of(episode, config)
        values = returns_to_go(rewards, config.discount, include_own=config.value_includes_reward, after=after)
        columns += [rewards[:, None], values[:, None]]
    return columns


def rewards_of(episode: Episode, config: TokenConfig) -> tuple[DoubleArray, float]:
    """Rewards as the model is to know them [T], and the discounted return from the state behind the last step on."""
    assert episode.rewards is not None
    rewards = episode.rewards.astype(np.float64)
    if episode.terminated and config.termination_penalty is not None:
        rewards[-1] = config.termination_penalty
    goes_on = config.truncated == "continue" and not episode.terminated
    return rewards, float(rewards.mean()) / (1.0 - config.discount) if goes_on else 0.0


def fit_discretizer(dataset: Dataset, config: TokenConfig) -> Discretizer:
    """Fit every slot on all steps of a dataset."""
    parts = [episode_columns(episode, config) for episode in dataset]
    slots = [column for part in zip(*parts, strict=True) for column in np.concatenate(part).T]
    others = len(slots) - dataset.observation_dim - dataset.action_dim
    # Observations of more kinds than there are bins are numbers: neighbours share a bin.
    observed = [d.categories if d.categories <= config.num_bins else 0 for d in dataset.observation_dimensions]
    categories = (*observed, *(d.categories for d in dataset.action_dimensions), *[0] * others)
    return Discretizer.fit(
        slots, config.num_bins, edges=config.discretizer, bin_value=config.bin_value, categories=categories
    )


@dataclass(frozen=True)
class TokenizedDataset:
    """Every transition of a dataset as one row of tokens, a byte each where the vocabulary allows."""

    rows: Tensor  # [R, D] uint8 or int16; an episode of T steps has T rows, T + 1 with its final state
    goals: Tensor  # [N, G], same type
    first_row: Tensor  # [N] int64, where each episode starts in rows
    num_steps: Tensor  # [N] int64, steps of each episode: each starts a window
    num_rows: Tensor  # [N] int64
    terminated: Tensor  # [N] bool
    maps: Tensor | None = None  # [N, C, H, W] uint8 or float32, where the model reads them

    # Both are asked for at every step of training, and the first would wait for the device each time.
    @cached_property
    def num_windows(self) -> int:
        """Windows, one for every recorded step."""
        return int(self.num_steps.sum())

    @cached_property
    def end_window(self) -> Tensor:
        """The number [N] of the window after each episode's last."""
        return self.num_steps.cumsum(0)

    def to(self, device: torch.device) -> "TokenizedDataset":
        """The same dataset on another device."""
        present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return TokenizedDataset(**{name: getattr(self, name).to(device) for name in present})


def token_type(discretizer: Discretizer) -> type[np.uint8] | type[np.int16]:
    """The smallest type that holds every token: a byte where the vocabulary allows."""
    return np.uint8 if discretizer.stop < 256 else np.int16


def tokenize(dataset: Dataset, discretizer: Discretizer, layout: TokenLayout, config: TokenConfig) -> TokenizedDataset:
    """Turn all episodes into token rows."""
    dtype = token_type(discretizer)
    ends = np.stack([episode.observations[-1, list(config.goal_dims)] for episode in dataset])
    num_steps = torch.tensor([len(episode) for episode in dataset])
    lengths = num_steps + int(config.final_observation)
    # Many episodes at a time: the discretiser's searches cost far less in one piece.
    chunks = [dataset.episodes[start : start + 1000] for start in range(0, len(dataset), 1000)]
    rows = [_encode_chunk(chunk, discretizer, layout, config).astype(dtype) for chunk in chunks]
    return TokenizedDataset(
        rows=torch.from_numpy(np.concatenate(rows)),
        goals=torch.from_numpy(encode_goals(ends, discretizer, config).astype(dtype)),
        first_row=lengths.cumsum(0) - lengths,
        num_steps=num_steps,
        num_rows=lengths,
        terminated=torch.tensor([episode.terminated for episode in dataset]),
        maps=stack_maps(dataset) if layout.map_shape else None,
    )


def stack_maps(dataset: Dataset) -> Tensor:
    """What the episodes carry beside their tokens [N, C, H, W]."""
    return torch.from_numpy(np.stack([episode.map for episode in dataset if episode.map is not None]))


def encode_goals(
    goals: npt.NDArray[np.floating], discretizer: Discretizer, config: TokenConfig
) -> npt.NDArray[np.int64]:
    """Goals share the bins of the observation dimensions they stand for: goals [N, G] -> [N, G]."""
    tokens = [discretizer.encode(goals[:, i : i + 1], slice(dim, dim + 1)) for i, dim in enumerate(config.goal_dims)]
    return np.concatenate(tokens, axis=1) if tokens else np.zeros((len(goals), 0), dtype=np.int64)


def encode_transitions(
    episode: Episode, discretizer: Discretizer, layout: TokenLayout, config: TokenConfig
) -> npt.NDArray[np.int64]:
    """Token rows of one episode; the row of a final state holds stop tokens after it."""
    return _encode_chunk([episode], discretizer, layout, config)


def _encode_chunk(
    episodes: Sequence[Episode], discretizer: Discretizer, layout: TokenLayout, config: TokenConfig
) -> npt.NDArray[np.int64]:
    """Token rows of some episodes, one after the other."""
    parts = [episode_columns(episode, config) for episode in episodes]
    observations, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    rows = np.full((len(observations), layout.size), discretizer.stop, dtype=np.int64)
    rows[:, layout.observation] = discretizer.encode(observations, layout.observation)
    rest = slice(layout.observation_dim, layout.size)
    pairs = zip(parts, episodes, strict=True)
    acted = np.concatenate([np.arange(len(columns[0])) < len(episode) for columns, episode in pairs])
    rows[acted, rest] = discretizer.encode(np.concatenate(others, axis=1), rest)
    return rows


@dataclass(frozen=True)
class Batch:
    """B windows: a model reads `tokens[:, :-1]` and predicts `tokens[:, 1:]`."""

    tokens: Tensor  # [B, G + W * D] int64
    real: Tensor  # [B, G + W * D] bool, false where a token only fills the window up
    maps: Tensor | None = None  # [B, C, H, W], of the episodes that the windows come from


def gather_windows(
    data: TokenizedDataset, index: Tensor, window: int, layout: TokenLayout, config: TokenConfig
) -> Batch:
    """Windows by number, on the dataset's device: index [B] -> Batch."""
    stop = config.num_bins
    episode = torch.searchsorted(data.end_window, index, right=True)  # [B]
    start = index - (data.end_window[episode] - data.num_steps[episode])  # [B], step of the episode
    step = start[:, None] + torch.arange(window, device=index.device)  # [B, W]
    recorded = step < data.num_rows[episode][:, None]
    row = data.first_row[episode][:, None] + torch.where(recorded, step, 0)
    tokens = torch.where(recorded[..., None], data.rows[row].long(), stop)  # [B, W, D]

    ended = data.terminated[episode][:, None]
    if config.max_episode_steps is not None:
        ended = ended & (step < config.max_episode_steps)
    # A recorded row is real in full, but for the slots after a final state: nothing followed it in the recording.
    slots = torch.arange(layout.size, device=index.device)
    acted = (step < data.num_steps[episode][:, None])[..., None] | (slots < layout.observation_dim)
    real = (recorded[..., None] & acted) | ended[..., None]

    goals = data.goals[episode].long()
    return Batch(
        tokens=torch.cat([goals, tokens.flatten(1)], dim=1),
        real=torch.cat([torch.ones_like(goals, dtype=torch.bool), real.flatten(1)], dim=1),
        maps=None if data.maps is None else data.maps[episode],
    )


def loss_weights(batch: Batch, layout: TokenLayout, config: TokenConfig, action_weight: float) -> Tensor:
    """Weight of every prediction, goal tokens none: Batch -> [B, G + W * D - 1], aligned with `tokens[:, 1:]`."""
    transitions = (batch.tokens.shape[1] - layout.goal_dim) // layout.size
    slots = torch.ones(layout.size, device=batch.tokens.device)
    slots[layout.action] = action_weight
    goal = torch.zeros(layout.goal_dim, device=batch.tokens.device)
    by_slot = torch.cat([goal, slots.repeat(transitions)])[1:]
    real = batch.real[:, :-1] if config.loss_mask == "input" else batch.real[:, 1:]
    return by_slot * real


def batch_indices(num_windows: int, batch_size: int, *, seed: int, step: int) -> Tensor:
    """Numbers of the windows of batch `step`, a function of seed and step alone.

    The stream of batches is one shuffled pass over all windows after the other, cut into batches.
    """
    wanted = range(step * batch_size, (step + 1) * batch_size)
    parts: list[Tensor] = []
    for epoch in range(wanted.start // num_windows, (wanted.stop - 1) // num_windows + 1):
        first = max(wanted.start - epoch * num_windows, 0)
        last = min(wanted.stop - epoch * num_windows, num_windows)
        parts.append(_shuffle(num_windows, seed, epoch)[first:last].long())
    return torch.cat(parts)


@lru_cache(maxsize=2)  # consecutive batches ask for the same pass, or for two where one ends
def _shuffle(num_windows: int, seed: int, epoch: int) -> Tensor:
    """The order of one pass; four bytes a window while they can number all of them."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    dtype = torch.int32 if num_windows < 2**31 else torch.int64
    return torch.randperm(num_windows, generator=generator, dtype=dtype)
