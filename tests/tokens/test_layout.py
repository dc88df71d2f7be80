"""Slots and positions by hand."""

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
    assert not any(layout.is_value(position) for position in range(20))
    with pytest.raises(AssertionError, match="no reward slot"):
        _ = layout.reward
    with pytest.raises(AssertionError, match="no value slot"):
        _ = layout.value


def test_positions_after_a_goal_repeat_the_slots() -> None:
    layout = TokenLayout(goal_dim=2, observation_dim=1, action_dim=1, rewards=True)
    assert [layout.slot(position) for position in range(2, 12)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [position for position in range(12) if layout.is_value(position)] == [5, 9]
    assert [layout.length(transitions) for transitions in range(3)] == [2, 6, 10]
    with pytest.raises(AssertionError, match="position 1 belongs to the goal"):
        layout.slot(1)


@pytest.mark.parametrize(("goal", "observation", "action"), [(0, 0, 1), (0, 1, 0), (-1, 1, 1)])
def test_a_transition_without_state_or_action_is_refused(goal: int, observation: int, action: int) -> None:
    rule = "needs at least 1 observation and 1 action dimension and no negative goal"
    with pytest.raises(ValueError, match=f"{rule}, got {observation}, {action} and {goal}"):
        TokenLayout(goal, observation, action, rewards=True)
