"""The readable oracle: a full forward pass over everything visible, for every token of every candidate."""

import torch
from torch import Tensor

from trajectory_transformer.model.decoders.sequences import Sequences
from trajectory_transformer.model.gpt import GPT


class NaiveDecoder:
    """Extends candidates without remembering anything but their tokens."""

    def __init__(self, gpt: GPT, window: int | None = None) -> None:
        """Decode with a model."""
        self._sequences = Sequences(gpt, window)

    @property
    def tokens(self) -> Tensor:
        """Tokens added so far [E, K, n]."""
        return self._sequences.tokens

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int) -> None:
        """Start a search: prompt [E, L]; nothing to make room for."""
        del max_candidates, max_new
        self._sequences.begin(prompt)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]."""
        prompt, own = self._sequences.visible(self._sequences.num_cropped())
        shared = prompt[:, None].expand(-1, own.shape[1], -1)
        rows = torch.cat([shared, own], dim=2).flatten(0, 1)
        last: Tensor = self._sequences.gpt(rows)[:, -1]
        return last.view(*own.shape[:2], -1)

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self._sequences.append(tokens)

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        self._sequences.select(parents)
