"""Likelihood search and medians: exhaustively on small Markov chains, then with both decoders of a tiny GPT."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from trajectory_transformer.config import ModelConfig
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.beam import Plan, likelihood_search, median_continuation
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Candidates, NaiveDecoder, Run
from trajectory_transformer.tokens.layout import TokenLayout


class TableDecoder:
    """A Markov chain: the logits of the next token are a row of a table, chosen by the step and the last token."""

    def __init__(self, table: Tensor) -> None:
        """Decode with a table [steps, V + 1, V + 1]."""
        self.table = table
        self.candidates = Candidates.start(torch.empty(0, 0, dtype=torch.long))
        self.last = torch.empty(0, 0, dtype=torch.long)
        self.max_candidates = 0

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start after a prompt [E, L]."""
        del max_new
        self.candidates = Candidates.start(prompt)
        self.last = prompt[:, -1:]
        self.max_candidates = max_candidates

    def logits(self) -> Tensor:
        """Rows of the table [E, K, V + 1]."""
        return self.table[self.candidates.tokens.shape[2], self.last]

    def append(self, tokens: Tensor) -> None:
        """Add one token [E, K]."""
        longer = torch.cat([self.candidates.tokens, tokens[:, :, None]], dim=2)
        self.candidates = replace(self.candidates, tokens=longer)
        self.last = tokens

    def select(self, parents: Tensor) -> None:
        """Keep copies of candidates [E, K']."""
        assert parents.shape[1] <= self.max_candidates
        self.candidates = self.candidates.select(parents)
        self.last = self.last.gather(1, parents)

    def extend(self, *runs: Run) -> None:
        """Not needed: these searches add one token at a time."""
        raise NotImplementedError

    def keep(self, scores: Tensor, width: int, *, distinct: bool) -> Tensor:
        """Not needed: these searches rank sequences themselves."""
        raise NotImplementedError


def random_table(steps: int, vocabulary: int, seed: int) -> Tensor:
    """Logits of a random chain that changes at every step, so that no two sequences are equally likely."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(steps, vocabulary, vocabulary, generator=generator, dtype=torch.float64)


def log_prob(table: Tensor, start: int, sequence: tuple[int, ...]) -> float:
    """Log-probability of a sequence after a token."""
    before = (start, *sequence[:-1])
    return sum(float(table[i, before[i]].log_softmax(0)[token]) for i, token in enumerate(sequence))


def search(table: Tensor, starts: list[int], num_tokens: int, beam_width: int, min_tokens: int = 0) -> Plan:
    """Search the table from prompts of one token each."""
    prompt = torch.tensor(starts)[:, None]
    return likelihood_search(
        TableDecoder(table), prompt, num_tokens=num_tokens, beam_width=beam_width, min_tokens=min_tokens
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("vocabulary", "num_tokens"), [(2, 5), (3, 4), (5, 3), (4, 1)])
def test_full_width_beam_finds_the_exhaustive_optimum(vocabulary: int, num_tokens: int, seed: int) -> None:
    table = random_table(num_tokens, vocabulary, seed)
    plan = search(table, [0], num_tokens, beam_width=vocabulary**num_tokens)
    every = list(itertools.product(range(vocabulary), repeat=num_tokens))
    ranked = sorted(every, key=lambda sequence: -log_prob(table, 0, sequence))
    assert [tuple(row) for row in plan.tokens[0].tolist()] == ranked
    expected = torch.tensor([[log_prob(table, 0, sequence) for sequence in ranked]])
    torch.testing.assert_close(plan.scores, expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_width_one_is_greedy(seed: int) -> None:
    table = random_table(8, 6, seed)
    greedy, last = [], 3
    for step in range(8):
        last = int(table[step, last].argmax())
        greedy.append(last)
    plan = search(table, [3], 8, beam_width=1)
    assert plan.tokens.tolist() == [[greedy]]
    assert plan.best.tolist() == [greedy]


def test_a_wider_beam_finds_what_a_greedy_search_misses() -> None:
    # From 0, the more likely step to 1 is followed by a uniform one; the other, to 2, by a certain one.
    table = torch.tensor([[0.0, 0.6, 0.4], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]]).log().expand(2, 3, 3)
    assert search(table, [0], 2, beam_width=1).best[0, 0] == 1
    plan = search(table, [0], 2, beam_width=2)
    assert plan.best.tolist() == [[2, 2]]
    torch.testing.assert_close(plan.scores[0].exp(), torch.tensor([0.4, 0.2]))


@pytest.mark.parametrize("beam_width", [1, 2, 7, 30])
@pytest.mark.parametrize("seed", range(3))
def test_scores_decrease_and_are_the_log_probabilities_of_the_tokens(beam_width: int, seed: int) -> None:
    table = random_table(4, 5, seed)
    plan = search(table, [2, 4], 4, beam_width)
    assert plan.tokens.shape == (2, beam_width, 4) and plan.scores.shape == (2, beam_width)
    assert (plan.scores.diff(dim=1) <= 0).all()
    for env, start in enumerate([2, 4]):
        sequences = [tuple(row) for row in plan.tokens[env].tolist()]
        assert len(set(sequences)) == beam_width
        expected = torch.tensor([log_prob(table, start, sequence) for sequence in sequences])
        torch.testing.assert_close(plan.scores[env], expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beam_width", [1, 3, 200])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_the_first_tokens_are_never_stop_tokens(min_tokens: int, beam_width: int) -> None:
    table = random_table(3, 5, seed=0)
    table[:, :, -1] += 10.0  # stop tokens are far more likely than all others
    plan = search(table, [0], 3, beam_width, min_tokens)
    assert (plan.tokens[..., :min_tokens] != 4).all()
    assert plan.best[0, min_tokens:].tolist() == [4] * (3 - min_tokens)
    assert plan.scores.isfinite().all()
    allowed = [range(4)] * min_tokens + [range(5)] * (3 - min_tokens)
    every = sorted(itertools.product(*allowed), key=lambda sequence: -log_prob(table, 0, sequence))
    assert plan.tokens.shape[1] == min(beam_width, len(every))
    if beam_width == 200:
        assert [tuple(row) for row in plan.tokens[0].tolist()] == every


def test_forbidding_stop_tokens_does_not_change_the_scores_of_others() -> None:
    table = random_table(2, 4, seed=1)
    plan = search(table, [0], 2, beam_width=3, min_tokens=2)
    sequences = [tuple(row) for row in plan.tokens[0].tolist()]
    expected = torch.tensor([log_prob(table, 0, sequence) for sequence in sequences])
    torch.testing.assert_close(plan.scores[0], expected.double(), rtol=0, atol=1e-6)


def test_environments_are_searched_independently() -> None:
    table = random_table(5, 6, seed=2)
    together = search(table, [0, 3, 5], 5, beam_width=4)
    for env, start in enumerate([0, 3, 5]):
        alone = search(table, [start], 5, beam_width=4)
        assert torch.equal(alone.tokens[0], together.tokens[env])
        assert torch.equal(alone.scores[0], together.scores[env])


def random_gpt(layout: TokenLayout, seed: int) -> GPT:
    """A tiny model with large random weights, so that rounding does not decide between candidates."""
    generator = torch.Generator().manual_seed(seed)
    gpt = GPT(layout, 4, ModelConfig(window=3, num_layers=2, num_heads=2, width=16))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return gpt.double().eval().requires_grad_(False)


@pytest.mark.parametrize("layout", [TokenLayout(0, 2, 1, rewards=True), TokenLayout(2, 1, 1, rewards=False)])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("seed", range(3))
def test_both_decoders_give_the_same_plan_batched_or_one_by_one(
    layout: TokenLayout, window: int | None, seed: int
) -> None:
    gpt = random_gpt(layout, seed)
    prompts = torch.randint(5, (3, layout.length(2) + 1), generator=torch.Generator().manual_seed(seed))

    def plan(kind: type[NaiveDecoder | CachedDecoder], prompt: Tensor) -> Plan:
        decoder = kind(gpt, window)
        return likelihood_search(decoder, prompt, num_tokens=2 * layout.size + 1, beam_width=6, min_tokens=1)

    expected = plan(NaiveDecoder, prompts)
    for kind in (NaiveDecoder, CachedDecoder):
        together = plan(kind, prompts)
        assert torch.equal(together.tokens, expected.tokens)
        torch.testing.assert_close(together.scores, expected.scores, rtol=0, atol=1e-10)
        for env in range(3):
            alone = plan(kind, prompts[env : env + 1])
            assert torch.equal(alone.tokens[0], expected.tokens[env])
            torch.testing.assert_close(alone.scores[0], expected.scores[env], rtol=0, atol=1e-10)


def median(table: Tensor, start: int) -> int:
    """The median token after another, from cumulative probabilities."""
    mass = 0.0
    for token, probability in enumerate(table[0, start].softmax(0).tolist()):
        mass += probability
        if mass >= 0.5:
            return token
    raise AssertionError("probabilities sum to one")


@pytest.mark.parametrize("seed", range(5))
def test_a_median_has_half_of_the_mass_on_each_side(seed: int) -> None:
    table = random_table(4, 6, seed)
    plan = median_continuation(TableDecoder(table), torch.tensor([[3], [1]]), num_tokens=4)
    for env, start in enumerate((3, 1)):
        expected, last = [], start
        for step in range(4):
            last = median(table[step:], last)
            expected.append(last)
        assert plan.tokens[env].tolist() == [expected]
        assert plan.scores[env].item() == pytest.approx(log_prob(table, start, tuple(expected)), abs=1e-6)


def test_a_median_is_the_stop_token_only_where_that_is_allowed() -> None:
    table = torch.tensor([0.1, 0.2, 0.1, 0.6]).log().expand(2, 4, 4)
    decoder, prompt = TableDecoder(table), torch.tensor([[0]])
    assert median_continuation(decoder, prompt, num_tokens=2).tokens.tolist() == [[[3, 3]]]
    assert median_continuation(decoder, prompt, num_tokens=2, min_tokens=1).tokens.tolist() == [[[1, 3]]]


@given(
    masses=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_a_median_does_not_depend_on_the_size_of_bins(masses: list[int], cuts: list[bool]) -> None:
    # The same distribution in fine bins, and in bins that join one or several of them.
    coarse_of = [sum(cuts[: index + 1]) - cuts[0] for index in range(len(masses))]
    coarse = [sum(m for m, bin_ in zip(masses, coarse_of, strict=True) if bin_ == b) for b in range(coarse_of[-1] + 1)]
    assume(sum(masses) not in [2 * part for part in itertools.accumulate(masses)])  # otherwise rounding decides

    def found(parts: list[int]) -> int:
        logits = torch.tensor([*parts, 0.0], dtype=torch.float64).log()  # no mass on the stop token
        table = logits.expand(1, len(logits), len(logits))
        plan = median_continuation(TableDecoder(table), torch.zeros(1, 1, dtype=torch.long), num_tokens=1)
        return int(plan.best[0, 0])

    assert found(coarse) == coarse_of[found(masses)]


@pytest.mark.parametrize("window", [None, 2])
def test_both_decoders_find_the_same_medians(window: int | None) -> None:
    layout = TokenLayout(0, 2, 1, rewards=True)
    gpt = random_gpt(layout, 0)
    prompts = torch.randint(5, (3, layout.length(2) + 1), generator=torch.Generator().manual_seed(0))
    naive, cached = (
        median_continuation(kind(gpt, window), prompts, num_tokens=2 * layout.size, min_tokens=1)
        for kind in (NaiveDecoder, CachedDecoder)
    )
    assert torch.equal(naive.tokens, cached.tokens)
    torch.testing.assert_close(naive.scores, cached.scores, rtol=0, atol=1e-10)


def test_scores_of_a_plan_are_the_log_probabilities_of_the_model(tiny_model: TrajectoryModel) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    plan = likelihood_search(CachedDecoder(tiny_model.gpt), prompt, num_tokens=5, beam_width=4)
    sequences = torch.cat([prompt.expand(4, -1), plan.tokens[0]], dim=1)
    with torch.no_grad():
        log_probs = tiny_model.gpt(sequences[:, :-1]).log_softmax(dim=-1)[:, 2:]  # of the five planned tokens
    expected = log_probs.gather(2, plan.tokens[0][..., None]).sum(dim=(1, 2))
    torch.testing.assert_close(plan.scores[0], expected, rtol=0, atol=1e-5)
