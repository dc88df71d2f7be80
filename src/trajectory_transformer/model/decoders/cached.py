"""Each token passes through the model once; where the window slides, the visible part is read again."""

import torch
from torch import Tensor

from trajectory_transformer.model.cache import KVCache
from trajectory_transformer.model.decoders.sequences import Sequences
from trajectory_transformer.model.gpt import GPT


class CachedDecoder:
    """Extends candidates with keys and values kept: the prompt's once per environment, the rest per candidate."""

    def __init__(self, gpt: GPT, window: int | None = None) -> None:
        """Decode with a model."""
        self._sequences = Sequences(gpt, window)
        self._cache: KVCache | None = None
        self._cropped = 0  # tokens slid out when the cache was filled
        self._read = 0  # tokens of each candidate that the cache has seen
        self._max_candidates = 1
        self._max_new = 0

    @property
    def tokens(self) -> Tensor:
        """Tokens added so far [E, K, n]."""
        return self._sequences.tokens

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates."""
        self._sequences.begin(prompt)
        self._cache = None
        self._max_candidates, self._max_new = max_candidates, max_new

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""
        sequences = self._sequences
        cropped = sequences.num_cropped()
        prompt, own = sequences.visible(cropped)
        if self._cache is None or cropped != self._cropped:
            # Positions restart after a crop, so nothing read before still holds.
            room = min(self._max_new, sequences.gpt.max_tokens)
            logits, self._cache = sequences.gpt.prefill(prompt, max_candidates=self._max_candidates, max_own=room)
            self._cache.num_candidates = own.shape[1]
            self._cropped = cropped
            self._read = 0
            if own.shape[2] == 0:
                assert logits is not None, "a search needs a prompt"
                return logits.expand(-1, own.shape[1], -1)
        logits = sequences.gpt.extend(own[:, :, self._read :], prompt.shape[1] + self._read, self._cache)
        self._read = own.shape[2]
        return logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self._sequences.append(tokens)

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        self._sequences.select(parents)
        if self._cache is not None:
            self._cache.select(parents)
