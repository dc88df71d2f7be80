"""Slots and positions of token sequences."""

import pytest

from trajectory_transformer.tokens.layout import TokenLayout


def test_slots_of_a_transition_with_rewards() -> None:
    layout = TokenLayout(goal_dim=0, observation_dim=3, action_dim=2, rewards=True)
    assert layout.size == 7
    assert layout.observation == slice(0, 3)
    assert layout.action == slice(3, 5)
    assert (layout.reward, layout.value) == (5, 6)


def test_slots_of_a_transition_without_rewards() -> None:
    layout = TokenLayout(goal_dim=0, observation_dim=3, action_dim=2, rewards=False)
    assert layout.size == 5
    assert layout.readable(0, 20) == [True] * 20
    with pytest.raises(AssertionError, match="no reward slot"):
        _ = layout.reward
    with pytest.raises(AssertionError, match="no value slot"):
        _ = layout.value


def test_positions_after_a_goal_repeat_the_slots() -> None:
    layout = TokenLayout(goal_dim=2, observation_dim=1, action_dim=1, rewards=True)
    assert [layout.slot(position) for position in range(2, 12)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [layout.length(transitions) for transitions in range(3)] == [2, 6, 10]
    with pytest.raises(AssertionError, match="position 1 belongs to the goal"):
        layout.slot(1)


@pytest.mark.parametrize("goal_dim", [0, 1, 3])
@pytest.mark.parametrize(("observation_dim", "action_dim"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("rewards", [True, False])
def test_all_positions_but_values_are_readable(
    goal_dim: int, observation_dim: int, action_dim: int, rewards: bool
) -> None:
    layout = TokenLayout(goal_dim, observation_dim, action_dim, rewards)
    transition = "s" * observation_dim + "a" * action_dim + "rv" * rewards
    sequence = "g" * goal_dim + transition * 4
    for start in range(len(sequence)):
        for end in range(start, len(sequence) + 1):
            assert layout.readable(start, end) == [kind != "v" for kind in sequence[start:end]]


@pytest.mark.parametrize(("goal", "observation", "action"), [(0, 0, 1), (0, 1, 0), (-1, 1, 1)])
def test_a_transition_without_state_or_action_is_refused(goal: int, observation: int, action: int) -> None:
    rule = "needs at least 1 observation and 1 action dimension and no negative goal"
    with pytest.raises(ValueError, match=f"{rule}, got {observation}, {action} and {goal}"):
        TokenLayout(goal, observation, action, rewards=True)
