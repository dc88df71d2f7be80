"""Policies for Pendulum-v1, good and bad, to collect data with: `tt collect --policy examples/pendulum.py:swing_up`."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
GRAVITY, MASS, LENGTH, MAX_TORQUE = 10.0, 1.0, 1.0, 2.0


def swing_up(observation: Array, goal: Array, rng: np.random.Generator) -> Array:
    """Pump energy until the pole is near the top, then hold it there; with noise."""
    del goal
    cos, sin, speed = (float(value) for value in observation)
    angle = float(np.arctan2(sin, cos))  # 0 is upright
    # Energy relative to standing upright at rest: zero there, negative below.
    energy = MASS * LENGTH**2 / 6 * speed**2 + MASS * GRAVITY * LENGTH / 2 * (cos - 1.0)
    near_top = cos > 0.85 and abs(speed) < 4.0
    torque = -(12.0 * angle + 3.0 * speed) if near_top else -1.5 * energy * np.sign(speed or 1.0)
    return _noisy(torque, 0.3, rng)


def sluggish(observation: Array, goal: Array, rng: np.random.Generator) -> Array:
    """Pull weakly towards the top, which never gets there, and wander."""
    del goal
    angle = float(np.arctan2(observation[1], observation[0]))
    return _noisy(-0.3 * angle, 1.0, rng)


def _noisy(torque: float, spread: float, rng: np.random.Generator) -> Array:
    clipped = np.clip(torque, -MAX_TORQUE, MAX_TORQUE)
    return np.clip([clipped + spread * rng.standard_normal()], -MAX_TORQUE, MAX_TORQUE).astype(np.float32)
