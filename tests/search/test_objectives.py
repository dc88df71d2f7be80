"""Objectives against values computed by hand."""

from dataclasses import replace

import pytest
import torch

from trajectory_transformer.search.decoder import Candidates
from trajectory_transformer.search.objectives import discounted_return, log_likelihood

CANDIDATES = Candidates(
    tokens=torch.zeros(1, 2, 3, dtype=torch.long),
    log_prob=torch.tensor([[-1.0, -2.0]]),
    rewards=torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]]]),
    value=torch.tensor([[16.0, 8.0]]),
    ended=torch.tensor([[False, False]]),
    identity=torch.tensor([[1, 2]]),
)


def test_return_is_the_discounted_rewards_plus_the_value_that_follows() -> None:
    # 1 + 2/2 + 4/4 + 16/8 and 8/4 + 8/8
    assert discounted_return(0.5)(CANDIDATES).tolist() == [[5.0, 3.0]]
    assert discounted_return(1.0)(CANDIDATES).tolist() == [[23.0, 16.0]]


def test_a_value_that_includes_its_reward_replaces_the_last_reward() -> None:
    # 1 + 2/2 + 16/4 and 8/4
    assert discounted_return(0.5, value_includes_reward=True)(CANDIDATES).tolist() == [[6.0, 2.0]]


def test_imitation_ranks_by_likelihood() -> None:
    assert log_likelihood(CANDIDATES).tolist() == [[-1.0, -2.0]]


@pytest.mark.parametrize("discount", [0.0, 0.3])
def test_one_step_plans_have_a_score(discount: float) -> None:
    one = replace(CANDIDATES, rewards=CANDIDATES.rewards[..., :1])
    torch.testing.assert_close(discounted_return(discount)(one), torch.tensor([[1 + 16 * discount, 8 * discount]]))
    torch.testing.assert_close(discounted_return(discount, value_includes_reward=True)(one), one.value)
