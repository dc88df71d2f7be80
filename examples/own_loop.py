"""Control without Gymnasium: any loop that can read a state and send an action.

python examples/own_loop.py RUN        (a run of `tt demo`)
"""

import sys
from pathlib import Path

import numpy as np

from trajectory_transformer import Controller, PlanningPolicy, SearchConfig, TrajectoryModel
from trajectory_transformer.envs.rooms import move


def main() -> None:
    """Drive a point through four rooms with nothing but positions."""
    model = TrajectoryModel.load(Path(sys.argv[1]))
    controller = Controller(PlanningPolicy(model, SearchConfig(beam_width=8, horizon=3, context=0)))
    position, goal = np.array([0.1, 0.1]), np.array([0.9, 0.9])
    for step in range(100):
        action = controller.act(position, goal=goal)
        position = move(position, np.array([action[0], 0.0]))  # your machine goes here
        position = move(position, np.array([0.0, action[1]]))
        if np.linalg.norm(position - goal) < 0.05:
            print(f"there after {step + 1} steps")
            return
    print(f"not there: {position}")


if __name__ == "__main__":
    main()
