"""What candidates are ranked by. A goal is not an objective but a prompt."""

import functools

import torch
from torch import Tensor

from trajectory_transformer.search.beam import Objective
from trajectory_transformer.search.decoder import Candidates


def log_likelihood(candidates: Candidates) -> Tensor:
    """How much a candidate looks like the data: imitation."""
    return candidates.log_prob


def discounted_return(discount: float, *, value_includes_reward: bool = False) -> Objective:
    """Rewards so far plus the return that follows them.

    A value that includes its own step's reward (the paper's return-to-go) stands in for the last reward as well.
    """

    def score(candidates: Candidates) -> Tensor:
        rewards = candidates.rewards[..., :-1] if value_includes_reward else candidates.rewards
        steps = rewards.shape[-1]
        return torch.add(rewards @ _weights(discount, steps, rewards.device), candidates.value, alpha=discount**steps)

    return score


@functools.cache
def _weights(discount: float, steps: int, device: torch.device) -> Tensor:
    """What rewards count, one after the other [steps]. Made once: on a GPU three operations each time add up."""
    return discount ** torch.arange(steps, device=device)
