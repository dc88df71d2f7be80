"""Compute keys and values of whole prompts in one forward pass, for the fused decoder."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trajectory_transformer.model.gpt import GPT, Block
from trajectory_transformer.tokens.layout import TokenLayout

TOKENS_AT_ONCE = 2**17  # occupies a GPU; the candidates of 100 environments at once would need gigabytes


def read_prompt(
    gpt: GPT, blocks: Sequence[Block], tokens: Tensor, map_embedding: Tensor | None, *, multiple_of: int
) -> tuple[Tensor, Tensor]:
    """Keys and values that later tokens may attend to, for tokens [B, L]: two tensors [layers, B, H, C, d].

    The columns are padded to a multiple with copies of the last one.
    """
    # No token attends to a value token. With values removed, the causal mask is sufficient.
    kept = _readable_rows(gpt.layout, tokens.shape[1], multiple_of, tokens.device)
    heads = gpt.config.num_heads
    shape = len(blocks), len(tokens), heads, len(kept), gpt.config.width // heads
    keys, values = blocks[0].qkv.weight.new_empty(2, *shape).unbind()
    at_once = max(1, TOKENS_AT_ONCE // max(1, len(kept)))
    for first in range(0, len(tokens), at_once):
        rows = slice(first, first + at_once)
        x = gpt.embed(tokens[rows], 0, None if map_embedding is None else map_embedding[rows])[:, kept]
        for layer, block in enumerate(blocks):
            query, key, value = block.project(x)
            keys[layer, rows], values[layer, rows] = key, value
            if layer + 1 < len(blocks):
                # Not cuDNN: its start-up overhead exceeds the work for so few tokens.
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                    attended = scaled_dot_product_attention(query, key, value, is_causal=True)
                x = block.finish(x, attended)
    return keys, values


@functools.cache
def _readable_rows(layout: TokenLayout, length: int, multiple_of: int, device: torch.device) -> Tensor:
    """Positions that later tokens may attend to, padded to a multiple by repeating the last one."""
    rows = [position for position, kept in enumerate(layout.readable(0, length)) if kept]
    return torch.tensor(rows + rows[-1:] * (-len(rows) % multiple_of), dtype=torch.long, device=device)
