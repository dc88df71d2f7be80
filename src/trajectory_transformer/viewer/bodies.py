"""Pictures of a MuJoCo body: rendered frames where OpenGL works, else a stick figure."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from trajectory_transformer.data.episode import DoubleArray

Frame = npt.NDArray[np.uint8]


def is_mujoco(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an environment simulates a MuJoCo body."""
    inner = env.unwrapped
    return hasattr(inner, "model") and hasattr(getattr(inner, "data", None), "geom_xpos")


def stick_figure(env: gymnasium.Env[Any, Any]) -> DoubleArray:
    """The capsules of a body as segments [S, 2, 3] in the world, and spheres as points (two equal ends)."""
    model, data = env.unwrapped.model, env.unwrapped.data  # type: ignore[attr-defined]
    capsule, sphere = 3, 2  # mjGEOM_CAPSULE, mjGEOM_SPHERE
    segments = []
    for geom, kind in enumerate(np.asarray(model.geom_type).tolist()):
        if kind not in (capsule, sphere) or model.geom_bodyid[geom] == 0:  # body 0 is the world
            continue
        middle = np.asarray(data.geom_xpos[geom], np.float64)
        along = np.asarray(data.geom_xmat[geom], np.float64).reshape(3, 3)[:, 2]
        half = along * float(model.geom_size[geom][1]) if kind == capsule else np.zeros(3)
        segments.append([middle - half, middle + half])
    return np.array(segments, np.float64).reshape(-1, 2, 3)


class Camera:
    """Renders frames of a MuJoCo environment offscreen; `frame` is None where there is no OpenGL."""

    def __init__(self, env: gymnasium.Env[Any, Any], width: int = 480, height: int = 360) -> None:
        """Try to open an offscreen context."""
        self.reason = ""
        self._renderer: Any = None
        self._env = env
        try:
            import mujoco

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reason below says it better
                self._renderer = mujoco.Renderer(env.unwrapped.model, height, width)  # type: ignore[attr-defined]
            self._camera = mujoco.MjvCamera()
            self._camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
            self._camera.trackbodyid = 1
            self._camera.distance, self._camera.elevation, self._camera.azimuth = 4.0, -10.0, 90.0
            # In software these two take most of the time of a frame.
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0
        except Exception as error:  # drivers raise exceptions of their own
            self.reason = f"no offscreen OpenGL here ({error}); set MUJOCO_GL to egl or osmesa to render frames"
            self._renderer = None

    def frame(self) -> Frame | None:
        """The current picture [height, width, 3]."""
        if self._renderer is None:
            return None
        self._renderer.update_scene(self._env.unwrapped.data, self._camera)  # type: ignore[attr-defined]
        return np.asarray(self._renderer.render(), np.uint8)

    def close(self) -> None:
        """Free the context."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
