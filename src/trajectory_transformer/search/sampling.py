"""Next tokens from logits: filters, Gumbel noise, and what a predicted distribution is worth."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.randomness import stream_seed as stream_seed  # for its importers

Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Worth of a discretised scalar: logits [..., V + 1], values [V], sampled tokens [...] -> [...]."""


@dataclass(frozen=True)
class Sampler:
    """How tokens are drawn: the distribution is sharpened by temperature and cut by filters, then noise decides."""

    temperature: float = 1.0
    top_k: int | None = None  # keep so many most likely tokens
    nucleus: float | None = None  # keep the most likely tokens that hold this share of the mass
    middle: float | None = None  # keep the tokens around the median that hold this share of the mass

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """One token a row by the Gumbel-max trick, without noise the most likely: logits, noise [..., V] -> [...]."""
        if noise is None:
            return logits.argmax(dim=-1)
        scaled = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            scaled = keep_top(scaled, self.top_k)
        if self.nucleus is not None and self.nucleus < 1.0:
            scaled = keep_nucleus(scaled, self.nucleus)
        if self.middle is not None and self.middle < 1.0:
            scaled = keep_middle(scaled, self.middle)
        return (scaled + noise).argmax(dim=-1)


def keep_top(logits: Tensor, count: int) -> Tensor:
    """Drop all but the `count` most likely tokens: logits [..., V] -> the same, -inf where dropped."""
    threshold = logits.topk(count, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


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


def keep_middle(logits: Tensor, mass: float) -> Tensor:
    """Drop the tokens that lie wholly in the first or the last (1 - mass) / 2: logits [..., V] -> the same, -inf.

    Of bins of a number that is what lies far from the median, on whichever side; the median always stays.
    """
    probs = logits.softmax(dim=-1)
    up_to = probs.cumsum(dim=-1)
    kept = (up_to > (1.0 - mass) / 2) & (up_to - probs < (1.0 + mass) / 2)
    return logits.masked_fill(~kept, -torch.inf)


@dataclass(frozen=True)
class Gumbel:
    """Gumbel noise of one run of slots: a function of a key and of the place, so that any decoder can make any part."""

    seeds: Tensor  # [E], one for each search
    number: int  # of the run, from 1 on
    num_candidates: int
    num_slots: int
    vocabulary: int

    @functools.cached_property
    def keys(self) -> Tensor:
        """What is hashed with the place [E]. The seeds are hashed too: they may be neighbours, as runs are."""
        return _mix(_mix(self.seeds) + _signed(self.number * _STEP))

    def slot(self, index: int) -> Tensor:
        """The noise of one slot [E, K, V + 1]."""
        candidates = torch.arange(self.num_candidates, device=self.keys.device)[:, None]
        tokens = torch.arange(self.vocabulary, device=self.keys.device)
        places = (candidates * self.num_slots + index) * self.vocabulary + tokens
        bits = _logical_shift(_mix(self.keys[:, None, None] + (places + 1) * _STEP), 40)
        uniform = (bits.float() + 0.5) * 2.0**-24
        return -(-uniform.log()).log()


class Noise:
    """Gumbel noise of E searches, each from a seed of its own, so that a plan does not depend on its neighbours.

    Whoever decodes sees the same numbers, on any device: every decoder returns the same plan.
    """

    def __init__(self, seeds: Tensor) -> None:
        """One stream a search: seeds [E], whole numbers of 64 bits."""
        self._seeds = seeds.contiguous()
        self._num_runs = 0

    def gumbel(self, num_candidates: int, num_slots: int, vocabulary: int) -> Gumbel:
        """The noise of the next run."""
        self._num_runs += 1
        return Gumbel(self._seeds, self._num_runs, num_candidates, num_slots, vocabulary)


def _signed(number: int) -> int:
    """The last 64 bits of a number as a tensor holds them."""
    return (number + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)


def _mix(keys: Tensor) -> Tensor:
    """A hash of 64 bits (the last steps of splitmix64): neighbouring numbers come out unlike each other."""
    keys = (keys ^ _logical_shift(keys, 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ _logical_shift(keys, 27)) * _signed(0x94D049BB133111EB)
    return keys ^ _logical_shift(keys, 31)


def _logical_shift(keys: Tensor, bits: int) -> Tensor:
    return (keys >> bits) & ((1 << (64 - bits)) - 1)


def expected_value(logits: Tensor, values: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean of a discretised scalar under the predicted distribution: logits [..., V + 1], values [V] -> [...].

    The stop token stands for nothing more to come: it adds zero, and the others are not scaled up in its place.
    """
    del tokens
    return logits.softmax(dim=-1)[..., :-1] @ values


def sampled_value(logits: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """What the sampled token stands for, zero for the stop token."""
    del logits
    return torch.cat([values, values.new_zeros(1)])[tokens]


@dataclass(frozen=True)
class Percentile:
    """The value that a share of the predicted mass lies below; the stop token counts as a value of zero."""

    share: float

    def __call__(self, logits: Tensor, values: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Estimate: logits [..., V + 1], values [V] -> [...]."""
        del tokens
        with_stop = torch.cat([values, values.new_zeros(1)])
        ordered, order = with_stop.sort()
        mass = logits.softmax(dim=-1)[..., order].cumsum(dim=-1)
        index = (mass < self.share).sum(dim=-1).clamp(max=len(ordered) - 1)
        return ordered[index]
