"""Tokenized datasets, and the windows a model is trained on.

A window is W transitions of an episode, with the goal in front. One starts at every row of an episode but its last: at
every step where the final state is recorded, else at every step but the last. After the end of an episode every slot
holds the stop token. These tokens are trained on if the task terminated, and have no weight if the recording was
truncated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.tokens.discretizer import Discretizer
from trajectory_transformer.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizedDataset:
    """Every transition of a dataset as one row of tokens, one byte per token where the vocabulary allows."""

    rows: Tensor  # [R, D] uint8 or int16; an episode of T steps has T rows, T + 1 with its final state
    goals: Tensor  # [N, G], same type
    first_row: Tensor  # [N] int64, where each episode starts in rows
    num_steps: Tensor  # [N] int64, steps of each episode
    num_rows: Tensor  # [N] int64
    terminated: Tensor  # [N] bool
    maps: Tensor | None = None  # [N, C, H, W] uint8 or float32, if the model reads maps

    # Both are needed at every training step, and computing the first would synchronise with the device each time.
    @cached_property
    def num_windows(self) -> int:
        """Number of windows of all episodes."""
        return int((self.num_rows - 1).sum())

    @cached_property
    def end_window(self) -> Tensor:
        """Index of the window after each episode's last one [N]."""
        return (self.num_rows - 1).cumsum(0)

    def subset(self, episodes: Sequence[int]) -> "TokenizedDataset":
        """Some episodes of the dataset. The rows stay where they are: they are not copied."""
        index = torch.tensor(episodes, device=self.num_rows.device)
        each = {
            field.name: getattr(self, field.name)[index]
            for field in fields(self)
            if field.name != "rows" and getattr(self, field.name) is not None
        }
        return TokenizedDataset(self.rows, **each)

    def to(self, device: torch.device) -> "TokenizedDataset":
        """The same dataset on another device."""
        present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return TokenizedDataset(**{name: getattr(self, name).to(device) for name in present})


def token_type(discretizer: Discretizer) -> type[np.uint8] | type[np.int16]:
    """The smallest type that holds every token: one byte where the vocabulary allows."""
    return np.uint8 if discretizer.stop < 256 else np.int16


def tokenize(dataset: Dataset, tokenizer: Tokenizer) -> TokenizedDataset:
    """Turn all episodes into token rows."""
    dtype = token_type(tokenizer.discretizer)
    num_steps = torch.tensor([len(episode) for episode in dataset])
    lengths = num_steps + int(tokenizer.conventions.final_observation)
    # Many episodes at a time: the binary searches of the discretizer are far cheaper in one call.
    chunks = [dataset.episodes[start : start + 1000] for start in range(0, len(dataset), 1000)]
    maps = [episode.map for episode in dataset if episode.map is not None]
    return TokenizedDataset(
        rows=torch.from_numpy(np.concatenate([tokenizer.encode(*chunk).astype(dtype) for chunk in chunks])),
        goals=torch.from_numpy(tokenizer.goals_of(dataset.episodes).astype(dtype)),
        first_row=lengths.cumsum(0) - lengths,
        num_steps=num_steps,
        num_rows=lengths,
        terminated=torch.tensor([episode.terminated for episode in dataset]),
        maps=torch.from_numpy(np.stack(maps)) if tokenizer.layout.map_shape else None,
    )


@dataclass(frozen=True)
class Batch:
    """B windows: the model reads `tokens[:, :-1]` and predicts `tokens[:, 1:]`."""

    tokens: Tensor  # [B, G + W * D] int64
    real: Tensor  # [B, G + W * D] bool, false where a token only pads the window
    maps: Tensor | None = None  # [B, C, H, W], of the episodes that the windows come from


def gather_windows(data: TokenizedDataset, index: Tensor, window: int, tokenizer: Tokenizer) -> Batch:
    """Windows by index, on the dataset's device: index [B] -> Batch."""
    layout, max_steps = tokenizer.layout, tokenizer.conventions.max_episode_steps
    episode = torch.searchsorted(data.end_window, index, right=True)  # [B]
    start = index - (data.end_window[episode] - data.num_rows[episode] + 1)  # [B], step of the episode
    step = start[:, None] + torch.arange(window, device=index.device)  # [B, W]
    recorded = step < data.num_rows[episode][:, None]
    row = data.first_row[episode][:, None] + torch.where(recorded, step, 0)
    tokens = torch.where(recorded[..., None], data.rows[row].long(), tokenizer.stop)  # [B, W, D]

    ended = data.terminated[episode][:, None]
    if max_steps is not None:
        ended = ended & (step < max_steps)
    # All slots of a recorded row are real, except those after a final state: nothing followed it in the recording.
    slots = torch.arange(layout.size, device=index.device)
    acted = (step < data.num_steps[episode][:, None])[..., None] | (slots < layout.observation_dim)
    real = (recorded[..., None] & acted) | ended[..., None]

    goals = data.goals[episode].long()
    return Batch(
        tokens=torch.cat([goals, tokens.flatten(1)], dim=1),
        real=torch.cat([torch.ones_like(goals, dtype=torch.bool), real.flatten(1)], dim=1),
        maps=None if data.maps is None else data.maps[episode],
    )


def loss_weights(batch: Batch, tokenizer: Tokenizer, action_weight: float) -> Tensor:
    """Weight of every prediction, 0 for goal tokens: Batch -> [B, G + W * D - 1], aligned with `tokens[:, 1:]`."""
    layout = tokenizer.layout
    transitions = (batch.tokens.shape[1] - layout.goal_dim) // layout.size
    slots = torch.ones(layout.size, device=batch.tokens.device)
    slots[layout.action] = action_weight
    goal = torch.zeros(layout.goal_dim, device=batch.tokens.device)
    by_slot = torch.cat([goal, slots.repeat(transitions)])[1:]
    real = batch.real[:, :-1] if tokenizer.conventions.loss_mask == "input" else batch.real[:, 1:]
    return by_slot * real


def batch_indices(num_windows: int, batch_size: int, *, seed: int, step: int) -> Tensor:
    """Window indices of batch `step`, a function of seed and step alone.

    Batches are consecutive slices of one shuffled pass over all windows after another.
    """
    wanted = range(step * batch_size, (step + 1) * batch_size)
    parts: list[Tensor] = []
    for epoch in range(wanted.start // num_windows, (wanted.stop - 1) // num_windows + 1):
        first = max(wanted.start - epoch * num_windows, 0)
        last = min(wanted.stop - epoch * num_windows, num_windows)
        parts.append(_shuffle(num_windows, seed, epoch)[first:last].long())
    return torch.cat(parts)


@lru_cache(maxsize=2)  # consecutive batches need the same pass, or two where one ends
def _shuffle(num_windows: int, seed: int, epoch: int) -> Tensor:
    """The order of one pass, as int32 where that can index all windows."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    dtype = torch.int32 if num_windows < 2**31 else torch.int64
    return torch.randperm(num_windows, generator=generator, dtype=dtype)
