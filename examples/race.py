"""A bad policy for tt/FourRoomsRace-v0: it walks well, but to the wrong corner, and stays there till time is up."""

import numpy as np

from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.envs.four_rooms import Demonstrator

DECOY = np.array([0.9, 0.1], np.float32)
_WALKER = Demonstrator(noise=0.1, wander=0.25)


def lured(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Go to the decoy, whatever the goal: for `tt collect --policy examples.race:lured`."""
    del goal
    action: FloatArray = _WALKER.act(observation, DECOY, rng).astype(np.float32)
    return action
