"""The naive and the cached decoder in random searches, against full forward passes over the visible tokens."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from trajectory_transformer.config import ModelConfig, Sampler
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import likelihood_search
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Decoder, NaiveDecoder, Run, StepwiseDecoder
from trajectory_transformer.search.sampling import Noise, predicted_value
from trajectory_transformer.tokens.layout import TokenLayout

NUM_BINS = 5
MODEL_WINDOW = 3
ENVS = 2
MAX_CANDIDATES = 4
LAYOUTS = {
    "plain": TokenLayout(0, 2, 1, rewards=False),
    "rewards": TokenLayout(0, 2, 1, rewards=True),
    "goal": TokenLayout(2, 1, 2, rewards=False),
    "goal-rewards": TokenLayout(2, 1, 1, rewards=True),
    "goal-1-rewards": TokenLayout(1, 2, 1, rewards=True),
    "goal-map": TokenLayout(2, 1, 2, rewards=False, map_shape=(2, 5, 4)),
    "rewards-map": TokenLayout(0, 2, 1, rewards=True, map_shape=(1, 3, 3)),
}
DECODERS: dict[str, Callable[[GPT, int | None], StepwiseDecoder]] = {"naive": NaiveDecoder, "cached": CachedDecoder}
Sequence = list[int]


def random_gpt(layout: TokenLayout, *, seed: int = 0) -> GPT:
    """A model in evaluation mode with large random weights."""
    generator = torch.Generator().manual_seed(seed)
    gpt = GPT(layout, NUM_BINS, ModelConfig(window=MODEL_WINDOW, num_layers=2, num_heads=2, width=16))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return gpt.eval().requires_grad_(False)


def visible(sequence: Sequence, layout: TokenLayout, window: int) -> Sequence:
    """What a pass reads: the goal, and fewer tokens than `window` transitions, cropped by whole transitions."""
    goal, rest = sequence[: layout.goal_dim], sequence[layout.goal_dim :]
    while len(rest) > window * layout.size - 1:
        rest = rest[layout.size :]
    return goal + rest


def full_pass(gpt: GPT, sequences: list[list[Sequence]], window: int, maps: Tensor | None) -> Tensor:
    """Logits of the next token of every candidate without a cache: E x K sequences -> [E, K, V + 1]."""
    rows = [visible(each, gpt.layout, window) for row in sequences for each in row]
    map_embedding = None
    if maps is not None:
        map_embedding = gpt.encode_map(torch.stack([maps[env] for env, row in enumerate(sequences) for _ in row]))
    logits: Tensor = gpt(torch.tensor(rows), map_embedding)[:, -1]
    return logits.reshape(len(sequences), len(sequences[0]), -1)


def random_maps(gpt: GPT, envs: int, rng: np.random.Generator) -> Tensor | None:
    """A map for each environment if the model reads maps."""
    shape = gpt.layout.map_shape
    return torch.from_numpy(rng.integers(2, size=(envs, *shape)).astype(np.uint8)) if shape else None


def random_search(
    make: Callable[[GPT, int | None], Decoder],
    gpt: GPT,
    *,
    window: int | None,
    prompt_length: int,
    num_tokens: int,
    rng: np.random.Generator,
) -> float:
    """Use a decoder at random, like a search; returns the largest difference from full passes."""
    decoder = make(gpt, window)
    seen = MODEL_WINDOW if window is None else window
    # A decoder is used for many searches. The state of the first one must not affect the second.
    before = gpt.encode_map(random_maps(gpt, 1, rng))
    decoder.begin(
        torch.ones(1, gpt.layout.goal_dim + 1, dtype=torch.long), max_candidates=1, max_new=1, map_embedding=before
    )
    decoder.logits()
    maps = random_maps(gpt, ENVS, rng)
    prompt = rng.integers(NUM_BINS + 1, size=(ENVS, prompt_length))
    sequences: list[list[Sequence]] = [[row.tolist()] for row in prompt]
    decoder.begin(
        torch.from_numpy(prompt),
        max_candidates=MAX_CANDIDATES,
        max_new=num_tokens,
        map_embedding=gpt.encode_map(maps),
    )
    worst = 0.0
    added = 0
    while True:
        if rng.random() < 0.2:  # before the logits are computed
            sequences = select_at_random(decoder, sequences, rng)
        logits = decoder.logits()
        expected = full_pass(gpt, sequences, seen, maps)
        assert logits.shape == expected.shape
        worst = max(worst, float((logits - expected).abs().max()))
        assert decoder.candidates.tokens.tolist() == [[each[prompt_length:] for each in row] for row in sequences]
        if added == num_tokens:
            return worst
        # Mostly one token at a time, sometimes a few.
        for _ in range(min(int(rng.choice([1, 1, 1, 2, 3])), num_tokens - added)):
            if rng.random() < 0.7:
                sequences = select_at_random(decoder, sequences, rng)
            tokens = rng.integers(NUM_BINS + 1, size=(ENVS, len(sequences[0])))
            decoder.append(torch.from_numpy(tokens))
            sequences = [
                [[*each, int(token)] for each, token in zip(row, new, strict=True)]
                for row, new in zip(sequences, tokens, strict=True)
            ]
            added += 1


def select_at_random(
    decoder: Decoder, sequences: list[list[Sequence]], rng: np.random.Generator
) -> list[list[Sequence]]:
    """Select a random number of candidates, some twice and some not at all."""
    parents = rng.integers(len(sequences[0]), size=(ENVS, int(rng.integers(1, MAX_CANDIDATES + 1))))
    decoder.select(torch.from_numpy(parents))
    return [[row[parent] for parent in chosen] for row, chosen in zip(sequences, parents, strict=True)]


def search_lengths(layout: TokenLayout, window: int | None) -> tuple[int, int, int]:
    """Shortest prompt, longest prompt plus one, and tokens to add.

    From a single token to a prompt longer than the window; searches add twice the window of the model.
    """
    if window == 1 and not layout.goal_dim:
        return 1, 2, layout.size - 2  # nothing is visible at the start of the second transition: stay inside one
    return max(layout.goal_dim, 1), layout.length(MODEL_WINDOW + 2), layout.size * 2 * MODEL_WINDOW + 1


@pytest.mark.parametrize("window", [1, 2, 3, None])
@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_logits_equal_a_full_forward_pass(name: str, kind: str, window: int | None) -> None:
    layout = LAYOUTS[kind]
    shortest, longest, num_tokens = search_lengths(layout, window)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        prompt_length = (
            shortest,
            longest - 1,
            min(layout.length(1), longest - 1),
            int(rng.integers(shortest, longest)),
        )
        worst = random_search(
            DECODERS[name],
            random_gpt(layout, seed=seed).double(),
            window=window,
            prompt_length=prompt_length[seed],
            num_tokens=num_tokens,
            rng=rng,
        )
        assert worst < 1e-10, f"prompt of {prompt_length[seed]}"


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_a_search_without_visible_tokens_is_refused(name: str) -> None:
    # A window of one transition and no goal: when the second transition begins, the first has slid out.
    decoder = DECODERS[name](random_gpt(LAYOUTS["rewards"]), 1)
    with pytest.raises(ValueError, match="window must be at least 2"):
        likelihood_search(decoder, torch.zeros(1, 2, dtype=torch.long), num_tokens=6, beam_width=2)


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_logits_equal_a_full_forward_pass_in_float32(name: str) -> None:
    layout = LAYOUTS["goal-rewards"]
    worst = random_search(
        DECODERS[name], random_gpt(layout), window=None, prompt_length=7, num_tokens=20, rng=np.random.default_rng(0)
    )
    assert worst < 1e-5


def test_logits_change_if_value_tokens_are_readable() -> None:
    # Otherwise the comparisons above would not notice a decoder that attends to values.
    layout = LAYOUTS["rewards"]
    gpt = random_gpt(layout).double()
    tokens = torch.zeros(1, gpt.max_tokens, dtype=torch.long)
    masked = gpt(tokens)
    gpt.mask = torch.ones_like(gpt.mask).tril()
    assert float((gpt(tokens) - masked).abs().max()) > 1e-2


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_environments_are_independent(name: str) -> None:
    gpt = random_gpt(LAYOUTS["rewards"]).double()
    prompts = torch.tensor([[0, 1, 2, 3, 4, 0, 1], [4, 3, 2, 1, 0, 4, 3]])
    tokens = torch.tensor([[1, 2], [3, 0]])
    together = DECODERS[name](gpt, None)
    together.begin(prompts, max_candidates=2, max_new=2)
    together.select(torch.zeros(2, 2, dtype=torch.long))
    together.append(tokens)
    both = together.logits()
    for env in range(2):
        alone = DECODERS[name](gpt, None)
        alone.begin(prompts[env : env + 1], max_candidates=2, max_new=2)
        alone.select(torch.zeros(1, 2, dtype=torch.long))
        alone.append(tokens[env : env + 1])
        torch.testing.assert_close(alone.logits()[0], both[env], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_candidates_hold_likelihood_rewards_value_and_identity_of_their_tokens(name: str) -> None:
    layout = LAYOUTS["rewards"]
    gpt = random_gpt(layout)
    with torch.no_grad():
        gpt.heads[:, -1] *= 3.0  # so that some candidates sample stop tokens
    prompt = torch.tensor([[0, 1], [3, 4]])
    values = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    noise = Noise(torch.tensor([1, 2]))

    def run(num_slots: int, *, rewards: bool = False) -> Run:
        gumbel = noise.gumbel(40, num_slots, 6)
        return Run(num_slots, Sampler(), gumbel, values=values if rewards else None)

    decoder = DECODERS[name](gpt, None)
    decoder.begin(prompt, max_candidates=40, max_new=8)
    decoder.select(torch.zeros(2, 40, dtype=torch.long))
    decoder.extend(run(1), run(2, rewards=True))
    decoder.select(torch.arange(40).flip(0).expand(2, -1))
    decoder.extend(run(2))
    decoder.extend(run(1), run(2, rewards=True))
    found = decoder.candidates

    # The same from the tokens alone: a r v s s a r v.
    rows = torch.cat([prompt[:, None].expand(-1, 40, -1), found.tokens], dim=2).flatten(0, 1)
    logits = gpt(rows[:, :-1])[:, 1:].view(2, 40, 8, 6)  # [2, 40, 8, 6]
    log_prob = logits.log_softmax(dim=-1).gather(-1, found.tokens[..., None])[..., 0]
    torch.testing.assert_close(found.log_prob, log_prob.sum(dim=-1))
    over = (found.tokens == 5)[..., [0, 3, 4, 5]].cumsum(dim=-1) > 0  # stop tokens of rewards and values do not count
    assert torch.equal(found.ended, over[..., -1])
    assert found.ended.any() and not found.ended.all()
    first, second = (predicted_value(logits[..., slot, :], values[0]) for slot in (1, 6))
    rewards = torch.stack([first.masked_fill(over[..., 0], 0.0), second.masked_fill(over[..., -1], 0.0)], dim=-1)
    torch.testing.assert_close(found.rewards, rewards)
    value = predicted_value(logits[..., 7, :], values[1]).masked_fill(over[..., -1], 0.0)
    torch.testing.assert_close(found.value, value)
    states_and_actions = found.tokens[..., [0, 3, 4, 5]].flatten(0, 1).tolist()
    equal = [[one == other for other in states_and_actions] for one in states_and_actions]
    identity = found.identity.flatten()
    assert torch.equal(identity[:, None] == identity, torch.tensor(equal))
    assert sum(map(sum, equal)) > 80, "some are copies"


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_a_window_larger_than_that_of_the_model_is_refused(name: str) -> None:
    gpt = random_gpt(LAYOUTS["plain"])
    with pytest.raises(ValueError, match="search.window must not exceed the 3 transitions the model .*, got 4"):
        DECODERS[name](gpt, 4)


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_logits_need_no_gradients(name: str) -> None:
    gpt = random_gpt(LAYOUTS["plain"]).requires_grad_(True)
    decoder = DECODERS[name](gpt, None)
    decoder.begin(torch.zeros(1, 2, dtype=torch.long), max_candidates=1, max_new=1)
    assert not decoder.logits().requires_grad


def keep_by_sorting(scores: list[float], identity: list[int], width: int, *, distinct: bool) -> list[int]:
    """Indices of the best candidates; with `distinct`, copies of a better one rank last."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    if distinct:
        copies = [index for place, index in enumerate(order) if identity[index] in [identity[i] for i in order[:place]]]
        order = [index for index in order if index not in copies] + copies
    return order[:width]


@pytest.mark.parametrize("distinct", [True, False])
def test_the_best_candidates_are_kept_and_copies_rank_last(distinct: bool) -> None:
    decoder = NaiveDecoder(random_gpt(LAYOUTS["plain"]))
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 40))
        # Few values, so that ties and copies are common; copies may have different scores.
        scores = torch.from_numpy(rng.integers(6, size=(3, count)).astype(np.float32))
        identity = torch.from_numpy(rng.integers(12, size=(3, count)))
        decoder.candidates = replace(decoder.candidates, identity=identity)
        width = int(rng.integers(1, count + 1))
        expected = [
            keep_by_sorting(row, ids, width, distinct=distinct)
            for row, ids in zip(scores.tolist(), identity.tolist(), strict=True)
        ]
        assert decoder.keep(scores, width, distinct=distinct).tolist() == expected
