"""Streams of random numbers, each identified by the numbers it is for."""

import numpy as np


def stream_seed(*words: int) -> int:
    """A 63-bit seed for the stream that these numbers identify, for example (run seed, step)."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
