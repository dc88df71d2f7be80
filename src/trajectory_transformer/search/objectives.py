"""What candidates are ranked by. A goal is not an objective but part of the prompt."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from trajectory_transformer.search.beam import Objective
from trajectory_transformer.search.decoder import Candidates

QFunction = Callable[[Tensor, Tensor], Tensor]
"""Observations [..., O] and actions [..., A], in the units of the dataset -> values [...]."""


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
        return torch.add(rewards @ _discounts(discount, steps, rewards.device), candidates.value, alpha=discount**steps)

    return score


def q_guided(q: QFunction, discount: float, *, reward_shift: float = 0.0) -> Objective:
    """Rewards before the last action plus the discounted Q of the last state and action.

    Q replaces the predicted return: where rewards are sparse, a return that was observed once says little about what
    can be reached. After a predicted end nothing is added.

    Args:
        q: observations [E, K, O] and actions [E, K, A], in the units of the dataset -> values [E, K]. Tensor code on
            the model's device: on a GPU it becomes part of the captured search.
        discount: the one that Q was trained with.
        reward_shift: added to every predicted reward, if Q was trained with such rewards (-1 for `iql-antmaze`).
    """

    def score(candidates: Candidates) -> Tensor:
        alive = candidates.alive  # [E, K, h]
        guess = q(candidates.states[..., -1, :], candidates.actions[..., -1, :])
        if guess.shape != alive.shape[:2]:
            raise ValueError(
                f"q must return one value per candidate, shape {tuple(alive.shape[:2])}, got {tuple(guess.shape)}"
            )
        ahead = guess.where(alive[..., -1], 0.0)
        steps = alive.shape[2] - 1
        if not candidates.rewards.shape[2]:  # a model without rewards
            earned = alive[..., :-1] * reward_shift
        else:
            earned = (candidates.rewards[..., :-1] + reward_shift).where(alive[..., :-1], 0.0)
        return torch.add(earned @ _discounts(discount, steps, earned.device), ahead, alpha=discount**steps)

    return score


@functools.cache
def _discounts(discount: float, steps: int, device: torch.device) -> Tensor:
    """1, discount, its square and so on [steps]: constants of a search, made once."""
    return torch.logspace(0, steps - 1, steps, base=discount, device=device)
