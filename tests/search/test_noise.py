"""Gumbel noise is finite for every hash, so that a token that a filter dropped is never sampled."""

import pytest
import torch
from torch import Tensor

from trajectory_transformer import randomness
from trajectory_transformer.config import Sampler
from trajectory_transformer.search.noise import Gumbel
from trajectory_transformer.search.sampling import draw


@pytest.mark.parametrize("bits", [0, 2**24 - 1])
def test_extreme_noise_is_finite_and_samples_no_dropped_token(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    def extreme(keys: Tensor, shift: int) -> Tensor:
        del shift
        return torch.full_like(keys, bits)

    monkeypatch.setattr(randomness, "logical_shift", extreme)
    noise = Gumbel(torch.tensor([1]), 1, num_candidates=2, num_slots=1, vocabulary=3).slot(0)
    assert noise.isfinite().all()
    logits = torch.tensor([0.0, -1.0, -torch.inf]).expand(1, 2, 3)
    assert (draw(Sampler(), logits, noise) == 0).all()
