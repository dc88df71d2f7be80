"""The package's own environments; importing this module registers their ids with Gymnasium."""

import gymnasium

FOUR_ROOMS_ID = "tt/FourRooms-v0"

# A reload runs this module a second time, and Gymnasium warns about an id that is registered twice.
if FOUR_ROOMS_ID not in gymnasium.registry:
    gymnasium.register(
        id=FOUR_ROOMS_ID,
        # A string, so that listing the ids does not import the environment.
        entry_point="trajectory_transformer.envs.four_rooms:FourRooms",
        # The longest shortest path is about 1.45, or 29 full steps along an axis: ample time for a poor policy.
        max_episode_steps=200,
    )
