"""Rank plans by your own idea of worth: return, less a price for abrupt actions.

python examples/custom_objective.py RUN [STEPS]        (a run trained with rewards, for example on Pendulum-v1)
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor

from trajectory_transformer import (
    Candidates,
    Controller,
    Objective,
    PlanningPolicy,
    SearchConfig,
    TrajectoryModel,
    discounted_return,
)


def gentle_return(model: TrajectoryModel, price: float) -> Objective:
    """Discounted return minus `price` for every unit that an action differs from the one before."""
    layout = model.layout
    values = torch.from_numpy(model.discretizer.values[layout.action]).float()  # [A, V]
    earn = discounted_return(model.tokens.discount)

    def score(candidates: Candidates) -> Tensor:
        # Actions stand at the front of every transition of the plan, which begins with one.
        starts = range(0, candidates.tokens.shape[-1], layout.size)
        tokens = torch.stack([candidates.tokens[..., at : at + layout.action_dim] for at in starts], dim=-2)
        tokens = tokens.clamp(max=values.shape[1] - 1)  # a stop token has no value; the plan earns nothing there anyway
        actions = values[torch.arange(layout.action_dim), tokens]  # [E, K, h, A]
        return earn(candidates) - price * actions.diff(dim=-2).abs().sum(dim=(-2, -1))

    return score


def main() -> None:
    """Compare how abruptly the two planners act."""
    model = TrajectoryModel.load(Path(sys.argv[1]))
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    config = SearchConfig(beam_width=16, horizon=4)
    for name, price in (("return alone", 0.0), ("gentle", 1.0)):
        controller = Controller(PlanningPolicy(model, config, gentle_return(model, price)))
        env = gymnasium.make(str(model.metadata["env"]))
        observation, _ = env.reset(seed=0)
        rewards, actions = [0.0], []
        for _ in range(steps):
            actions.append(controller.act(observation, reward=rewards[-1]))
            observation, reward, *_ = env.step(actions[-1])
            rewards.append(float(reward))
        change = np.abs(np.diff(actions, axis=0)).mean()
        print(f"{name}: return {sum(rewards):.0f}, mean change of action {change:.3f}")


if __name__ == "__main__":
    main()
