"""One episode as a film, drawn by the environment itself; needs no display."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import make
from PIL import Image

from trajectory_transformer.policies import Controller, Policy
from trajectory_transformer.rollout import split_observation

Frame = npt.NDArray[np.uint8]


def video_writer(path: Path) -> Callable[[Sequence[Frame], int], None]:
    """What writes frames at so many a second to a file of this kind."""
    if path.suffix == ".gif":

        def write_gif(frames: Sequence[Frame], rate: int) -> None:
            first, *others = [Image.fromarray(frame) for frame in frames]
            first.save(path, save_all=True, append_images=others, duration=round(1000 / rate), loop=0)

        return write_gif
    if path.suffix != ".mp4":
        raise ValueError(f"--video writes .gif or .mp4, got {path.name}")
    try:
        import imageio.v3 as imageio
        import imageio_ffmpeg  # noqa: F401 - the codec, found out here rather than after playing
    except ImportError as error:
        raise ImportError("writing .mp4 needs: pip install 'trajectory-transformer[video]'; .gif does not") from error

    def write_mp4(frames: Sequence[Frame], rate: int) -> None:
        imageio.imwrite(path, np.stack(frames), fps=rate)

    return write_mp4


def record_video(path: Path, env_id: str, policy: Policy, *, seed: int) -> None:
    """Play one episode and film it."""
    write = video_writer(path)
    env = make(env_id, render_mode="rgb_array")
    controller = Controller(policy)
    observation, _ = env.reset(seed=seed)
    frames, reward, over = [_frame(env)], 0.0, False
    while not over:
        observations, goals = split_observation(_batched(observation))
        action = controller.act(observations[0], reward=reward, goal=goals[0])
        observation, earned, terminated, truncated, _ = env.step(action)
        reward, over = float(earned), terminated or truncated
        frames.append(_frame(env))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(frames, int(env.metadata.get("render_fps", 30)))
    env.close()


def _batched(observation: Any) -> Any:
    """One environment's observation as a vector environment would return it."""
    if isinstance(observation, dict):
        return {name: np.asarray(part)[None] for name, part in observation.items()}
    return np.asarray(observation)[None]


def _frame(env: Any) -> Frame:
    frame: Frame = np.asarray(env.render(), dtype=np.uint8)
    return frame
