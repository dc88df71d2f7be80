"""One pass over a tree of tokens: prompts and everything that branches from them, each token read once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.model.gpt import GPT, Block
from trajectory_transformer.search.cache import KVCache


@dataclass(frozen=True)
class Level:
    """Tokens that continue the rows of the previous level: E environments with U rows each."""

    tokens: Tensor  # [E, U, S]
    parents: Tensor  # [E, U], rows of the previous level


def read_tree(
    gpt: GPT,
    blocks: Sequence[Block],
    prompt: Tensor,
    levels: Sequence[Level],
    cache: KVCache,
    map_embedding: Tensor | None = None,
) -> Tensor:
    """Read prompts [E, L] and all levels into a cache; returns the logits after the last level [E, U, V + 1].

    The cache then holds the rows of the last level as candidates. `blocks` are those of the model, perhaps with other
    weight layouts. `map_embedding` [E, width] is shared by all rows of an environment.
    """
    maps = None if map_embedding is None else map_embedding[:, None]
    levels = [Level(prompt[:, None], prompt.new_zeros(len(prompt), 1)), *levels]
    parts, columns, masks = [], [], []
    end = 0
    for level in levels:
        start, end = end, end + level.tokens.shape[2]
        # Nothing attends to a value token: it is only read if what follows it is wanted.
        readable = [index for index, kept in enumerate(gpt.layout.readable(start, end)) if kept]
        kept = [*readable, end - start - 1] if level is levels[-1] and end - start - 1 not in readable else readable
        parts.append(gpt.embed(level.tokens, start, maps)[:, :, kept].flatten(0, 1))  # [E * U, S, width]
        columns.append(len(readable))
        masks.append(gpt.mask[start:end, :end][kept][:, gpt.layout.readable(0, end)])
    sizes = [part.shape[:2] for part in parts]
    x = torch.cat([part.flatten(0, 1) for part in parts])  # [N, width], so that linear layers see all levels at once
    shared, own = [], []
    for layer, block in enumerate(blocks):
        last = layer + 1 == len(blocks)
        query, key, value = (_by_level(part, sizes) for part in block.project(x))
        attended = []
        path = torch.stack([key[0][:, :, :0], value[0][:, :, :0]])  # [2, E * U, H, C, d], from the root to each row
        for index, level in enumerate(levels):
            firsts = torch.arange(len(prompt), device=prompt.device)[:, None] * (path.shape[1] // len(prompt))
            new = (key[index][:, :, : columns[index]], value[index][:, :, : columns[index]])
            path = _append(path, (firsts + level.parents).flatten(), new)
            if index == 0:
                shared.append(path)
            asking = query[index]
            if last:  # besides keys and values, only the logits after the last tokens are wanted
                asking = asking[:, :, -1:] if index + 1 == len(levels) else asking[:, :, :0]
            if asking.shape[2]:
                mask = masks[index][-asking.shape[2] :]
                found = functional.scaled_dot_product_attention(asking, path[0], path[1], attn_mask=mask)
                attended.append(found.transpose(1, 2).flatten(0, 1))  # [E * U * S, H, d]
        own.append(path[:, :, :, shared[-1].shape[3] :])
        if last:
            x = x[-math.prod(sizes[-1]) :].view(*sizes[-1], -1)[:, -1]
        x = block.finish(x, torch.cat(attended).transpose(0, 1))
    cache.restart(torch.stack(shared), torch.stack(own))
    return gpt.logits_after(x.view(len(prompt), -1, x.shape[-1]), end)


def _by_level(rows: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split rows of all levels: rows [H, N, d] -> [B, H, S, d] for each size (B, S)."""
    parts = torch.split(rows, [math.prod(size) for size in sizes], dim=1)
    return [
        part.view(len(rows), *size, rows.shape[-1]).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)
    ]


def _append(path: Tensor, rows: Tensor, new: tuple[Tensor, Tensor]) -> Tensor:
    """Select rows [B'] of keys and values [2, B, H, C, d] and append new columns [B', H, S, d]."""
    done = path.shape[3]
    longer = path.new_empty(2, len(rows), path.shape[2], done + new[0].shape[2], path.shape[4])
    for old, part, more in zip(path, longer, new, strict=True):
        if done:
            torch.index_select(old, 0, rows, out=part[:, :, :done])
        part[:, :, done:] = more
    return longer
