"""Videos show the episode that was played, without planning it again."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.data.episode import Episode, FloatArray
from trajectory_transformer.report import video
from trajectory_transformer.report.video import record_video
from trajectory_transformer.rollout import Step, make_envs, rollout

SEED, NUM_STEPS = 5, 32  # of an episode that is started with it


class Alternating:
    """Pushes left and right in turn, which balances a pole for a while."""

    def __init__(self) -> None:
        self._steps = 0

    def act(self, step: Step) -> FloatArray:
        self._steps += 1
        return np.full((len(step.observations), 1), self._steps % 2, dtype=np.float32)


@pytest.fixture
def episode() -> Episode:
    envs = make_envs("CartPole-v1", 1)
    return rollout(envs, Alternating(), num_episodes=1, seed=SEED)[0]


def test_a_video_shows_the_states_of_the_episode(
    episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, steps = [], []
    keep = video._FrameRecorder._render

    def render(recorder: video._FrameRecorder) -> None:
        keep(recorder)
        states.append(np.array(recorder.unwrapped.state, dtype=np.float32))  # type: ignore[attr-defined]

    monkeypatch.setattr(video._FrameRecorder, "_render", render)
    record_video(tmp_path / "a.gif", "CartPole-v1", episode, seed=SEED, on_step=lambda: steps.append(1))
    assert len(steps) == len(episode) > 10
    np.testing.assert_allclose(np.stack(states), episode.observations, rtol=1e-5)


@pytest.mark.parametrize(("max_rate", "stride"), [(25, 1), (10, 3)])
def test_frames_of_a_long_episode_are_left_out(
    episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_rate: int, stride: int
) -> None:
    """CartPole-v1 has 50 frames per second; enough must be left for 3 seconds."""
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(video, "video_writer", lambda path: lambda *given: written.append((len(given[0]), given[1])))
    monkeypatch.setattr(video, "_paced", lambda frames, rate: (frames, rate))
    monkeypatch.setattr(video, "MIN_SECONDS", 1)
    monkeypatch.setattr(video, "MAX_RATE", max_rate)
    record_video(tmp_path / "a.gif", "CartPole-v1", episode, seed=SEED)
    assert len(episode) == NUM_STEPS
    assert written == [(NUM_STEPS // stride + 1, 50 // stride)]


def test_pictures_without_a_display_print_no_error() -> None:
    script = "from trajectory_transformer.report.video import check_video; check_video('a.gif', 'Pendulum-v1')"
    env = {key: value for key, value in os.environ.items() if key not in ("XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_camera_follows_a_body_that_runs_away() -> None:
    pytest.importorskip("mujoco")
    try:
        video.check_video("x.gif", "Hopper-v5")
    except ValueError as error:
        pytest.skip(f"no OpenGL here: {error}")
    brown = []
    with video._rendering("Hopper-v5", None) as env:
        env.reset(seed=0)
        inner = env.unwrapped
        for x in (0.0, 40.0):
            inner.set_state(np.array([x, *inner.init_qpos[1:]]), inner.init_qvel)  # type: ignore[attr-defined]
            frame = np.asarray(env.render()).astype(int)
            brown.append(int((frame[..., 0] > frame[..., 2] + 40).sum()))
    assert brown[0] > 100 and abs(brown[1] - brown[0]) < 0.2 * brown[0], brown
