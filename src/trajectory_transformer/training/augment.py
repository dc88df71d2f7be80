"""Windows seen another way: turned, mirrored and shifted, what happened on a grid is as true as it was recorded.

For agents on a square grid as `envs.minigrid` shows them: a state of x, y and direction (0 right, then clockwise), a
goal of x and y, an action whose first two kinds turn left and right, and a map whose planes are indexed [y, x].
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch

Augment = Callable[[Batch, Tensor], Batch]
"""A batch seen another way: Batch, uniform numbers [B, 4] that decide how -> Batch."""


def grid_augment(model: TrajectoryModel) -> Augment:
    """Turn, mirror and shift every window on its own; a shift keeps all that a map shows on the grid."""
    layout, stop = model.layout, model.discretizer.stop
    slots = (layout.goal_dim, layout.observation_dim, layout.action_dim, layout.rewards)
    size = layout.map_shape[-1] if layout.map_shape else 0
    if slots != (2, 3, 1, False) or len(set(layout.map_shape[1:])) != 1:
        raise ValueError(
            "train.augment grid needs a goal of x and y, states of x, y and direction, one action, no rewards and a "
            f"square map, got {slots[0]} goal, {slots[1]} observation and {slots[2]} action dimensions, "
            f"{'' if layout.rewards else 'no '}rewards and a map of shape {layout.map_shape}"
        )
    cells = model.discretizer.values[:2, :size]
    if cells.shape[1] < size or (cells != np.arange(size)).any():
        raise ValueError(f"train.augment grid needs a token for each of {size} cells: raise tokens.num_bins")

    def augment(batch: Batch, uniform: Tensor) -> Batch:
        assert batch.maps is not None
        turns, mirrored = (uniform[:, 0] * 4).long(), uniform[:, 1] < 0.5  # [B]
        maps = see_maps(batch.maps, turns, mirrored)
        filled = (maps > 0).any(dim=1)  # [B, y, x]
        shift_x, shift_y = draw_shift(filled.any(dim=1), uniform[:, 2]), draw_shift(filled.any(dim=2), uniform[:, 3])
        tokens = batch.tokens
        rows = tokens[:, 2:].reshape(len(tokens), -1, layout.size)
        columns = (turns[:, None], mirrored[:, None])
        goal = see_cells(tokens[:, 0:1], tokens[:, 1:2], *columns, size)
        cells = see_cells(rows[..., 0], rows[..., 1], *columns, size)
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


def see_cells(x: Tensor, y: Tensor, turns: Tensor, mirrored: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where cells of a grid come to lie: mirrored left to right, then turned clockwise by quarters."""
    x = torch.where(mirrored, size - 1 - x, x)
    for quarter in range(1, 4):
        turn = turns >= quarter
        x, y = torch.where(turn, size - 1 - y, x), torch.where(turn, x, y)
    return x, y


def see_maps(maps: Tensor, turns: Tensor, mirrored: Tensor) -> Tensor:
    """The maps that `see_cells` leads to: maps [B, C, N, N], turns and mirrored [B] -> the same shape."""
    maps = torch.where(mirrored[:, None, None, None], maps.flip(3), maps)
    for quarter in range(1, 4):
        # A quarter clockwise: what was at [y, x] is at [x, N - 1 - y].
        maps = torch.where((turns >= quarter)[:, None, None, None], maps.transpose(2, 3).flip(3), maps)
    return maps


def draw_shift(filled: Tensor, uniform: Tensor) -> Tensor:
    """A shift that keeps all filled places of an axis on it, each alike: filled [B, N], uniform [B] -> [B]."""
    places = torch.arange(filled.shape[1], device=filled.device)
    first = torch.where(filled, places, len(places)).amin(dim=1)
    last = torch.where(filled, places, -1).amax(dim=1)
    room = first + len(places) - 1 - last
    shift = (uniform * (room + 1)).long().minimum(room) - first
    return torch.where(filled.any(dim=1), shift, 0)


def shift_maps(maps: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Maps moved right and down by whole cells: maps [B, C, N, N], shifts [B] -> the same shape."""
    size = maps.shape[-1]
    places = torch.arange(size, device=maps.device)
    rows, columns = (places - shift_y[:, None]) % size, (places - shift_x[:, None]) % size  # [B, N], where from
    index = rows[:, None, :, None] * size + columns[:, None, None, :]  # [B, 1, N, N]
    index = index.expand(-1, maps.shape[1], -1, -1).flatten(2)
    return maps.flatten(2).gather(2, index).view_as(maps)
