"""Rank plans by an objective of your own: return minus a price for abrupt actions.

python examples/custom_objective.py RUN [STEPS]        (a run trained with rewards, for example on Pendulum-v1)
"""

import sys

import gymnasium
import numpy as np
from torch import Tensor

from trajectory_transformer import (
    Candidates,
    Objective,
    Planner,
    SearchConfig,
    TrajectoryModel,
    discounted_return,
)


def smooth_return(model: TrajectoryModel, price: float) -> Objective:
    """Discounted return minus `price` for every unit by which an action differs from the one before."""
    tokens = model.tokenizer.config
    expected_return = discounted_return(tokens.discount, value_includes_reward=tokens.value_includes_reward)

    def score(candidates: Candidates) -> Tensor:
        changes = candidates.actions.diff(dim=2).abs()  # [E, K, h - 1, A], in real units
        return expected_return(candidates) - price * changes.sum(dim=(2, 3))

    return score


def main() -> None:
    """Compare how abruptly two planners act."""
    model = TrajectoryModel.load(sys.argv[1])
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    search = SearchConfig(beam_width=16, horizon=4)
    for name, price in (("return", 0.0), ("smooth return", 1.0)):
        planner = Planner(model, objective=smooth_return(model, price), search=search)
        env = gymnasium.make(str(model.metadata["env"]))
        observation, _ = env.reset(seed=0)
        rewards, actions = [0.0], []
        for _ in range(steps):
            actions.append(planner.act(observation, reward=rewards[-1]))
            observation, reward, *_ = env.step(actions[-1])
            rewards.append(float(reward))
        change = np.abs(np.diff(actions, axis=0)).mean()
        print(f"{name}: return {sum(rewards):.0f}, mean change of action {change:.3f}")


if __name__ == "__main__":
    main()
