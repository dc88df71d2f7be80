"""Keys and values of tokens already read, so that each token passes through the model once.

Candidates of one plan share the prompt: its keys and values are kept once per environment (`shared`), those of the
planned tokens once per candidate (`own`). Where a selection only multiplies candidates, what they had is kept once for
the copies of each (`stem`), and nothing moves. Tokens that nothing may attend to (values) are never stored.
"""

import torch
from torch import Tensor

HEADROOM = 16
"""Columns to spare after a selection, about a transition."""


class KVCache:
    """Preallocated keys and values of all layers, for E environments with up to K candidates each.

    Candidates are rows, environment by environment. A selection copies from one buffer to another, rows packed as
    densely as the tokens allow: reading far apart costs more than reading. What all candidates have come to share moves
    to the shared part.
    """

    def __init__(self, like: Tensor, *, layers: int, num_envs: int, max_candidates: int, max_own: int) -> None:
        """Make room for `max_own` tokens of every candidate beside the prompts; heads are those of `like` [H, d]."""
        heads, head_dim = like.shape
        self.num_envs = num_envs
        self._sizes = (layers, heads, head_dim)
        self._max_own = max_own
        size = layers * 2 * num_envs * max_candidates * heads * max_own * head_dim
        self._buffers = [like.new_empty(size) for _ in range(3)]  # used in turn
        self.restart(like.new_empty(layers, 2, num_envs, heads, 0, head_dim), None)

    def restart(self, shared: Tensor, own: Tensor | None) -> None:
        """Hold only keys and values of prompts [layers, 2, E, H, C, d], of candidates [layers, 2, E * K, H, P, d]."""
        self.shared = shared
        self._stem: Tensor | None = None  # [layers, 2, E * K / copies, H, P, d]
        self._own = shared[..., :0, :] if own is None else own
        self._end = self._written = self._own.shape[4]  # columns written by every layer, by some

    @property
    def num_candidates(self) -> int:
        """K."""
        return self._own.shape[2] // self.num_envs

    @property
    def has_stems(self) -> bool:
        """Whether candidates are copies that share what they have in common with their siblings alone."""
        return self._stem is not None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put S new tokens after the own ones of a layer: [E, K, H, S, d]."""
        self._written = self._end + keys.shape[3]
        if self._written > self._own.shape[4]:
            self._pack(None, keys.shape[3] + HEADROOM)
        self._own[layer, 0, :, :, self._end : self._written] = keys.flatten(0, 1)
        self._own[layer, 1, :, :, self._end : self._written] = values.flatten(0, 1)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a layer, the new ones included, by who reads them: some of [E * B, H, C, d].

        Each block of columns is read by the K / B candidates that follow each other there.
        """
        parts = [self.shared[layer], self._own[layer, ..., : self._written, :]]
        if self._stem is not None:
            parts.insert(1, self._stem[layer])
        return [(part[0], part[1]) for part in parts if part.shape[3]]

    def advance(self) -> None:
        """Keep the tokens that every layer has written."""
        self._end = self._written

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by continuations of themselves: parents [E, K'] numbers the old ones."""
        old, new = self.num_candidates, parents.shape[1]
        candidates = torch.arange(old, device=parents.device)
        if new % old == 0 and bool((parents == candidates.repeat_interleave(new // old)).all()):
            if new == old:
                return
            if self._stem is None and self._end:
                self._stem = self._own[..., : self._end, :]
                self._own = self._room(self.num_envs * new, HEADROOM)
                self._end = self._written = 0
                return
        firsts = torch.arange(self.num_envs, device=parents.device)[:, None] * old
        self._pack((firsts + parents).flatten(), HEADROOM)

    def share(self, num_tokens: int) -> None:
        """Move the first own tokens to the shared part; the caller knows that all candidates agree on them."""
        assert self._stem is None, "what is kept in stems is not shared by all"
        firsts = self._own[:, :, :: self.num_candidates, :, :num_tokens]
        self.shared = torch.cat([self.shared, firsts], dim=4)
        self._own = self._own[..., num_tokens:, :]
        self._end = self._written = self._end - num_tokens

    def _room(self, num_rows: int, columns: int) -> Tensor:
        """The next buffer as room for so many rows and at most so many columns [layers, 2, rows, H, columns, d]."""
        layers, heads, head_dim = self._sizes
        columns = min(columns, self._max_own)
        self._buffers.append(self._buffers.pop(0))
        room = self._buffers[-1].view(layers, -1)[:, : 2 * num_rows * heads * columns * head_dim]
        return room.view(layers, 2, num_rows, heads, columns, head_dim)

    def _pack(self, rows: Tensor | None, spare: int) -> None:
        """Copy all rows or some, stem and own columns together, into the next buffer with some columns to spare."""
        if rows is None:
            rows = torch.arange(self._own.shape[2], device=self._own.device)
        parts = [(self._own[..., : self._end, :], rows)]
        if self._stem is not None:
            copies = self._own.shape[2] // self._stem.shape[2]
            parts.insert(0, (self._stem, rows // copies))
        used = sum(part.shape[4] for part, _ in parts)
        room = self._room(len(rows), used + spare)
        done = 0
        for part, part_rows in parts:
            columns = slice(done, done + part.shape[4])
            for layer in range(len(part) if part.shape[4] else 0):
                for kind in range(2):
                    torch.index_select(part[layer, kind], 0, part_rows, out=room[layer, kind, :, :, columns])
            done = columns.stop
        self._own, self._stem = room, None
        self._written += used - self._end
        self._end = used

    @staticmethod
    def num_bytes(*, layers: int, width: int, rows: int, max_own: int, itemsize: int) -> int:
        """Memory that the own keys and values of so many candidates take, all buffers."""
        return 6 * layers * rows * max_own * width * itemsize
