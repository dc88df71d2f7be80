"""Data augmentation for agents on grids: rotate, mirror and shift windows together with their maps.

For agents on a square grid as `envs.minigrid` presents them: a state of x, y and direction (0 right, then clockwise), a
goal of x and y, an action whose first two categories turn left and right, and a map with planes indexed [y, x].
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch

Augment = Callable[[Batch, Tensor], Batch]
"""An augmented batch: Batch, uniform random numbers [B, 4] -> Batch."""


def grid_augment(model: TrajectoryModel) -> Augment:
    """Rotate, mirror and shift each window independently; a shift keeps the contents of the map on the grid."""
    layout, stop = model.layout, model.tokenizer.stop
    slots = (layout.goal_dim, layout.observation_dim, layout.action_dim, layout.rewards)
    size = layout.map_shape[-1] if layout.map_shape else 0
    if slots != (2, 3, 1, False) or len(set(layout.map_shape[1:])) != 1:
        raise ValueError(
            "train.augment grid needs a goal of x and y, states of x, y and direction, one action, no rewards and a "
            f"square map, got {slots[0]} goal, {slots[1]} observation and {slots[2]} action dimensions, "
            f"{'' if layout.rewards else 'no '}rewards and a map of shape {layout.map_shape}"
        )
    cells = model.tokenizer.discretizer.values[:2, :size]
    if cells.shape[1] < size or (cells != np.arange(size)).any():
        raise ValueError(f"train.augment grid needs a token for each of {size} cells: raise tokens.num_bins")

    def augment(batch: Batch, uniform: Tensor) -> Batch:
        assert batch.maps is not None
        turns, mirrored = (uniform[:, 0] * 4).long(), uniform[:, 1] < 0.5  # [B]
        maps = transform_maps(batch.maps, turns, mirrored)
        filled = (maps > 0).any(dim=1)  # [B, y, x]
        shift_x, shift_y = draw_shift(filled.any(dim=1), uniform[:, 2]), draw_shift(filled.any(dim=2), uniform[:, 3])
        tokens = batch.tokens
        rows = tokens[:, 2:].reshape(len(tokens), -1, layout.size)
        columns = (turns[:, None], mirrored[:, None])
        goal = transform_cells(tokens[:, 0:1], tokens[:, 1:2], *columns, size)
        cells = transform_cells(rows[..., 0], rows[..., 1], *columns, size)
        seen = torch.stack(
            [
                cells[0] + shift_x[:, None],
                cells[1] + shift_y[:, None],
                (torch.where(columns[1], 2 - rows[..., 2], rows[..., 2]) + columns[0]) % 4,
                torch.where(columns[1] & (rows[..., 3] < 2), 1 - rows[..., 3], rows[..., 3]),
            ],
            dim=-1,
        )
        ends = [goal[0] + shift_x[:, None], goal[1] + shift_y[:, None]]
        rows = torch.where(rows == stop, stop, seen)
        return replace(
            batch,
            tokens=torch.cat([*ends, rows.flatten(1)], dim=1),
            maps=shift_maps(maps, shift_x, shift_y),
        )

    return augment


def transform_cells(x: Tensor, y: Tensor, turns: Tensor, mirrored: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """New coordinates of cells: mirrored left to right, then rotated clockwise by quarter turns."""
    x = torch.where(mirrored, size - 1 - x, x)
    for quarter in range(1, 4):
        turn = turns >= quarter
        x, y = torch.where(turn, size - 1 - y, x), torch.where(turn, x, y)
    return x, y


def transform_maps(maps: Tensor, turns: Tensor, mirrored: Tensor) -> Tensor:
    """Maps transformed like `transform_cells`: maps [B, C, N, N], turns and mirrored [B] -> the same shape."""
    maps = torch.where(mirrored[:, None, None, None], maps.flip(3), maps)
    for quarter in range(1, 4):
        # A quarter turn clockwise moves [y, x] to [x, N - 1 - y].
        maps = torch.where((turns >= quarter)[:, None, None, None], maps.transpose(2, 3).flip(3), maps)
    return maps


def draw_shift(filled: Tensor, uniform: Tensor) -> Tensor:
    """A uniformly random shift that keeps all filled cells of an axis on it: filled [B, N], uniform [B] -> [B]."""
    places = torch.arange(filled.shape[1], device=filled.device)
    first = torch.where(filled, places, len(places)).amin(dim=1)
    last = torch.where(filled, places, -1).amax(dim=1)
    room = first + len(places) - 1 - last
    shift = (uniform * (room + 1)).long().minimum(room) - first
    return torch.where(filled.any(dim=1), shift, 0)


def shift_maps(maps: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Maps shifted right and down by whole cells: maps [B, C, N, N], shifts [B] -> the same shape."""
    size = maps.shape[-1]
    places = torch.arange(size, device=maps.device)
    rows, columns = (places - shift_y[:, None]) % size, (places - shift_x[:, None]) % size  # [B, N], source indices
    index = rows[:, None, :, None] * size + columns[:, None, None, :]  # [B, 1, N, N]
    index = index.expand(-1, maps.shape[1], -1, -1).flatten(2)
    return maps.flatten(2).gather(2, index).view_as(maps)
