"""Objectives against values computed by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trajectory_transformer.search.decoder import Bins, Candidates
from trajectory_transformer.search.objectives import discounted_return, log_likelihood, q_guided
from trajectory_transformer.tokens.layout import TokenLayout

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


LAYOUT = TokenLayout(goal_dim=0, observation_dim=2, action_dim=1, rewards=True)
# Bins of x, y, the action, reward and value, in real units; the stop token is 3.
UNITS = torch.tensor([[0.0, 10.0, 20.0], [1.0, 2.0, 3.0], [-0.5, 0.0, 0.5], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
STOP = 3
# After the state (10, 3): action 0.5; state (20, 1), action -0.5 | action 0; an end is predicted.
TWO_STEPS = replace(
    CANDIDATES,
    tokens=torch.tensor([[[2, 0, 0, 2, 0, 0, 1, 1], [1, 0, 0, STOP, STOP, STOP, 0, 0]]]),
    rewards=torch.tensor([[[1.0, 4.0], [2.0, 0.0]]]),
    prompt=torch.tensor([[0, 0, 0, 0, 0, 1, 2]]),
    bins=Bins(LAYOUT, UNITS),
)


def linear_q(states: Tensor, actions: Tensor) -> Tensor:
    return 7 + states[..., 0] + 100 * states[..., 1] + 1000 * actions[..., 0]  # 7 where all is 0, as after an end


def test_q_is_that_of_the_last_state_and_action_in_real_units_and_replaces_the_last_reward() -> None:
    # 1 + 0.9 (7 + 20 + 100 - 500); the second candidate ends after a reward of 2.
    torch.testing.assert_close(q_guided(linear_q, 0.9)(TWO_STEPS), torch.tensor([[1 - 0.9 * 373, 2.0]]))
    one = replace(TWO_STEPS, tokens=TWO_STEPS.tokens[..., :3], rewards=TWO_STEPS.rewards[..., :1])
    # The first state is that of the prompt, (10, 3): 317 + 500 and 317.
    torch.testing.assert_close(q_guided(linear_q, 0.9)(one), torch.tensor([[817.0, 317.0]]))


def test_a_reward_shift_counts_for_the_steps_that_take_place() -> None:
    found = q_guided(linear_q, 0.9, reward_shift=-1.0)(TWO_STEPS)
    torch.testing.assert_close(found, torch.tensor([[0 - 0.9 * 373, 1.0]]))
    three = replace(
        TWO_STEPS,
        tokens=torch.cat([TWO_STEPS.tokens, torch.full((1, 2, 5), STOP)], dim=2),
        rewards=torch.tensor([[[1.0, 4.0, 0.0], [2.0, 0.0, 0.0]]]),
    )
    found = q_guided(linear_q, 0.9, reward_shift=-1.0)(three)  # both end: 0 + 0.9 (4 - 1), and 1 as before
    torch.testing.assert_close(found, torch.tensor([[2.7, 1.0]]))


def test_alive_is_false_from_a_predicted_end_on() -> None:
    assert TWO_STEPS.alive.tolist() == [[[True, True], [True, False]]]
    in_the_action = TWO_STEPS.tokens.clone()
    in_the_action[0, 0, 5] = STOP
    assert replace(TWO_STEPS, tokens=in_the_action).alive.tolist() == [[[True, False], [True, False]]]


def test_a_model_without_rewards_is_guided_by_q_alone() -> None:
    bare = TokenLayout(goal_dim=0, observation_dim=2, action_dim=1, rewards=False)
    candidates = replace(
        TWO_STEPS,
        tokens=TWO_STEPS.tokens[:, :1, [0, 3, 4, 5]][..., [0, 1, 2, 3]],
        rewards=torch.zeros(1, 1, 0),
        bins=Bins(bare, UNITS[:3]),
        prompt=torch.tensor([[1, 2]]),
    )
    # Action 0.5; then state (20, 1) with action -0.5.
    torch.testing.assert_close(q_guided(linear_q, 0.9)(candidates), torch.tensor([[0.9 * -373]]))
    torch.testing.assert_close(
        q_guided(linear_q, 0.9, reward_shift=-1.0)(candidates), torch.tensor([[-1 + 0.9 * -373]])
    )


def test_a_q_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q must return one value per candidate, shape \(1, 2\), got \(1, 2, 1\)"):
        q_guided(lambda states, actions: states[..., :1], 0.9)(TWO_STEPS)
