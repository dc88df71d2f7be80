"""The tokenizer: slot values, rows and prompts by hand, and decoding as the inverse of encoding."""

from dataclasses import replace

import numpy as np
import pytest

from tests.conventions import authors_conventions
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.tokens.discretizer import TokenArray
from trajectory_transformer.tokens.tokenizer import (
    CONVENTIONS,
    Conventions,
    Tokenizer,
    layout_of,
    rewards_of,
    slot_values,
    with_penalty,
)

STOP = 4
BY_HAND = TokenConfig(num_bins=4, discretizer="uniform", goal_dims=(0,), discount=0.5)


def column(*values: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One dimension over time."""
    return np.array(values, dtype=np.float32)[:, None]


# Observations 0, 1, 2, 3 are bins 0, 1, 2, 3; actions 0 and 1 are bins 0 and 3; rewards 0, 1 and 2 are bins 0, 2, 3.
# The values of the first episode are 2 and 0, bins 3 and 0; that of the second is 0, bin 0. Each bin holds one number
# only, so bins decode to the numbers themselves.
TERMINATED = Episode(column(0, 1, 3), column(0, 1), np.array([1, 2], np.float32), terminated=True)
TRUNCATED = Episode(column(2, 1), column(1), np.array([0], np.float32), terminated=False)
DATASET = Dataset((TERMINATED, TRUNCATED))
ROWS = [[0, 0, 2, 3], [1, 3, 3, 0], [3, STOP, STOP, STOP]]  # of the first episode


def test_an_episode_becomes_rows_with_stop_tokens_after_the_final_state() -> None:
    tokenizer = Tokenizer.fit(DATASET, BY_HAND)
    assert tokenizer.stop == STOP
    assert tokenizer.encode(TERMINATED).tolist() == ROWS
    assert tokenizer.encode(TERMINATED, TRUNCATED).tolist() == [*ROWS, [2, 3, 0, 0], [1, STOP, STOP, STOP]]
    assert tokenizer.goals_of(DATASET.episodes).tolist() == [[3], [1]]


def test_without_final_states_an_episode_has_one_row_per_action() -> None:
    with authors_conventions(Conventions(final_observation=False)):
        tokenizer = Tokenizer.fit(DATASET, replace(BY_HAND, goal_dims=(), authors_conventions=True))
        # The observed states are 0, 1 and 2.
        assert tokenizer.encode(TERMINATED, TRUNCATED).tolist() == [[0, 0, 2, 3], [2, 3, 3, 0], [3, 3, 0, 0]]
    assert tokenizer.goals_of(DATASET.episodes).shape == (2, 0)


def test_without_rewards_a_row_ends_with_the_action() -> None:
    tokenizer = Tokenizer.fit(DATASET, replace(BY_HAND, rewards=False))
    assert tokenizer.encode(replace(TERMINATED, rewards=None)).tolist() == [[0, 0], [1, 3], [3, STOP]]


def test_authors_conventions_decode_bins_to_midpoints_and_leave_out_final_states() -> None:
    assert CONVENTIONS[False] == Conventions("mean", final_observation=True, max_episode_steps=None, loss_mask="target")
    assert CONVENTIONS[True] == Conventions(
        "midpoint", final_observation=False, max_episode_steps=1000, loss_mask="input"
    )
    ours = Tokenizer.fit(DATASET, BY_HAND)
    theirs = Tokenizer.fit(DATASET, replace(BY_HAND, authors_conventions=True))
    assert (ours.conventions, theirs.conventions) == (CONVENTIONS[False], CONVENTIONS[True])
    np.testing.assert_array_equal(ours.discretizer.values[0], [0, 1, 2, 3])
    np.testing.assert_array_equal(theirs.discretizer.values[0], [0.25, 0.75, 1.25, 1.75])  # states up to 2 only


def test_a_termination_penalty_replaces_the_last_reward_of_a_terminated_episode_only() -> None:
    config = TokenConfig(termination_penalty=-100.0, discount=0.5)
    terminated, truncated = slot_values(TERMINATED, config), slot_values(TRUNCATED, config)
    np.testing.assert_array_equal(terminated[2][:, 0], [1.0, -100.0])
    np.testing.assert_array_equal(terminated[3][:, 0], [-100.0, 0.0])
    np.testing.assert_array_equal(truncated[2][:, 0], [0.0])
    assert TERMINATED.rewards is not None and TERMINATED.rewards.tolist() == [1.0, 2.0]  # the recording is unchanged


def test_a_value_may_include_the_reward_of_its_step() -> None:
    config = TokenConfig(value_includes_reward=True, discount=0.5)
    np.testing.assert_array_equal(slot_values(TERMINATED, config)[3][:, 0], [2.0, 2.0])


def test_a_truncated_episode_may_continue_with_its_mean_reward() -> None:
    config = TokenConfig(truncated="continue", discount=0.75)
    steady = Episode(column(0, 1, 2, 3), column(0, 0, 0), np.full(3, 2.0, np.float32), terminated=False)
    np.testing.assert_allclose(slot_values(steady, config)[3][:, 0], [8.0, 8.0, 8.0])  # 2 + 2 * 0.75 + ...
    rising = replace(steady, rewards=np.array([1, 2, 3], np.float32))  # 8 after the last, 3 + 0.75 * 8 before it
    np.testing.assert_allclose(slot_values(rising, config)[3][:, 0], [2 + 0.75 * 9, 9, 8])
    own = replace(config, value_includes_reward=True)
    np.testing.assert_allclose(slot_values(rising, own)[3][:, 0], [1 + 0.75 * 8.75, 8.75, 9])
    terminated = replace(rising, terminated=True)
    np.testing.assert_array_equal(slot_values(terminated, config)[3][:, 0], [2 + 0.75 * 3, 3, 0])


def test_goals_use_the_bins_of_their_observation_dimensions(tiny_dataset: Dataset) -> None:
    tokenizer = Tokenizer.fit(tiny_dataset, TokenConfig(num_bins=10, goal_dims=(2, 0)))
    observations = tiny_dataset.episodes[0].observations
    as_observations = tokenizer.encode_states(observations)
    np.testing.assert_array_equal(tokenizer.encode_goals(observations[:, [2, 0]]), as_observations[:, [2, 0]])


def test_layouts_that_the_data_cannot_fill_are_refused() -> None:
    with pytest.raises(ValueError, match=r"goal_dims must lie below the 1 observation dimensions, got \(1,\)"):
        layout_of(DATASET, TokenConfig(goal_dims=(1,)))
    with pytest.raises(ValueError, match="tokens.rewards needs recorded rewards, the dataset has none"):
        layout_of(Dataset((replace(TERMINATED, rewards=None),)), TokenConfig())


def test_categories_are_their_own_tokens_and_values() -> None:
    dimensions = (Dimension("s", 4),), (Dimension("a", 3),)
    tokenizer = Tokenizer.fit(Dataset((TERMINATED, TRUNCATED), {}, *dimensions), replace(BY_HAND, num_bins=6))
    np.testing.assert_array_equal(tokenizer.encode(TERMINATED)[:, 0], [0, 1, 3])
    np.testing.assert_array_equal(tokenizer.decode_action(np.array([[0], [1], [2]])), [[0], [1], [2]])


def test_a_past_transition_holds_the_reward_and_the_top_bin_as_value() -> None:
    tokenizer = Tokenizer.fit(DATASET, BY_HAND)
    state, action = np.array([1]), np.array([3])
    assert tokenizer.transition(state, action, 2.0).tolist() == [1, 3, 3, 3]
    assert tokenizer.transition(state, action, 0.9).tolist() == [1, 3, 1, 3]
    without = Tokenizer.fit(DATASET, replace(BY_HAND, rewards=False))
    assert without.transition(state, action, 2.0).tolist() == [1, 3]


def test_a_prompt_is_the_goal_then_past_transitions_then_the_state() -> None:
    tokenizer = Tokenizer.fit(DATASET, BY_HAND)
    goal, state = np.array([3]), np.array([2])
    assert tokenizer.prompt(goal, [], state).tolist() == [3, 2]
    past = [np.array([0, 0, 2, 3]), np.array([1, 3, 3, 3])]
    assert tokenizer.prompt(goal, past, state).tolist() == [3, 0, 0, 2, 3, 1, 3, 3, 3, 2]


@pytest.mark.parametrize(
    ("num_tokens", "num_states", "rewards"),
    [
        (1, 1, [np.nan]),  # ends with the first action
        (3, 1, [1.0]),  # ends with a reward and a value
        (4, 2, [1.0]),  # ends with a state
        (5, 2, [1.0, np.nan]),
        (7, 2, [1.0, 2.0]),
        (8, 3, [1.0, 2.0]),
    ],
)
def test_decoding_inverts_encoding(num_tokens: int, num_states: int, rewards: list[float]) -> None:
    tokenizer = Tokenizer.fit(DATASET, BY_HAND)
    tokens = tokenizer.encode(TERMINATED).flatten()
    found = tokenizer.decode(tokens[:1], tokens[1 : 1 + num_tokens])
    np.testing.assert_array_equal(found.states, [[0.0], [1.0], [3.0]][:num_states])
    np.testing.assert_array_equal(found.actions, [[0.0], [1.0]][: len(rewards)])
    assert found.rewards is not None
    np.testing.assert_array_equal(found.rewards, rewards)


def test_decoding_inverts_a_prompt() -> None:
    tokenizer = Tokenizer.fit(DATASET, BY_HAND)
    rows = tokenizer.encode(TERMINATED)
    prompt = tokenizer.prompt(tokenizer.goals_of([TERMINATED])[0], list(rows[:2]), rows[2, :1])
    found = tokenizer.decode(prompt[1:2], prompt[2:])
    np.testing.assert_array_equal(found.states, TERMINATED.observations)
    np.testing.assert_array_equal(found.actions, TERMINATED.actions)
    assert found.rewards is not None
    np.testing.assert_array_equal(found.rewards, TERMINATED.rewards)


def decode_by_slot(tokenizer: Tokenizer, tokens: TokenArray) -> dict[str, list[list[float]]]:
    """States, actions and rewards of one sequence that starts with a state, token by token."""
    layout, values = tokenizer.layout, tokenizer.discretizer.values
    found: dict[str, list[list[float]]] = {"s": [], "a": [], "r": [], "v": []}
    kinds = "s" * layout.observation_dim + "a" * layout.action_dim + "rv" * layout.rewards
    for position, token in enumerate(tokens.tolist()):
        slot = position % layout.size
        if slot in (0, layout.observation_dim) or kinds[slot] in "rv":
            found[kinds[slot]].append([])
        found[kinds[slot]][-1].append(values[slot, token] if token < tokenizer.stop else np.nan)
    return found


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("ends_with", ["action", "state"])
def test_decoding_equals_decoding_slot_by_slot(
    tiny_dataset: Dataset, rng: np.random.Generator, rewards: bool, ends_with: str
) -> None:
    tokenizer = Tokenizer.fit(tiny_dataset, TokenConfig(num_bins=6, rewards=rewards, goal_dims=(1,)))
    layout = tokenizer.layout
    for transitions in range(3):
        length = transitions * layout.size + layout.observation_dim
        length += layout.action_dim if ends_with == "action" else 0
        tokens = rng.integers(7, size=(4, 5, length))  # stop tokens among them
        found = tokenizer.decode(tokens[..., : layout.observation_dim], tokens[..., layout.observation_dim :])
        num_actions = transitions + (ends_with == "action")
        assert found.states.shape == (4, 5, transitions + 1, 3)
        assert found.actions.shape == (4, 5, num_actions, 2)
        assert (found.rewards is None) == (not rewards)
        for env, candidate in np.ndindex(4, 5):
            expected = decode_by_slot(tokenizer, tokens[env, candidate])
            np.testing.assert_array_equal(found.states[env, candidate], expected["s"])
            np.testing.assert_array_equal(found.actions[env, candidate], np.reshape(expected["a"], (num_actions, 2)))
            if found.rewards is not None:
                known = np.reshape(expected["r"], -1)
                padded = np.concatenate([known, [np.nan] * (num_actions - len(known))])
                np.testing.assert_array_equal(found.rewards[env, candidate], padded)


def test_a_state_is_far_outside_beyond_one_width_of_the_observed_range() -> None:
    states = np.array([[2.0, 5.0], [4.0, 5.0], [3.0, 5.0]], np.float32)  # the second dimension is constant
    episode = Episode(states, np.zeros((2, 1), np.float32), np.zeros(2, np.float32), terminated=False)
    tokenizer = Tokenizer.fit(Dataset((episode,)), TokenConfig(num_bins=4, discretizer="uniform"))
    inside, outside = [[0.01, 5.0], [5.99, 5.0]], [[-0.01, 5.0], [6.01, 5.0]]
    assert not tokenizer.far_outside(np.array(inside)).any()
    assert tokenizer.far_outside(np.array(outside)).tolist() == [[True, False], [True, False]]
    assert tokenizer.far_outside(np.array([[3.0, 50.0], [3.0, -50.0]])).tolist() == [[False, True], [False, True]]


def ended(length: int, reward: float, *, terminated: bool = True, last: float | None = None) -> Episode:
    rewards = np.full(length, reward, dtype=np.float32)
    rewards[-1] = reward if last is None else last
    return Episode(np.zeros((length + 1, 1), np.float32), np.zeros((length, 1), np.float32), rewards, terminated)


AUTO = TokenConfig(termination_penalty="auto")


@pytest.mark.parametrize(
    ("episodes", "penalty"),
    [
        # Falling ends a stream of rewards: 30 times the mean reward, 25 / 12.
        ([ended(2, 2.0), ended(10, 2.1, terminated=False)], -30 * 25 / 12),
        ([ended(2, 2.0), ended(10, 2.1)], -30 * 25 / 12),
        # A goal with a reward ends the episode, or time costs: the sooner the better.
        ([ended(3, 0.0, last=1.0), ended(10, 0.0, terminated=False)], None),
        ([ended(3, -1.0), ended(10, -1.0)], None),
        # All the same, no episode that ended the task, no rewards to look at.
        ([ended(5, 1.0), ended(5, 2.0)], None),
        ([ended(2, 1.0, terminated=False), ended(10, 1.0, terminated=False)], None),
        ([], None),
    ],
)
def test_an_automatic_penalty_asks_whether_longer_episodes_are_better(
    episodes: list[Episode], penalty: float | None
) -> None:
    found = with_penalty(AUTO, episodes).termination_penalty
    assert found == (None if penalty is None else pytest.approx(penalty))
    assert with_penalty(replace(AUTO, rewards=False), episodes).termination_penalty is None
    kept = TokenConfig(termination_penalty=-7.0)
    assert with_penalty(kept, episodes) is kept


def test_an_automatic_penalty_is_fitted_stored_and_learned() -> None:
    dataset = Dataset((ended(2, 1.0), ended(10, 1.0, terminated=False)))
    tokenizer = Tokenizer.fit(dataset, AUTO)
    assert tokenizer.config == replace(AUTO, termination_penalty=-30.0)
    expected = Tokenizer.fit(dataset, replace(AUTO, termination_penalty=-30.0))
    assert (tokenizer.encode(*dataset) == expected.encode(*dataset)).all()
    rewards, _ = rewards_of(dataset.episodes[0], tokenizer.config)
    assert rewards.tolist() == [1.0, -30.0]
