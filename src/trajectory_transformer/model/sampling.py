"""Filters over next-token logits."""

import torch
from torch import Tensor


def keep_nucleus(logits: Tensor, mass: float) -> Tensor:
    """Drop the least likely tokens whose probabilities add up to at most 1 - mass: logits [..., V] -> the same, -inf.

    The most likely token always stays. `mass` 1 keeps everything, the authors' `cdf` is 1 - mass.
    """
    probs = logits.softmax(dim=-1)
    ordered, order = probs.sort(dim=-1)
    kept_in_order = ordered.cumsum(dim=-1) > 1.0 - mass
    kept_in_order[..., -1] = True
    kept = torch.zeros_like(kept_in_order).scatter(-1, order, kept_in_order)
    return logits.masked_fill(~kept, -torch.inf)


def expected_value(logits: Tensor, values: Tensor) -> Tensor:
    """Mean of a discretised scalar under the predicted distribution: logits [..., V + 1], values [V] -> [...].

    The stop token stands for nothing more to come: it adds zero, and the others are not scaled up in its place.
    """
    return logits.softmax(dim=-1)[..., :-1] @ values
