"""Attention maps: how much every token of a sequence reads of every token before it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.data.episode import MapArray
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.discretizer import TokenArray
from trajectory_transformer.tokens.layout import TokenLayout


@torch.inference_mode()
def attention_maps(model: TrajectoryModel, tokens: TokenArray, map: MapArray | None = None) -> npt.NDArray[np.float32]:
    """Attention weights of all blocks and heads: tokens [L] -> [layers, heads, L, L]; row i is what token i reads."""
    gpt = model.gpt
    if not 1 <= len(tokens) <= gpt.max_tokens:
        raise ValueError(f"a sequence of 1 to {gpt.max_tokens} tokens is needed, got {len(tokens)}")
    mask = gpt.mask[: len(tokens), : len(tokens)]
    found: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        found.append(weights[0])
        return weights @ value

    x = gpt.embed(torch.from_numpy(tokens)[None].to(model.device), 0, model.encode_maps(map))
    for block in gpt.blocks:
        x = block(x, attend)
    return torch.stack(found).cpu().numpy()


def token_labels(layout: TokenLayout, names: list[str], length: int) -> list[str]:
    """Names of the tokens of a sequence with the transition they belong to: names [G + D] of goal and slots."""
    labels = names[: layout.goal_dim][:length]
    for position in range(layout.goal_dim, length):
        slot = layout.slot(position)
        labels.append(f"{names[layout.goal_dim + slot]}, step {(position - layout.goal_dim) // layout.size}")
    return labels
