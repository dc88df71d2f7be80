"""Environments of this package; importing this module registers their ids with Gymnasium."""

import warnings
from typing import Any

import gymnasium

from trajectory_transformer.files import allow_local_modules

FOUR_ROOMS_ID = "tt/FourRooms-v0"
FOUR_ROOMS_RACE_ID = "tt/FourRoomsRace-v0"
MULTI_ROOM_ID = "MiniGrid-MultiRoom-N4-S5-v0"

# Entry points are strings, so that registration does not import the environment.
_IDS: dict[str, dict[str, object]] = {
    # The longest shortest path has a length of about 1.43, or 29 steps of the maximum size along an axis.
    FOUR_ROOMS_ID: {"max_episode_steps": 200},
    # A fixed goal and a negative reward per step: a task for planning by return, not by goal.
    FOUR_ROOMS_RACE_ID: {"max_episode_steps": 60, "kwargs": {"goal": (0.9, 0.9), "step_reward": -1.0}},
}

for _id, _options in _IDS.items():
    # Gymnasium warns if an id is registered twice, as a reload of this module would do.
    if _id not in gymnasium.registry:
        gymnasium.register(_id, "trajectory_transformer.envs.four_rooms:FourRooms", **_options)  # type: ignore[arg-type]


def is_minigrid(env_id: str) -> bool:
    """Whether an id belongs to a MiniGrid environment."""
    return env_id.startswith("MiniGrid-")


def is_ant_maze(env_id: str) -> bool:
    """Whether an id belongs to an AntMaze of Gymnasium-Robotics."""
    return env_id.startswith("AntMaze_")


def make_env(env_id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment by id; MiniGrid is wrapped in `GoalOnMap`, and AntMaze is the task of `AntMaze`.

    The id `module:Id-v0` imports a module first, which registers the environment; it may be in the working directory.
    """
    if ":" in env_id:
        allow_local_modules()
    if is_ant_maze(env_id):
        from trajectory_transformer.envs.ant_maze import AntMaze  # an optional dependency

        return AntMaze(env_id, **options)
    if not is_minigrid(env_id):
        try:
            return gymnasium.make(env_id, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            if "mujoco" not in str(error).lower():
                raise
            raise ImportError(f"{env_id} needs MuJoCo: pip install 'trajectory-transformer[mujoco]'") from error
    from trajectory_transformer.envs.minigrid import GoalOnMap  # an optional dependency

    with warnings.catch_warnings():
        # The paper uses version 0 of the environment, and Gymnasium warns about it.
        warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
        # The checker needs the agent's view, which the wrapper does not compute.
        return GoalOnMap(gymnasium.make(env_id, disable_env_checker=True, **options))
