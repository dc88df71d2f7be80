"""Filters and expectations by hand, and properties of the middle for any distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajectory_transformer.config import Sampler
from trajectory_transformer.search.sampling import Noise, draw, keep_middle, keep_nucleus, keep_top, predicted_value


def logits_of(*probabilities: float) -> torch.Tensor:
    """Logits of a distribution, with an arbitrary constant added."""
    return torch.tensor(probabilities, dtype=torch.float64).log() + 3.0


@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (1.0, [True, True, True, True]),
        (0.96, [True, True, True, True]),  # the least likely has 0.05, more than the 0.04 that may be dropped
        (0.9, [False, True, True, True]),  # 0.05 may be dropped, 0.05 + 0.15 may not
        (0.6, [False, True, False, True]),  # 0.05 + 0.15 may be dropped, 0.05 + 0.15 + 0.3 may not
        (0.4, [False, True, False, False]),  # 0.05 + 0.15 + 0.3 may be dropped
        (0.0, [False, True, False, False]),  # the most likely always stays
    ],
)
def test_the_nucleus_drops_the_least_likely_tokens_up_to_the_remaining_mass(mass: float, kept: list[bool]) -> None:
    logits = logits_of(0.05, 0.5, 0.15, 0.3)
    filtered = keep_nucleus(logits, mass)
    assert filtered.isfinite().tolist() == kept
    assert torch.equal(filtered[filtered.isfinite()], logits[torch.tensor(kept)])  # what is kept is unchanged
    assert (filtered[~filtered.isfinite()] == -torch.inf).all()


@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (1.0, [True, True, True, True, True]),
        (0.85, [True, True, True, True, True]),  # 0.075 may be dropped on each side; the ends have 0.1
        (0.75, [False, True, True, True, True]),  # 0.125 may be dropped, and the last has 0.4
        (0.5, [False, True, True, True, True]),  # 0.25 may be dropped, the first two have 0.3
        (0.3, [False, False, True, True, True]),  # 0.35 may be dropped, the first two have 0.3, the last 0.4
        (0.1, [False, False, False, True, False]),  # the median alone
    ],
)
def test_the_middle_drops_bins_far_from_the_median_on_either_side(mass: float, kept: list[bool]) -> None:
    logits = logits_of(0.1, 0.2, 0.1, 0.2, 0.4)
    filtered = keep_middle(logits, mass)
    assert filtered.isfinite().tolist() == kept
    assert torch.equal(filtered[filtered.isfinite()], logits[torch.tensor(kept)])


@given(st.integers(2, 60), st.floats(0.001, 1.0), st.integers(0, 2**32 - 1))
def test_the_middle_is_the_smallest_interval_with_its_share_on_both_sides(count: int, mass: float, seed: int) -> None:
    sharpness = np.random.default_rng(seed).choice([0.0, 1.0, 30.0])  # uniform, ordinary, nearly one-hot
    logits = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * sharpness
    probs = logits.softmax(dim=0)
    kept = keep_middle(logits, mass).isfinite()
    assert kept.any()
    inside = torch.nonzero(kept).ravel()
    assert torch.equal(inside, torch.arange(int(inside[0]), int(inside[-1]) + 1))  # no holes
    assert float(probs[kept].sum()) >= mass - 1e-4
    outside = (1.0 - mass) / 2 + 1e-4
    assert float(probs[: inside[0]].sum()) <= outside and float(probs[inside[-1] + 1 :].sum()) <= outside
    # No larger than necessary: without its first or last token it would hold too little on that side.
    assert float(probs[: inside[0] + 1].sum()) >= outside - 2e-4
    assert float(probs[inside[-1] :].sum()) >= outside - 2e-4


def test_the_nucleus_is_computed_row_by_row() -> None:
    rows = torch.stack([logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.2, 0.7), logits_of(0.25, 0.35, 0.4)])
    kept = keep_nucleus(rows[None], 0.5).isfinite()
    assert kept.tolist() == [[[True, False, False], [False, False, True], [False, True, True]]]


def test_an_expectation_counts_the_stop_token_as_zero() -> None:
    logits = torch.stack([logits_of(0.2, 0.3, 0.5), logits_of(0.9, 0.1, 1e-300)])
    values = torch.tensor([10.0, -20.0], dtype=torch.float64)
    torch.testing.assert_close(predicted_value(logits, values), torch.tensor([-4.0, 7.0], dtype=torch.float64))


def test_an_expectation_keeps_leading_dimensions() -> None:
    assert predicted_value(torch.zeros(2, 3, 5), torch.ones(4)).tolist() == [[pytest.approx(0.8)] * 3] * 2


def test_top_k_keeps_the_most_likely() -> None:
    kept = keep_top(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)
    assert kept.isfinite().tolist() == [[False, True, False, True]]


def test_tokens_are_drawn_by_probability_after_filtering() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = Noise(torch.tensor([0])).gumbel(40_000, 1, 4).slot(0)[0]
    logits = probs.log().expand(40_000, -1)
    shares = torch.bincount(draw(Sampler(), logits, noise), minlength=4) / 40_000
    torch.testing.assert_close(shares, probs, atol=0.01, rtol=0)
    top = torch.bincount(draw(Sampler(top_k=2), logits, noise), minlength=4) / 40_000
    torch.testing.assert_close(top, torch.tensor([0.625, 0.375, 0, 0]), atol=0.01, rtol=0)
    sharp = torch.bincount(draw(Sampler(temperature=0.5), logits, noise), minlength=4) / 40_000
    torch.testing.assert_close(sharp, probs**2 / (probs**2).sum(), atol=0.01, rtol=0)
    assert draw(Sampler(nucleus=0.4), logits, noise).eq(0).all()
    assert draw(Sampler(), logits, None).eq(0).all()


def test_the_noise_of_a_search_depends_on_its_seed_only() -> None:
    together, alone = Noise(torch.tensor([3, 4])), Noise(torch.tensor([4]))
    seen = []
    for _ in range(2):
        first, second = together.gumbel(2, 3, 4), alone.gumbel(2, 3, 4)
        for slot in range(3):
            assert torch.equal(first.slot(slot)[1], second.slot(slot)[0])
            seen += first.slot(slot).flatten().tolist()
    assert len(set(seen)) == len(seen)  # 2 runs x 3 slots x 2 searches x 2 candidates x 4 tokens, all different


def test_the_middle_replaces_top_k_and_nucleus() -> None:
    logits = logits_of(0.1, 0.2, 0.1, 0.2, 0.4).expand(1000, -1)
    noise = Noise(torch.tensor([0])).gumbel(1000, 1, 5).slot(0)[0]
    # The nucleus and the most likely token are the last one, the middle is the median alone.
    assert draw(Sampler(top_k=1, nucleus=0.1), logits, noise).eq(4).all()
    assert draw(Sampler(top_k=1, nucleus=0.1, middle=0.1), logits, noise).eq(3).all()
    # Without effect, it still replaces them.
    everything = draw(Sampler(top_k=1, nucleus=0.1, middle=1.0), logits, noise)
    assert torch.equal(everything, draw(Sampler(), logits, noise))
    assert set(everything.tolist()) == {0, 1, 2, 3, 4}


def test_a_percentile_counts_the_stop_token_as_zero() -> None:
    logits = torch.tensor([0.4, 0.3, 0.1, 0.2]).log()
    values = torch.tensor([-5.0, 1.0, 7.0])
    # In order: -5 (0.4), 0 for the stop token (0.2), 1 (0.3), 7 (0.1).
    found = [float(predicted_value(logits, values, percentile)) for percentile in (0.3, 0.5, 0.8, 0.95)]
    assert found == [-5.0, 0.0, 1.0, 7.0]
    rows = torch.stack([logits, logits.flip(0)])[None]
    assert predicted_value(rows, values, 0.5).tolist() == [[0.0, 0.0]]
