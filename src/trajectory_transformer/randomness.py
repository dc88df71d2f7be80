"""Streams of random numbers, each identified by the numbers it is for."""

import numpy as np
from torch import Tensor


def stream_seed(*words: int) -> int:
    """A 63-bit seed for the stream that these numbers identify, for example (run seed, step)."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def signed(number: int) -> int:
    """The low 64 bits of a number as a signed integer, as tensors store them."""
    return (number + 2**63) % 2**64 - 2**63


STEP = signed(0x9E3779B97F4A7C15)
"""Distance between the keys of consecutive places: the odd number of splitmix64."""


def mix(keys: Tensor) -> Tensor:
    """A 64-bit hash (the finalizer of splitmix64) of int64 keys."""
    keys = (keys ^ logical_shift(keys, 30)) * signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ logical_shift(keys, 27)) * signed(0x94D049BB133111EB)
    return keys ^ logical_shift(keys, 31)


def logical_shift(keys: Tensor, bits: int) -> Tensor:
    """Shift int64 keys to the right as if they were unsigned."""
    return (keys >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), both ends excluded, from the high bits of hashed keys."""
    # The largest sum rounds to 2^24, which would give 1.
    return ((logical_shift(keys, 40).float() + 0.5) * 2.0**-24).clamp(max=1.0 - 2.0**-24)
