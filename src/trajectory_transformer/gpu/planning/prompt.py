"""Compute keys and values of whole prompts in one forward pass, for the fused decoder."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trajectory_transformer.model.gpt import GPT, Block
from trajectory_transformer.tokens.layout import TokenLayout


def read_prompt(
    gpt: GPT, blocks: Sequence[Block], tokens: Tensor, map_embedding: Tensor | None, *, multiple_of: int
) -> tuple[Tensor, Tensor]:
    """Keys and values that later tokens may attend to, for tokens [B, L]: two tensors [layers, B, H, C, d].

    The columns are padded to a multiple with copies of the last one.
    """
    # No token attends to a value token. With values removed, the causal mask is sufficient.
    kept = _readable_rows(gpt.layout, tokens.shape[1], multiple_of, tokens.device)
    x = gpt.embed(tokens, 0, map_embedding)[:, kept]
    keys, values = [], []
    for layer, block in enumerate(blocks):
        query, key, value = block.project(x)
        keys.append(key)
        values.append(value)
        if layer + 1 < len(blocks):
            # Not cuDNN: its start-up overhead exceeds the work for so few tokens.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                attended = scaled_dot_product_attention(query, key, value, is_causal=True)
            x = block.finish(x, attended)
    return torch.stack(keys), torch.stack(values)


@functools.cache
def _readable_rows(layout: TokenLayout, length: int, multiple_of: int, device: torch.device) -> Tensor:
    """Positions that later tokens may attend to, padded to a multiple by repeating the last one."""
    rows = [position for position, kept in enumerate(layout.readable(0, length)) if kept]
    return torch.tensor(rows + rows[-1:] * (-len(rows) % multiple_of), dtype=torch.long, device=device)
