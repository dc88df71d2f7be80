"""An animated picture of a planner that runs: the postures its candidates predict, faint to strong, the winner bold.

python benchmarks/runner_picture.py runs/hopper docs/images/runner.gif

For models of hopper, walker2d and halfcheetah, whose observations are all positions but x, then all velocities.
"""

import argparse
import io
from typing import Any

import imageio.v3 as imageio
import mujoco
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from trajectory_transformer import Planner, TrajectoryModel
from trajectory_transformer.viewer.bodies import stick_figure
from trajectory_transformer.viewer.control import Control, candidate_strengths, make_control_env, with_search

FAINT, BOLD, BODY, GROUND = "#3b6fb6", "#d1495b", "#1c1e21", "#9aa0a6"


def postures(env: Any, states: np.ndarray) -> list[np.ndarray]:
    """Segments [S, 2, 2] in the plane of motion of predicted states [h, O], the current state first.

    x is not observed: it is where the body is, plus predicted velocities times the time between states.
    """
    inner = env.unwrapped
    kept = inner.data.qpos.copy(), inner.data.qvel.copy()
    num_angles = inner.model.nq - 1
    x, found = float(kept[0][0]), []
    for state in states:
        if not np.isfinite(state).all():
            break
        inner.data.qpos[0], inner.data.qpos[1:] = x, state[:num_angles]
        mujoco.mj_kinematics(inner.model, inner.data)
        found.append(stick_figure(env)[:, :, [0, 2]])
        x += float(state[num_angles]) * inner.dt
    inner.data.qpos[:], inner.data.qvel[:] = kept
    mujoco.mj_forward(inner.model, inner.data)
    return found


def draw(control: Control) -> np.ndarray:
    """The body, where each candidate's plan ends and the winner's way there, as an image [H, W, 3]."""
    env = control.env
    figure = Figure(figsize=(6, 3.2), dpi=80)
    panel = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    middle = float(env.unwrapped.data.qpos[0])  # type: ignore[attr-defined]
    panel.set(xlim=(middle - 1.3, middle + 2.0), ylim=(-0.1, 1.66), aspect="equal")
    panel.set_axis_off()
    panel.axhline(0.0, color=GROUND, linewidth=1)
    for mark in np.arange(np.floor(middle - 2), middle + 3, 0.5):
        panel.plot([mark, mark - 0.05], [0.0, -0.06], color=GROUND, linewidth=1)
    if not control.moment.over:
        candidates = list(zip(control.plan.states, candidate_strengths(control.plan.scores), strict=True))
        for states, alpha in reversed(candidates[1:]):
            last = postures(env, states)[-1]
            panel.add_collection(LineCollection(list(last), colors=FAINT, alpha=0.5 * alpha, linewidths=2))
        for segments in postures(env, control.plan.states[0])[1:]:
            panel.add_collection(LineCollection(list(segments), colors=BOLD, alpha=0.35, linewidths=2))
    body = stick_figure(env)[:, :, [0, 2]]
    panel.add_collection(LineCollection(list(body), colors=BODY, alpha=0.75, linewidths=7, capstyle="round"))
    total = float(control.moment.rewards.sum())
    panel.text(0.02, 0.93, f"step {control.moment.step}, return {total:.0f}", transform=panel.transAxes, color=BODY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return np.asarray(imageio.imread(buffer.getvalue()))[..., :3]


def main() -> None:
    """Run for some steps, and write every second one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--skip", type=int, default=60, help="steps before the first picture")
    parser.add_argument("--horizon", type=int, default=15, help="transitions ahead")
    options = parser.parse_args()
    model = TrajectoryModel.load(options.run)
    short = Planner(model, kind="return")
    control = Control(make_control_env(model), short)
    frames = []
    for step in range(options.skip + options.steps):
        if control.moment.over:
            break
        if step >= options.skip and step % 2 == 0:
            control.replan(with_search(short, horizon=options.horizon))  # to look further ahead than it acts
            frames.append(draw(control))
            control.replan(short)
        control.step()
    if not frames:
        raise SystemExit(f"the episode ended after {control.moment.step} steps: lower --skip")
    imageio.imwrite(options.out, np.stack(frames), duration=60, loop=0)
    print(f"{control.moment.step} steps, return {control.moment.rewards.sum():.0f}: {options.out}")


if __name__ == "__main__":
    main()
