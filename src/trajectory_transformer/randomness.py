"""Seeds of independent random streams."""

import numpy as np


def stream_seed(*words: int) -> int:
    """Seed of the random stream that these non-negative integers identify, in [0, 2^63)."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
