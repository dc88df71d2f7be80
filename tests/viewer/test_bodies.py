"""Pictures of MuJoCo bodies."""

import gymnasium
import numpy as np
import pytest

from trajectory_transformer.envs import make_env
from trajectory_transformer.viewer.bodies import Camera, is_mujoco, stick_figure


@pytest.fixture
def hopper() -> gymnasium.Env[np.ndarray, np.ndarray]:
    pytest.importorskip("mujoco", reason="needs the mujoco extra")
    env = make_env("Hopper-v5", reset_noise_scale=0.0)
    env.reset(seed=0)
    return env


def test_a_stick_figure_has_one_segment_per_part(hopper: gymnasium.Env[np.ndarray, np.ndarray]) -> None:
    assert is_mujoco(hopper)
    torso, thigh, leg, foot = stick_figure(hopper)
    # Hopper's XML: the torso from 1.05 to 1.45, the thigh down to 0.6, the leg to 0.1, the foot along x.
    assert sorted(torso[:, 2]) == pytest.approx([1.05, 1.45]) and sorted(thigh[:, 2]) == pytest.approx([0.6, 1.05])
    assert sorted(leg[:, 2]) == pytest.approx([0.1, 0.6])
    assert sorted(foot[:, 0]) == pytest.approx([-0.13, 0.26]) and foot[:, 2] == pytest.approx([0.1, 0.1])


def test_a_camera_gives_a_frame_or_the_reason_for_none(hopper: gymnasium.Env[np.ndarray, np.ndarray]) -> None:
    camera = Camera(hopper, 40, 30)
    frame = camera.frame()
    if frame is None:
        assert "MUJOCO_GL" in camera.reason
    else:
        assert frame.shape == (30, 40, 3) and frame.std() > 0 and camera.reason == ""
    camera.close()
    assert camera.frame() is None


def test_other_environments_have_no_body() -> None:
    assert not is_mujoco(make_env("tt/FourRooms-v0"))
