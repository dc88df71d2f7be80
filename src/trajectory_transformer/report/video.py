"""Record an episode as a video of the environment's rendered frames; needs no display."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image

from trajectory_transformer.envs import make_env
from trajectory_transformer.rollout import Policy, rollout

Frame = npt.NDArray[np.uint8]


def video_writer(path: str | Path) -> Callable[[Sequence[Frame], int], None]:
    """A function that writes frames at a frame rate to a .gif or .mp4 file; raises if a package is missing."""
    path = Path(path)
    if path.suffix == ".gif":

        def write_gif(frames: Sequence[Frame], rate: int) -> None:
            first, *others = [Image.fromarray(frame) for frame in frames]
            first.save(path, save_all=True, append_images=others, duration=round(1000 / rate), loop=0)

        return write_gif
    if path.suffix != ".mp4":
        raise ValueError(f"a video file must be .gif or .mp4, got {path.name}")
    try:
        import imageio.v3 as imageio
        import imageio_ffmpeg  # noqa: F401 - the codec; checked before the episode is played
    except ImportError as error:
        raise ImportError("writing .mp4 needs: pip install 'trajectory-transformer[video]' (.gif does not)") from error

    def write_mp4(frames: Sequence[Frame], rate: int) -> None:
        imageio.imwrite(path, np.stack(frames), fps=rate)

    return write_mp4


class _FrameRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps the rendered frames of an environment."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.frames: list[Frame] = []

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


def record_video(
    path: str | Path, env_id: str, policy: Policy, *, seed: int, env_options: Mapping[str, Any] | None = None
) -> None:
    """Play one episode and write it as a video."""
    path = Path(path)
    write = video_writer(path)
    recorder = _FrameRecorder(make_env(env_id, render_mode="rgb_array", **(env_options or {})))
    envs = SyncVectorEnv([lambda: recorder], copy=False, autoreset_mode=AutoresetMode.DISABLED)
    rollout(envs, policy, num_episodes=1, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(recorder.frames, int(recorder.metadata.get("render_fps", 30)))
    envs.close()
