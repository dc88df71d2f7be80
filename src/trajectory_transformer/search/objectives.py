"""What candidates are ranked by. A goal is not an objective but a prompt."""

import torch
from torch import Tensor

from trajectory_transformer.model.decoders import Candidates
from trajectory_transformer.search.beam import Objective


def log_likelihood(candidates: Candidates) -> Tensor:
    """How much a candidate looks like the data: imitation."""
    return candidates.log_prob


def discounted_return(discount: float, *, value_includes_reward: bool = False) -> Objective:
    """Rewards so far plus the return that follows them.

    A value that includes its own step's reward (the paper's return-to-go) stands in for the last reward as well.
    """

    def score(candidates: Candidates) -> Tensor:
        rewards = candidates.rewards  # [E, K, h]
        weights = discount ** torch.arange(rewards.shape[-1] + 1, device=rewards.device)
        if value_includes_reward:
            return rewards[..., :-1] @ weights[:-2] + candidates.value * weights[-2]
        return rewards @ weights[:-1] + candidates.value * weights[-1]

    return score
