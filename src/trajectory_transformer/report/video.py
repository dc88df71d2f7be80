"""Record an episode as a video of the environment's rendered frames; needs no display."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image

from trajectory_transformer.data.episode import Episode, FloatArray
from trajectory_transformer.envs import make_env
from trajectory_transformer.files import replacing, write_atomically
from trajectory_transformer.rollout import Step, rollout

Frame = npt.NDArray[np.uint8]
MIN_SECONDS = 3
MIN_RATE, MAX_RATE = 4, 25  # frames per second


def video_writer(path: str | Path) -> Callable[[Sequence[Frame], int], None]:
    """A function that writes frames at a frame rate to a .gif or .mp4 file; raises if a package is missing.

    The file appears complete or not at all.
    """
    path = Path(path)
    if path.suffix == ".gif":

        def write_gif(frames: Sequence[Frame], rate: int) -> None:
            first, *others = [Image.fromarray(frame) for frame in frames]
            with replacing(path) as temporary:
                first.save(temporary, "GIF", save_all=True, append_images=others, duration=round(1000 / rate), loop=0)

        return write_gif
    if path.suffix != ".mp4":
        raise ValueError(f"a video file must be .gif or .mp4, got {path.name}")
    try:
        import imageio.v3 as imageio
        import imageio_ffmpeg  # noqa: F401 - the codec; checked before the episode is played
    except ImportError as error:
        raise ImportError("writing .mp4 needs: pip install 'trajectory-transformer[video]' (.gif does not)") from error

    def write_mp4(frames: Sequence[Frame], rate: int) -> None:
        # The codec chooses its format by the suffix, which a temporary file beside the target does not have.
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "video.mp4"
            imageio.imwrite(written, np.stack(frames), fps=rate)
            write_atomically(path, written.read_bytes())

    return write_mp4


class _FrameRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps every `stride`-th rendered frame of an environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], stride: int) -> None:
        super().__init__(env)
        self.frames: list[Frame] = []
        self._stride = stride
        self._num_states = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**options)
        self._render()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._render()
        return result

    def _render(self) -> None:
        if self._num_states % self._stride == 0:
            self.frames.append(np.array(self.env.render(), dtype=np.uint8))
        self._num_states += 1


class _Replay:
    """A policy that repeats the actions of an episode; planning them again may take minutes."""

    def __init__(self, episode: Episode, on_step: Callable[[], None]) -> None:
        self._episode = episode
        self._on_step = on_step
        self._taken = 0

    def act(self, step: Step) -> FloatArray:
        self._on_step()
        self._taken += 1
        return self._episode.actions[self._taken - 1 : self._taken]


def check_video(path: str | Path, env_id: str, env_options: Mapping[str, Any] | None = None) -> None:
    """Render one frame, so that an environment without pictures is refused before anything is played."""
    video_writer(path)
    with _rendering(env_id, env_options) as env:
        try:
            env.reset(seed=0)
            frame = env.render()
        except Exception as error:  # drivers raise exceptions of their own
            cure = "; MuJoCo tries other libraries with MUJOCO_GL=egl, osmesa or glfw" if "OpenGL" in str(error) else ""
            raise ValueError(f"environment {env_id!r} cannot be recorded: {error}{cure}") from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        kind = type(frame).__name__
        raise ValueError(f"environment {env_id!r} cannot be recorded: it must render pictures as arrays, got {kind}")


@contextmanager
def _rendering(env_id: str, env_options: Mapping[str, Any] | None) -> Iterator[gymnasium.Env[Any, Any]]:
    """The environment with pictures as arrays."""
    # Pictures need no display; without this, pygame looks for one and prints an error where there is none.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's own default needs a display
    with warnings.catch_warnings():
        # Gymnasium warns about a render mode that an environment does not have, and goes on.
        warnings.filterwarnings("error", message=".*render_mode")
        try:
            env = make_env(env_id, render_mode="rgb_array", **(env_options or {}))
        except ImportError:
            raise  # a missing package is named with its cure
        except Exception as error:  # an environment may refuse its arguments with any exception
            raise ValueError(
                f"environment {env_id!r} cannot be recorded: it has no render mode rgb_array ({error})"
            ) from error
    _follow_body(env)
    try:
        yield env
    finally:
        env.close()


def _follow_body(env: gymnasium.Env[Any, Any]) -> None:
    """Take the camera of a MuJoCo body, if it has one: Gymnasium's own stays where it is, and the body runs away."""
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is not None and renderer.camera_id == -1:
        import mujoco

        model = env.unwrapped.model  # type: ignore[attr-defined]
        renderer.camera_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")


def record_video(
    path: str | Path,
    env_id: str,
    episode: Episode,
    *,
    seed: int,
    env_options: Mapping[str, Any] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Play an episode again, by its seed and actions, and write it as a video of at least 3 seconds.

    `on_step` is called before each step. Frames that come faster than players show them are left out.
    """
    path = Path(path)
    write = video_writer(path)
    with _rendering(env_id, env_options) as env:
        rate = int(env.metadata.get("render_fps", 30))
        stride = max(min(rate // MAX_RATE, len(episode) // (MIN_SECONDS * MAX_RATE)), 1)
        recorder = _FrameRecorder(env, stride)
        envs = SyncVectorEnv([lambda: recorder], copy=False, autoreset_mode=AutoresetMode.DISABLED)
        rollout(envs, _Replay(episode, on_step), num_episodes=1, seed=seed)
    write(*_paced(recorder.frames, rate // stride))


def _paced(frames: Sequence[Frame], rate: int) -> tuple[Sequence[Frame], int]:
    """Slow a short episode down, and hold the last frame of a very short one."""
    rate = max(min(rate, len(frames) // MIN_SECONDS), MIN_RATE)
    held = max(MIN_SECONDS * rate - len(frames), 0)
    return [*frames, *[frames[-1]] * held], rate
