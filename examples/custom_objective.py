"""Rank plans by your own idea of worth: return, less a price for abrupt actions.

    python examples/custom_objective.py RUN        (a run trained with rewards, for example on Pendulum-v1)
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer import (
    Candidates,
    Objective,
    PlanConfig,
    PlanningPolicy,
    TrajectoryModel,
    discounted_return,
    make_envs,
    rollout,
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
    config = PlanConfig(beam_width=16, horizon=4)
    for name, price in (("return alone", 0.0), ("gentle", 1.0)):
        policy = PlanningPolicy(model, config, gentle_return(model, price))
        (episode,) = rollout(make_envs(str(model.metadata["env"]), 1), policy, num_episodes=1, seed=0)
        change = np.abs(np.diff(episode.actions, axis=0)).mean()
        print(f"{name}: return {episode.total_reward:.0f}, mean change of action {change:.3f}")


if __name__ == "__main__":
    main()
