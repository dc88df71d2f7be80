"""Attention of new tokens over what a cache holds, each part of which several candidates may share."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.search.cache import KVCache


def attend_many(query: Tensor, cache: KVCache, layer: int, mask: Tensor) -> Tensor:
    """Attention of S new tokens over all columns: query [E, K, H, S, d], mask [S, last own columns] -> like query.

    A copy of the shared columns for each candidate costs little beside so many tokens.
    """
    rows = query.flatten(0, 1)
    parts = [[part.repeat_interleave(len(rows) // len(part), dim=0) for part in both] for both in cache.parts(layer)]
    keys, values = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    old = mask.new_ones(len(mask), keys.shape[2] - mask.shape[1])
    attended = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=torch.cat([old, mask], dim=1))
    return attended.view(query.shape)


def attend_one(query: Tensor, cache: KVCache, layer: int) -> Tensor:
    """Attention of one new token over all columns: query [E, K, H, 1, d] -> the same.

    Candidates that share columns meet them in one product, without a copy for each. What was found in each part then
    counts as much as the part's share of the softmax over all of them.
    """
    rows = query[..., 0, :].flatten(0, 1)  # [E * K, H, d]
    found, weight = None, None
    for keys, values in cache.parts(layer):
        together = rows.view(len(keys), -1, *rows.shape[1:]).transpose(1, 2)  # [E * B, H, K / B, d]
        part_found, part_weight = _attend(together, keys, values)
        part_found = part_found.transpose(1, 2).reshape(rows.shape)
        part_weight = part_weight.transpose(1, 2).reshape(rows.shape[:2])
        if found is None or weight is None:
            found, weight = part_found, part_weight
        else:
            found = torch.lerp(found, part_found, torch.sigmoid(part_weight - weight)[..., None])
            weight = torch.logaddexp(weight, part_weight)
    assert found is not None, "a token has at least itself to attend to, or something before it"
    return found.view(query.shape)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Plain attention: query [B, H, S, d], keys and values [B, H, C, d] -> what is found, like query, and its weight.

    The weight [B, H, S] is the logarithm of the sum that the softmax divides by.
    """
    if query.device.type == "cpu":
        found, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values)
        return found, weight
    scores = query @ keys.mT / math.sqrt(query.shape[-1])
    weight = scores.logsumexp(dim=-1)
    return (scores - weight[..., None]).exp() @ values, weight
