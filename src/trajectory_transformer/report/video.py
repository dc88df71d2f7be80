"""Record an episode as a video of the environment's rendered frames; needs no display."""

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

from trajectory_transformer.envs import make_env
from trajectory_transformer.files import replacing, write_atomically
from trajectory_transformer.rollout import Policy, rollout

Frame = npt.NDArray[np.uint8]
MIN_SECONDS = 3
MIN_RATE = 4  # frames per second


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
    """Keeps the rendered frames of an environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], on_frame: Callable[[], None]) -> None:
        super().__init__(env)
        self.frames: list[Frame] = []
        self._on_frame = on_frame

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**options)
        self._render()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._render()
        return result

    def _render(self) -> None:
        self.frames.append(np.array(self.env.render(), dtype=np.uint8))
        self._on_frame()


def check_video(path: str | Path, env_id: str, env_options: Mapping[str, Any] | None = None) -> None:
    """Render one frame, so that an environment without pictures is refused before anything is played."""
    video_writer(path)
    with _rendering(env_id, env_options) as env:
        try:
            env.reset(seed=0)
            frame = env.render()
        except Exception as error:  # drivers raise exceptions of their own
            raise ValueError(f"environment {env_id!r} cannot be recorded: {error}") from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        kind = type(frame).__name__
        raise ValueError(f"environment {env_id!r} cannot be recorded: it must render pictures as arrays, got {kind}")


@contextmanager
def _rendering(env_id: str, env_options: Mapping[str, Any] | None) -> Iterator[gymnasium.Env[Any, Any]]:
    """The environment with pictures as arrays."""
    with warnings.catch_warnings():
        # Gymnasium warns about a render mode that an environment does not have, and goes on.
        warnings.filterwarnings("error", message=".*render_mode")
        try:
            env = make_env(env_id, render_mode="rgb_array", **(env_options or {}))
        except Exception as error:  # an environment may refuse its arguments with any exception
            raise ValueError(
                f"environment {env_id!r} cannot be recorded: it has no render mode rgb_array ({error})"
            ) from error
    try:
        yield env
    finally:
        env.close()


def record_video(
    path: str | Path,
    env_id: str,
    policy: Policy,
    *,
    seed: int,
    env_options: Mapping[str, Any] | None = None,
    on_frame: Callable[[], None] = lambda: None,
) -> None:
    """Play one episode and write it as a video of at least 3 seconds; `on_frame` is called after each frame."""
    path = Path(path)
    write = video_writer(path)
    with _rendering(env_id, env_options) as env:
        recorder = _FrameRecorder(env, on_frame)
        envs = SyncVectorEnv([lambda: recorder], copy=False, autoreset_mode=AutoresetMode.DISABLED)
        rollout(envs, policy, num_episodes=1, seed=seed)
    write(*_paced(recorder.frames, int(recorder.metadata.get("render_fps", 30))))


def _paced(frames: Sequence[Frame], rate: int) -> tuple[Sequence[Frame], int]:
    """Slow a short episode down, and hold the last frame of a very short one."""
    rate = max(min(rate, len(frames) // MIN_SECONDS), MIN_RATE)
    held = max(MIN_SECONDS * rate - len(frames), 0)
    return [*frames, *[frames[-1]] * held], rate
