"""Next tokens from logits: filters, sampling, and the value of a predicted distribution."""

import torch
from torch import Tensor

from trajectory_transformer.config import Sampler


def draw(sampler: Sampler, logits: Tensor, noise: Tensor | None) -> Tensor:
    """Sample one token per row by the Gumbel-max trick: logits, noise [..., V] -> [...].

    Without noise, take the most likely token.
    """
    if noise is None:
        return logits.argmax(dim=-1)
    return (filtered(sampler, logits) + noise).argmax(dim=-1)


def filtered(sampler: Sampler, logits: Tensor) -> Tensor:
    """Logits that are sampled from: divided by the temperature, -inf where the filter dropped a token."""
    scaled = logits / sampler.temperature
    if sampler.middle is not None:
        return keep_middle(scaled, sampler.middle)
    if sampler.top_k is not None and sampler.top_k < logits.shape[-1]:
        scaled = keep_top(scaled, sampler.top_k)
    if sampler.nucleus is not None and sampler.nucleus < 1.0:
        scaled = keep_nucleus(scaled, sampler.nucleus)
    return scaled


def keep_top(logits: Tensor, count: int) -> Tensor:
    """Drop all but the `count` most likely tokens: logits [..., V] -> the same, -inf where dropped."""
    threshold = logits.topk(count, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_nucleus(logits: Tensor, mass: float) -> Tensor:
    """Drop the least likely tokens whose probabilities sum to at most 1 - mass: logits [..., V] -> the same, -inf.

    The most likely token always stays. `mass` 1 keeps everything; the authors' `cdf` is 1 - mass.
    """
    probs = logits.softmax(dim=-1)
    ordered, order = probs.sort(dim=-1)
    kept_in_order = ordered.cumsum(dim=-1) > 1.0 - mass
    kept_in_order[..., -1] = True
    kept = torch.zeros_like(kept_in_order).scatter(-1, order, kept_in_order)
    return logits.masked_fill(~kept, -torch.inf)


def keep_middle(logits: Tensor, mass: float) -> Tensor:
    """Drop bins that lie entirely in the lower or upper (1 - mass) / 2: logits [..., V] -> the same, -inf.

    The bin of the median always stays.
    """
    if mass >= 1.0:
        return logits
    probs = logits.softmax(dim=-1)
    up_to = probs.cumsum(dim=-1)
    kept = (up_to > (1.0 - mass) / 2) & (up_to - probs < (1.0 + mass) / 2)
    return logits.masked_fill(~kept, -torch.inf)


def predicted_value(logits: Tensor, values: Tensor, percentile: float | None = None) -> Tensor:
    """Mean (or a percentile) of a discretized scalar: logits [..., V + 1], values [V] -> [...].

    The stop token counts as zero: nothing more will follow. The other probabilities are not rescaled.
    """
    probs = logits.softmax(dim=-1)
    if percentile is None:
        return probs[..., :-1] @ values
    ordered, order = torch.cat([values, values.new_zeros(1)]).sort()
    index = (probs[..., order].cumsum(dim=-1) < percentile).sum(dim=-1)
    return ordered[index.clamp(max=len(ordered) - 1)]
