"""Next tokens from logits: filters, Gumbel noise, and what a predicted distribution is worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Worth of a discretised scalar: logits [..., V + 1], values [V], sampled tokens [...] -> [...]."""


@dataclass(frozen=True)
class Sampler:
    """How tokens are drawn: the distribution is sharpened by temperature and cut by two filters, then noise decides."""

    temperature: float = 1.0
    top_k: int | None = None  # keep so many most likely tokens
    nucleus: float | None = None  # keep the most likely tokens that hold this share of the mass

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """One token a row by the Gumbel-max trick, without noise the most likely: logits, noise [..., V] -> [...]."""
        if noise is None:
            return logits.argmax(dim=-1)
        scaled = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            scaled = keep_top(scaled, self.top_k)
        if self.nucleus is not None and self.nucleus < 1.0:
            scaled = keep_nucleus(scaled, self.nucleus)
        return (scaled + noise).argmax(dim=-1)


def keep_top(logits: Tensor, count: int) -> Tensor:
    """Drop all but the `count` most likely tokens: logits [..., V] -> the same, -inf where dropped."""
    threshold = logits.topk(count, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_nucleus(logits: Tensor, mass: float) -> Tensor:
    """Drop the least likely tokens whose probabilities add up to at most 1 - mass: logits [..., V] -> the same, -inf.

    The most likely token always stays. `mass` 1 keeps everything, the authors' `cdf` is 1 - mass.
    """
    probs = logits.softmax(dim=-1)
    ordered, order = probs.sort(dim=-1)
    kept_in_order = ordered.cumsum(dim=-1) > 1.0 - mass
    kept_in_order[..., -1] = True
    kept = torch.zeros_like(kept_in_order).scatter(-1, order, kept_in_order)
    return logits.masked_fill(~kept, -torch.inf)


class Noise:
    """Gumbel noise of E searches, each from a seed of its own, so that a plan does not depend on its neighbours.

    Whoever decodes draws the same numbers in the same order: every decoder returns the same plan.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """One stream a search, drawn on the CPU so that every device sees the same numbers."""
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device

    def gumbel(self, *shape: int) -> Tensor:
        """The next numbers of every stream [E, *shape]."""
        draws = [torch.empty(shape).exponential_(generator=generator) for generator in self._generators]
        return -torch.stack(draws).log().to(self._device)


def stream_seed(*words: int) -> int:
    """A seed for one stream from the numbers that identify it."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def expected_value(logits: Tensor, values: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean of a discretised scalar under the predicted distribution: logits [..., V + 1], values [V] -> [...].

    The stop token stands for nothing more to come: it adds zero, and the others are not scaled up in its place.
    """
    del tokens
    return logits.softmax(dim=-1)[..., :-1] @ values


def sampled_value(logits: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """What the sampled token stands for, zero for the stop token."""
    del logits
    return torch.cat([values, values.new_zeros(1)])[tokens]


def percentile_value(share: float) -> Estimate:
    """The value that a share of the predicted mass lies below; the stop token counts as a value of zero."""

    def estimate(logits: Tensor, values: Tensor, tokens: Tensor | None = None) -> Tensor:
        del tokens
        with_stop = torch.cat([values, values.new_zeros(1)])
        ordered, order = with_stop.sort()
        mass = logits.softmax(dim=-1)[..., order].cumsum(dim=-1)
        index = (mass < share).sum(dim=-1).clamp(max=len(ordered) - 1)
        return ordered[index]

    return estimate
