"""Picture of predicted humanoids: one row per predictor, one body every ten steps, with the paths of head and feet.

    python benchmarks/humanoid_strip.py work/humanoid/futures.npz --out docs/images/humanoid.png

The file, which `benchmarks/humanoid.py` writes, holds states [steps + 1, O] by name: positions without those of the
root in the plane, then velocities. They are set into MuJoCo and rendered offscreen (MUJOCO_GL says with what); the
place of the root follows from its velocity. Works for any Gymnasium body with such observations (`--env`, `--traced`).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.report.prediction import LABELS

FIELD_OF_VIEW = 4.0  # degrees, from far away: all bodies are seen from the side
HEIGHT, MARGIN = 2.0, 1.0  # metres that a row shows above each other, and beside the outermost bodies
FAR = 1000.0  # a state with a larger entry has diverged
PIXELS = 320  # of a row, vertically
COLORS = ("tab:orange", "tab:blue", "tab:green")

Array = npt.NDArray[np.float64]


def place(model: Any, states: Array, seconds: float) -> Array:
    """Positions [T, nq] of states [T, O] that are `seconds` apart.

    They end before a state that is not finite or far beyond what a body can reach.
    """
    hidden = model.nq + model.nv - states.shape[1]  # coordinates of the root that are not observed
    if hidden not in (1, 2):
        wanted = f"{model.nq + model.nv - 2} or {model.nq + model.nv - 1}"
        raise SystemExit(f"states of {wanted} dimensions are needed, got {states.shape[1]}")
    far = np.flatnonzero((~np.isfinite(states) | (np.abs(states) > FAR)).any(axis=1))
    states = states[: far[0]] if len(far) else states
    observed, velocities = np.split(states, [model.nq - hidden], axis=1)
    moved = np.cumsum(velocities[:-1, :hidden] * seconds, axis=0)
    return np.concatenate([np.concatenate([np.zeros((1, hidden)), moved]), observed], axis=1)


def trace(model: Any, positions: Array, names: Sequence[str]) -> Array:
    """Where geoms are in the world: positions [T, nq] -> [T, names, 3]."""
    data = mujoco.MjData(model)
    found = []
    for position in positions:
        data.qpos[:] = position
        mujoco.mj_forward(model, data)
        found.append([data.geom(name).xpos.copy() for name in names])
    return np.array(found)


class Side:
    """A camera that looks along y, far away, at a stretch of the x axis."""

    def __init__(self, model: Any, left: float, right: float) -> None:
        """Show x from `left` to `right`."""
        self.width = round(PIXELS * (right - left) / HEIGHT)
        model.vis.global_.fovy = FIELD_OF_VIEW
        model.vis.global_.offwidth = max(self.width, model.vis.global_.offwidth)
        self.camera = mujoco.MjvCamera()
        self.camera.azimuth, self.camera.elevation = 90.0, 0.0
        self.camera.lookat[:] = ((left + right) / 2, 0.0, HEIGHT / 2 - 0.1)
        self.camera.distance = HEIGHT / 2 / np.tan(np.radians(FIELD_OF_VIEW / 2))
        self.renderer = mujoco.Renderer(model, PIXELS, self.width)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_FOG, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self.renderer.scene.flags[flag] = 0
        self.model = model

    def pixels(self, points: Array) -> Array:
        """Where points [..., 3] appear: column and row [..., 2]."""
        offset = points - np.asarray(self.camera.lookat)
        scale = PIXELS / HEIGHT * self.camera.distance / (self.camera.distance + offset[..., 1])
        return np.stack([self.width / 2 + scale * offset[..., 0], PIXELS / 2 - scale * offset[..., 2]], axis=-1)

    def draw(self, positions: Array) -> npt.NDArray[np.uint8]:
        """One picture of several poses [N, nq], the later ones in front: [height, width, 3]."""
        data, picture = mujoco.MjData(self.model), None
        for position in positions:
            data.qpos[:] = position
            mujoco.mj_forward(self.model, data)
            self.renderer.update_scene(data, self.camera)
            frame = self.renderer.render().copy()
            self.renderer.enable_segmentation_rendering()
            geoms = self.renderer.render()[..., 0].copy()
            self.renderer.disable_segmentation_rendering()
            # Geoms of body 0 are the floor.
            body = np.where(geoms >= 0, self.model.geom_bodyid[np.maximum(geoms, 0)], 0) > 0
            picture = frame if picture is None else np.where(body[..., None], frame, picture)
        assert picture is not None, "there is at least one pose"
        return np.asarray(picture, np.uint8)

    def close(self) -> None:
        """Free the context."""
        self.renderer.close()


def strip_figure(env_id: str, futures: Mapping[str, Array], traced: Sequence[str], every: int) -> Figure:
    """One row for each future [T, O]; the first one decides how much is shown."""
    env = gymnasium.make(env_id).unwrapped
    model, seconds = env.model, env.dt  # type: ignore[attr-defined]
    poses = {name: place(model, states, seconds) for name, states in futures.items()}
    places = next(iter(poses.values()))[:, 0]
    side = Side(model, float(places.min()) - MARGIN, float(places.max()) + MARGIN)
    figure = Figure(figsize=(side.width / PIXELS * 1.8 + 0.4, 1.8 * len(poses) + 0.4), layout="constrained")
    panels = figure.subplots(len(poses), 1, squeeze=False)[:, 0]
    for panel, (name, positions) in zip(panels, poses.items(), strict=True):
        panel.imshow(side.draw(positions[::every]))
        paths = side.pixels(trace(model, positions, traced))  # [T, names, 2]
        for index, label in enumerate(traced):
            line = paths[:, index]
            panel.plot(
                line[:, 0], line[:, 1], color=COLORS[index % len(COLORS)], linewidth=1.0, label=label.replace("_", " ")
            )
        panel.set(xlim=(0, side.width), ylim=(PIXELS, 0), xticks=[], yticks=[])
        panel.set_ylabel(LABELS.get(name, name))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(traced), frameon=False, fontsize="small")
    side.close()
    env.close()
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the strip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("futures", type=Path, help="file of states by name")
    parser.add_argument("--env", default="Humanoid-v5")
    parser.add_argument("--traced", nargs="+", default=["head", "left_foot", "right_foot"], help="geoms with a path")
    parser.add_argument("--every", type=int, default=10, help="steps between two bodies")
    parser.add_argument("--out", type=Path, default=Path("humanoid.png"))
    options = parser.parse_args(arguments)
    with np.load(options.futures) as file:
        futures = {name: np.asarray(file[name], np.float64) for name in file}
    strip_figure(options.env, futures, options.traced, options.every).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
