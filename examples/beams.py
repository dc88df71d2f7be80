"""An animated picture of a planner in the four rooms: all candidates faint to strong, the winner bold.

python examples/beams.py runs/demo docs/images/beams.gif
"""

import io
import sys

import imageio.v3 as imageio
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from trajectory_transformer import Planner, SearchConfig, TrajectoryModel
from trajectory_transformer.envs.rooms import WALLS
from trajectory_transformer.viewer.control import Control, candidate_strengths, make_control_env


def draw(control: Control) -> np.ndarray:
    """The rooms with goal, trail, candidates and agent, as an image [H, W, 3]."""
    figure = Figure(figsize=(4, 4), dpi=90)
    panel = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    panel.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    panel.set_axis_off()
    panel.add_collection(LineCollection(list(WALLS), colors="#1c1e21", linewidths=3, capstyle="round"))
    trail = control.moment.observations[:, :2]
    panel.plot(trail[:, 0], trail[:, 1], color="#1c1e21", alpha=0.5)
    panel.plot(*control.moment.goal, marker="*", markersize=18, color="#2a9d5c", markeredgecolor="white")
    if not control.moment.over:
        for states, alpha in reversed(
            list(zip(control.plan.states, candidate_strengths(control.plan.scores), strict=True))
        ):
            panel.plot(states[:, 0], states[:, 1], color="#3b6fb6", alpha=alpha, linewidth=1.2)
        panel.plot(control.plan.states[0, :, 0], control.plan.states[0, :, 1], color="#d1495b", linewidth=3)
    panel.plot(*trail[-1], marker="o", markersize=9, color="#1c1e21", markeredgecolor="white")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return np.asarray(imageio.imread(buffer.getvalue()))[..., :3]


def main() -> None:
    """Plan from one corner to the other, and write one frame per step."""
    run, out = sys.argv[1], sys.argv[2]
    model = TrajectoryModel.load(run)
    search = SearchConfig(beam_width=64, horizon=8, context=0)
    control = Control(make_control_env(model), Planner(model, search=search))
    control.restart(options={"start": (0.15, 0.2), "goal": (0.85, 0.85)})
    frames = [draw(control)]
    while not control.moment.over and control.moment.step < 60:
        control.step()
        frames.append(draw(control))
    imageio.imwrite(out, np.stack([*frames, *[frames[-1]] * 8]), duration=120, loop=0)
    print(f"{control.moment.step} steps, {'arrived' if control.moment.success else 'not reached'}: {out}")


if __name__ == "__main__":
    main()
