"""Filters and expectations by hand."""

import pytest
import torch

from trajectory_transformer.model.sampling import expected_value, keep_nucleus


def logits_of(*probabilities: float) -> torch.Tensor:
    """Logits of a distribution, off by a constant as a model's are."""
    return torch.tensor(probabilities, dtype=torch.float64).log() + 3.0


@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (1.0, [True, True, True, True]),
        (0.96, [True, True, True, True]),  # the least likely has 0.05, more than the 0.04 that may go
        (0.9, [False, True, True, True]),  # 0.05 may go, 0.05 + 0.15 may not
        (0.6, [False, True, False, True]),  # 0.05 + 0.15 may go, 0.05 + 0.15 + 0.3 may not
        (0.4, [False, True, False, False]),  # 0.05 + 0.15 + 0.3 may go
        (0.0, [False, True, False, False]),  # the most likely always stays
    ],
)
def test_the_nucleus_drops_the_least_likely_up_to_the_mass_left_over(mass: float, kept: list[bool]) -> None:
    logits = logits_of(0.05, 0.5, 0.15, 0.3)
    filtered = keep_nucleus(logits, mass)
    assert filtered.isfinite().tolist() == kept
    assert torch.equal(filtered[filtered.isfinite()], logits[torch.tensor(kept)])  # what is kept is unchanged
    assert (filtered[~filtered.isfinite()] == -torch.inf).all()


def test_the_nucleus_is_taken_row_by_row() -> None:
    rows = torch.stack([logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.2, 0.7), logits_of(0.25, 0.35, 0.4)])
    kept = keep_nucleus(rows[None], 0.5).isfinite()
    assert kept.tolist() == [[[True, False, False], [False, False, True], [False, True, True]]]


def test_an_expectation_counts_the_stop_token_as_zero() -> None:
    logits = torch.stack([logits_of(0.2, 0.3, 0.5), logits_of(0.9, 0.1, 1e-300)])
    values = torch.tensor([10.0, -20.0], dtype=torch.float64)
    torch.testing.assert_close(expected_value(logits, values), torch.tensor([-4.0, 7.0], dtype=torch.float64))


def test_an_expectation_keeps_leading_dimensions() -> None:
    assert expected_value(torch.zeros(2, 3, 5), torch.ones(4)).tolist() == [[pytest.approx(0.8)] * 3] * 2
