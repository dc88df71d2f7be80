"""The package's own environments; importing this module registers their ids with Gymnasium."""

import warnings
from typing import Any

import gymnasium

FOUR_ROOMS_ID = "tt/FourRooms-v0"
FOUR_ROOMS_RACE_ID = "tt/FourRoomsRace-v0"
MULTI_ROOM_ID = "MiniGrid-MultiRoom-N4-S5-v0"

# Entry points are strings, so that listing the ids does not import the environment.
_IDS: dict[str, dict[str, object]] = {
    # The longest shortest path is about 1.43, or 29 full steps along an axis: ample time for a poor policy.
    FOUR_ROOMS_ID: {"max_episode_steps": 200},
    # The same goal in every episode, and a price on every step: a task for return, not for goals.
    FOUR_ROOMS_RACE_ID: {"max_episode_steps": 60, "kwargs": {"goal": (0.9, 0.9), "step_reward": -1.0}},
}

for _id, _options in _IDS.items():
    # A reload runs this module a second time, and Gymnasium warns about an id that is registered twice.
    if _id not in gymnasium.registry:
        gymnasium.register(_id, "trajectory_transformer.envs.four_rooms:FourRooms", **_options)  # type: ignore[arg-type]


def is_minigrid(env_id: str) -> bool:
    """Whether an id is one of MiniGrid's."""
    return env_id.startswith("MiniGrid-")


def make_env(env_id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """An environment by its id; those of MiniGrid show position and direction, a goal, and a map for each episode."""
    if not is_minigrid(env_id):
        return gymnasium.make(env_id, **options)
    from trajectory_transformer.envs.minigrid import GoalOnMap  # an optional dependency; says what is missing

    with warnings.catch_warnings():
        # The paper's environment is version 0, and Gymnasium would rather have another.
        warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
        # The checker would look at the agent's own view, which the wrapper spares.
        return GoalOnMap(gymnasium.make(env_id, disable_env_checker=True, **options))
