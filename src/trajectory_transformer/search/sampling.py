"""Next tokens from logits: filters, Gumbel noise, and the value of a predicted distribution."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.config import Sampler


def draw(sampler: Sampler, logits: Tensor, noise: Tensor | None) -> Tensor:
    """Sample one token per row by the Gumbel-max trick: logits, noise [..., V] -> [...].

    Without noise, take the most likely token.
    """
    if noise is None:
        return logits.argmax(dim=-1)
    scaled = logits / sampler.temperature
    if sampler.middle is not None:
        scaled = keep_middle(scaled, sampler.middle)
    else:
        if sampler.top_k is not None and sampler.top_k < logits.shape[-1]:
            scaled = keep_top(scaled, sampler.top_k)
        if sampler.nucleus is not None and sampler.nucleus < 1.0:
            scaled = keep_nucleus(scaled, sampler.nucleus)
    return (scaled + noise).argmax(dim=-1)


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


@dataclass(frozen=True)
class Gumbel:
    """Gumbel noise of one run of slots: a hash of key and place, so that any decoder can compute any part of it."""

    seeds: Tensor  # [E], one for each search
    number: int  # of the run, starting at 1
    num_candidates: int
    num_slots: int
    vocabulary: int

    @functools.cached_property
    def keys(self) -> Tensor:
        """What is hashed together with the place [E]. Seeds are hashed first, because they may be consecutive."""
        return _mix(_mix(self.seeds) + _signed(self.number * _STEP))

    def slot(self, index: int) -> Tensor:
        """The noise of one slot [E, K, V + 1]."""
        candidates = torch.arange(self.num_candidates, device=self.keys.device)[:, None]
        tokens = torch.arange(self.vocabulary, device=self.keys.device)
        places = (candidates * self.num_slots + index) * self.vocabulary + tokens
        bits = _logical_shift(_mix(self.keys[:, None, None] + (places + 1) * _STEP), 40)
        # The largest sum rounds to 2^24, whose noise would be infinite and bring back tokens that a filter dropped.
        uniform = ((bits.float() + 0.5) * 2.0**-24).clamp(max=1.0 - 2.0**-24)
        return -(-uniform.log()).log()


class Noise:
    """Gumbel noise of E searches, each with its own seed, so that a plan does not depend on the rest of the batch.

    The numbers are the same on every device and for every decoder, so all decoders return the same plan.
    """

    def __init__(self, seeds: Tensor) -> None:
        """One stream per search: seeds [E], 64-bit integers."""
        self._seeds = seeds.contiguous()
        self._num_runs = 0

    def gumbel(self, num_candidates: int, num_slots: int, vocabulary: int) -> Gumbel:
        """The noise of the next run."""
        self._num_runs += 1
        return Gumbel(self._seeds, self._num_runs, num_candidates, num_slots, vocabulary)


def _signed(number: int) -> int:
    """The low 64 bits of a number as a signed integer, as tensors store them."""
    return (number + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)


def _mix(keys: Tensor) -> Tensor:
    """A 64-bit hash (the finalizer of splitmix64)."""
    keys = (keys ^ _logical_shift(keys, 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ _logical_shift(keys, 27)) * _signed(0x94D049BB133111EB)
    return keys ^ _logical_shift(keys, 31)


def _logical_shift(keys: Tensor, bits: int) -> Tensor:
    return (keys >> bits) & ((1 << (64 - bits)) - 1)
