"""Gumbel noise that is a function of seed, run and place: the same for every decoder, on every device."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.randomness import STEP, mix, signed, uniform


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
        return mix(mix(self.seeds) + signed(self.number * STEP))

    def slot(self, index: int) -> Tensor:
        """The noise of one slot [E, K, V + 1]."""
        candidates = torch.arange(self.num_candidates, device=self.keys.device)[:, None]
        tokens = torch.arange(self.vocabulary, device=self.keys.device)
        places = (candidates * self.num_slots + index) * self.vocabulary + tokens
        # Never 0 or 1, whose noise would be infinite and bring back tokens that a filter dropped.
        return -(-uniform(mix(self.keys[:, None, None] + (places + 1) * STEP)).log()).log()


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
