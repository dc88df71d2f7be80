"""What candidates are ranked by. A goal is not an objective but part of the prompt."""

import torch
from torch import Tensor

from trajectory_transformer.search.beam import Objective
from trajectory_transformer.search.decoder import Candidates


def log_likelihood(candidates: Candidates) -> Tensor:
    """How likely a candidate is under the model: imitation."""
    return candidates.log_prob


def discounted_return(discount: float, *, value_includes_reward: bool = False) -> Objective:
    """Rewards so far plus the value that follows them.

    A value that includes its own step's reward (the paper's return-to-go) replaces the last reward.
    """

    def score(candidates: Candidates) -> Tensor:
        rewards = candidates.rewards[..., :-1] if value_includes_reward else candidates.rewards  # [E, K, h]
        steps = rewards.shape[-1]
        weights = torch.logspace(0, steps - 1, steps, base=discount, device=rewards.device)  # 1, discount, ...
        return torch.add(rewards @ weights, candidates.value, alpha=discount**steps)

    return score
