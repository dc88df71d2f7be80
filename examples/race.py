"""A bad policy for tt/FourRoomsRace-v0: it walks to the wrong corner and stays there until the episode is truncated.

tt collect --env tt/FourRoomsRace-v0 --policy "['demonstrator share=0.3', 'examples.race:lured share=0.7']"
"""

import numpy as np

from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.envs.four_rooms import Demonstrator

DECOY = np.array([0.9, 0.1], np.float32)
_WALKER = Demonstrator(noise=0.1, wander=0.25)


def lured(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Go to the decoy instead of the goal."""
    del goal
    return _WALKER.act(observation, DECOY, rng).astype(np.float32)
