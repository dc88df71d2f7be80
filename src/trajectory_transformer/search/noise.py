"""Gumbel noise that is a function of seed, run and place: the same for every decoder, on every device."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


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
