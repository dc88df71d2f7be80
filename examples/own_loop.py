"""Control without Gymnasium: any loop that reads a state and sends an action.

python examples/own_loop.py RUN        (a run of `tt demo`)
"""

import sys

import numpy as np

from trajectory_transformer import Planner, SearchConfig
from trajectory_transformer.envs.rooms import move


def main() -> None:
    """Drive a point through four rooms. The planner sees positions only."""
    planner = Planner(sys.argv[1], search=SearchConfig(beam_width=8, horizon=3, context=0))
    position, goal = np.array([0.1, 0.1]), np.array([0.9, 0.9])
    for step in range(100):
        action = planner.act(position, goal=goal)
        position = move(position, np.array([action[0], 0.0]))  # replace these two lines by your own system
        position = move(position, np.array([0.0, action[1]]))
        if np.linalg.norm(position - goal) < 0.05:
            print(f"reached the goal after {step + 1} steps")
            return
    print(f"stopped after 100 steps, {np.linalg.norm(position - goal):.2f} from the goal")


if __name__ == "__main__":
    main()
