"""Tokenized datasets and training windows: by hand, and against a plain loop over random datasets."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conventions import authors_conventions
from tests.tokens.test_tokenizer import BY_HAND, DATASET, STOP
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode, returns_to_go
from trajectory_transformer.tokens.discretizer import Discretizer, bins_of
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import Conventions, Tokenizer
from trajectory_transformer.tokens.windows import Batch, batch_indices, gather_windows, loss_weights, tokenize

AUTHORS = replace(BY_HAND, authors_conventions=True)


def windows_by_hand(config: TokenConfig, window: int = 3) -> tuple[Batch, Tokenizer]:
    """All three windows of the dataset."""
    tokenizer = Tokenizer.fit(DATASET, config)
    data = tokenize(DATASET, tokenizer)
    return gather_windows(data, torch.arange(data.num_windows), window, tokenizer), tokenizer


def test_a_tokenized_dataset_holds_the_rows_of_all_episodes() -> None:
    data = tokenize(DATASET, Tokenizer.fit(DATASET, BY_HAND))
    assert data.rows.tolist() == [
        [0, 0, 2, 3],
        [1, 3, 3, 0],
        [3, STOP, STOP, STOP],
        [2, 3, 0, 0],
        [1, STOP, STOP, STOP],
    ]
    assert data.goals.tolist() == [[3], [1]]
    assert data.first_row.tolist() == [0, 3]
    assert data.num_steps.tolist() == [2, 1]
    assert data.num_rows.tolist() == [3, 2]
    assert data.terminated.tolist() == [True, False]
    assert data.num_windows == 3
    assert data.end_window.tolist() == [2, 3]


def test_without_final_states_a_tokenized_dataset_has_one_row_per_action() -> None:
    with authors_conventions(Conventions(final_observation=False)):
        data = tokenize(DATASET, Tokenizer.fit(DATASET, replace(AUTHORS, goal_dims=())))
    assert data.rows.tolist() == [[0, 0, 2, 3], [2, 3, 3, 0], [3, 3, 0, 0]]  # the observed states are 0, 1 and 2
    assert data.goals.shape == (2, 0)
    assert data.num_rows.tolist() == [2, 1]


def test_windows_start_with_the_goal_and_are_padded_with_stop_tokens() -> None:
    batch, _ = windows_by_hand(BY_HAND)
    assert batch.tokens.tolist() == [
        [3, 0, 0, 2, 3, 1, 3, 3, 0, 3, STOP, STOP, STOP],
        [3, 1, 3, 3, 0, 3, STOP, STOP, STOP, STOP, STOP, STOP, STOP],
        [1, 2, 3, 0, 0, 1, STOP, STOP, STOP, STOP, STOP, STOP, STOP],
    ]


def test_stop_tokens_are_real_after_a_termination_only() -> None:
    batch, _ = windows_by_hand(BY_HAND)
    assert batch.real.int().tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # the state after the last action was observed, nothing after it
    ]


@pytest.mark.parametrize(
    ("limit", "first", "second"),
    [
        (4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (3, [1, 1, 1, 1], [0, 0, 0, 0]),
        (2, [1, 0, 0, 0], [0, 0, 0, 0]),  # a final state was recorded, so it is real whatever the limit is
    ],
)
def test_stop_tokens_are_real_up_to_the_last_step_of_an_episode(
    limit: int, first: list[int], second: list[int]
) -> None:
    with authors_conventions(Conventions(max_episode_steps=limit)):
        batch, _ = windows_by_hand(AUTHORS)
    assert batch.real[1].int().tolist() == [1, 1, 1, 1, 1, *first, *second]  # steps 1, 2 and 3


def test_without_final_states_stop_tokens_follow_the_last_action() -> None:
    with authors_conventions(Conventions(final_observation=False)):
        batch, _ = windows_by_hand(replace(AUTHORS, goal_dims=()), window=2)
    # Two steps, then an episode of one: no window starts at the last step.
    assert batch.tokens.tolist() == [[0, 0, 2, 3, 2, 3, 3, 0]]
    assert batch.real.int().tolist() == [[1] * 8]
    with authors_conventions(Conventions(final_observation=False)):
        batch, _ = windows_by_hand(replace(AUTHORS, goal_dims=()), window=3)
    assert batch.tokens.tolist() == [[0, 0, 2, 3, 2, 3, 3, 0, STOP, STOP, STOP, STOP]]
    assert batch.real.all(), "the task ended this episode"


def test_loss_weights_count_real_targets_and_never_the_goal() -> None:
    batch, tokenizer = windows_by_hand(BY_HAND)
    weights = loss_weights(batch, tokenizer, action_weight=5.0)
    # One column per target: s a r v, three times. The goal is the first input and never a target.
    assert weights.tolist() == [
        [1, 5, 1, 1, 1, 5, 1, 1, 1, 5, 1, 1],
        [1, 5, 1, 1, 1, 5, 1, 1, 1, 5, 1, 1],
        [1, 5, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_loss_weights_may_count_real_inputs_instead() -> None:
    with authors_conventions(Conventions(loss_mask="input")):
        batch, tokenizer = windows_by_hand(AUTHORS)
        weights = loss_weights(batch, tokenizer, action_weight=5.0)
    # The prediction after the last real token counts, although its target is unknown.
    assert weights[2].tolist() == [1, 5, 1, 1, 1, 5, 0, 0, 0, 0, 0, 0]


def tokenizer_of(layout: TokenLayout) -> Tokenizer:
    """A tokenizer for functions that read no bins."""
    return Tokenizer(layout, Discretizer((), np.zeros((0, 1))), TokenConfig())


def test_loss_weights_of_a_goal_of_several_tokens_are_zero() -> None:
    batch = Batch(tokens=torch.zeros(1, 7, dtype=torch.long), real=torch.ones(1, 7, dtype=torch.bool))
    weights = loss_weights(batch, tokenizer_of(TokenLayout(3, 1, 1, rewards=False)), action_weight=2.0)
    assert weights.tolist() == [[0, 0, 1, 2, 1, 2]]


def test_loss_weights_without_a_goal_leave_out_the_first_token() -> None:
    batch = Batch(tokens=torch.zeros(1, 8, dtype=torch.long), real=torch.ones(1, 8, dtype=torch.bool))
    weights = loss_weights(batch, tokenizer_of(TokenLayout(0, 1, 1, rewards=True)), 3.0)
    assert weights.tolist() == [[3, 1, 1, 1, 3, 1, 1]]


@pytest.mark.parametrize(("num_bins", "dtype"), [(255, torch.uint8), (256, torch.int16), (1000, torch.int16)])
def test_a_token_takes_one_byte_up_to_255_bins_and_two_beyond(num_bins: int, dtype: torch.dtype) -> None:
    config = replace(BY_HAND, num_bins=num_bins)
    tokenizer = Tokenizer.fit(DATASET, config)
    data = tokenize(DATASET, tokenizer)
    assert data.rows.dtype == data.goals.dtype == dtype
    assert data.rows.max() == num_bins  # the stop token fits
    assert data.rows[:, 0].tolist() == [0, num_bins // 3, num_bins - 1, 2 * num_bins // 3, num_bins // 3]
    batch = gather_windows(data, torch.tensor([2]), 2, tokenizer)
    assert batch.tokens.dtype == torch.long
    assert batch.tokens[0, -1] == num_bins


def brute_force_window(
    dataset: Dataset, tokenizer: Tokenizer, place: tuple[int, int], window: int
) -> tuple[list[int], list[bool]]:
    """Tokens and `real` of the window at a step of an episode, number by number."""
    episode_index, start = place
    config, conventions, edges = tokenizer.config, tokenizer.conventions, tokenizer.discretizer.edges
    episode = dataset.episodes[episode_index]
    steps = len(episode)
    tokens = [int(bins_of(episode.observations[-1, dim], edges[dim])) for dim in config.goal_dims]
    real = [True for _ in config.goal_dims]
    for step in range(start, start + window):
        numbers: list[float | None] = []
        if step < steps or (step == steps and conventions.final_observation):
            numbers += [float(number) for number in episode.observations[step]]
        else:
            numbers += [None] * dataset.observation_dim
        if step < steps:
            numbers += [float(number) for number in episode.actions[step]]
        else:
            numbers += [None] * dataset.action_dim
        if config.rewards:
            assert episode.rewards is not None
            rewards = [float(reward) for reward in episode.rewards]
            if isinstance(config.termination_penalty, float) and episode.terminated:
                rewards[-1] = config.termination_penalty
            values = returns_to_go(np.array(rewards), config.discount)
            numbers += [rewards[step], float(values[step])] if step < steps else [None, None]
        limit = conventions.max_episode_steps
        stop_is_real = episode.terminated and (limit is None or step < limit)
        for slot, number in enumerate(numbers):
            tokens.append(config.num_bins if number is None else int(bins_of(np.array(number), edges[slot])))
            real.append(number is not None or stop_is_real)
    return tokens, real


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    window=st.integers(1, 5),
    rewards=st.booleans(),
    final=st.booleans(),
    goal=st.booleans(),
    penalty=st.sampled_from([None, -100.0]),
    limit=st.sampled_from([None, 3, 6]),
    seed=st.integers(0, 1000),
)
def test_windows_equal_a_plain_loop_over_episodes(
    lengths: list[int],
    dims: tuple[int, int],
    window: int,
    rewards: bool,
    final: bool,
    goal: bool,
    penalty: float | None,
    limit: int | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        Episode(
            rng.normal(size=(steps + 1, dims[0])).astype(np.float32),
            rng.normal(size=(steps, dims[1])).astype(np.float32),
            rng.integers(0, 3, size=steps).astype(np.float32) if rewards else None,
            terminated=bool(rng.integers(2)),
        )
        for steps in lengths
    ]
    dataset = Dataset(tuple(episodes))
    config = TokenConfig(
        num_bins=5,
        rewards=rewards,
        goal_dims=(dims[0] - 1,) if goal else (),
        termination_penalty=penalty,
        truncated="stop",
        authors_conventions=True,
    )
    # Without final states, no window starts at the last step.
    places = [(index, step) for index, steps in enumerate(lengths) for step in range(steps if final else steps - 1)]
    order = rng.permutation(len(places))
    with authors_conventions(Conventions(final_observation=final, max_episode_steps=limit)):
        tokenizer = Tokenizer.fit(dataset, config)
        data = tokenize(dataset, tokenizer)
        assert data.num_windows == len(places)
        batch = gather_windows(data, torch.from_numpy(order), window, tokenizer)
        for tokens, real, number in zip(batch.tokens.tolist(), batch.real.tolist(), order, strict=True):
            assert (tokens, real) == brute_force_window(dataset, tokenizer, places[number], window)


def test_every_pass_of_batches_is_a_permutation_of_the_windows() -> None:
    batches = [batch_indices(12, 4, seed=7, step=step) for step in range(6)]
    first, second = torch.cat(batches[:3]).tolist(), torch.cat(batches[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second and first != sorted(first)


def test_batches_span_the_end_of_a_pass() -> None:
    stream = torch.cat([batch_indices(10, 4, seed=0, step=step) for step in range(5)]).tolist()
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))


def test_a_batch_may_hold_several_passes_over_few_windows() -> None:
    batch = batch_indices(3, 11, seed=0, step=0).tolist()
    assert len(batch) == 11
    assert all(sorted(batch[start : start + 3]) == [0, 1, 2] for start in (0, 3, 6))
    both = batch + batch_indices(3, 11, seed=0, step=1).tolist()
    assert all(count in (7, 8) for count in Counter(both).values())


@given(num_windows=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 5), step=st.integers(0, 30))
def test_a_batch_is_a_function_of_seed_and_step_alone(num_windows: int, batch_size: int, seed: int, step: int) -> None:
    direct = batch_indices(num_windows, batch_size, seed=seed, step=step)
    torch.manual_seed(step)
    for earlier in range(max(step - 3, 0), step):
        batch_indices(num_windows, batch_size, seed=seed, step=earlier)
    batch_indices(num_windows + 1, batch_size, seed=seed + 1, step=step)
    assert torch.equal(batch_indices(num_windows, batch_size, seed=seed, step=step), direct)
    # The stream does not depend on how it is cut.
    one_by_one = [
        batch_indices(num_windows, 1, seed=seed, step=step * batch_size + i) for i in range(min(batch_size, 5))
    ]
    assert torch.equal(torch.cat(one_by_one), direct[:5])


def test_other_seeds_give_other_batches() -> None:
    batches = [batch_indices(100, 50, seed=seed, step=0).tolist() for seed in range(5)]
    assert len({tuple(batch) for batch in batches}) == 5
