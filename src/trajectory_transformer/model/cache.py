"""Keys and values of tokens already read, so that each token passes through the model once.

Candidates of one plan share the prompt: its keys and values are kept once per environment (`shared`), those of the
planned tokens once per candidate (`own`). Tokens that nothing may attend to (values) are never stored.
"""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of all layers, for E environments with up to K candidates each.

    Candidates are rows, environment by environment. There are two buffers: a selection copies from one to the other,
    each row in one piece, and they change places. What all candidates have come to share moves to the shared part.
    """

    def __init__(self, shared_keys: Tensor, shared_values: Tensor, *, max_candidates: int, max_own: int) -> None:
        """Start from the prompt's keys and values [layers, E, H, C, d], with room for `max_own` tokens a candidate."""
        layers, self.num_envs, heads, _, head_dim = shared_keys.shape
        self.shared_keys = shared_keys.mT.contiguous()  # [layers, E, H, d, C], as the product with queries wants it
        self.shared_values = shared_values
        # One column more, before the own ones: there, what a token found in the shared columns stands as a single one.
        room = (layers, self.num_envs * max_candidates, heads, 1 + max_own, head_dim)
        self._keys, self._values = shared_keys.new_empty(room), shared_keys.new_empty(room)
        self._other_keys, self._other_values = torch.empty_like(self._keys), torch.empty_like(self._values)
        self.num_candidates = 1
        self._begin, self._end = 1, 1  # own columns read by every layer
        self._written = 1  # end of those that some layers have already written

    @property
    def num_shared(self) -> int:
        """C, columns that all candidates share."""
        return self.shared_values.shape[3]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put S new tokens after the own ones of a layer: [E, K, H, S, d]."""
        rows = self.num_envs * self.num_candidates
        self._written = self._end + keys.shape[3]
        self._keys[layer, :rows, :, self._end : self._written] = keys.flatten(0, 1)
        self._values[layer, :rows, :, self._end : self._written] = values.flatten(0, 1)

    def write_summary(self, layer: int, values: Tensor) -> None:
        """Let one column before the own ones stand for all shared ones: values [E, K, H, d]; its key is zero."""
        rows = self.num_envs * self.num_candidates
        self._keys[layer, :rows, :, self._begin - 1] = 0.0
        self._values[layer, :rows, :, self._begin - 1] = values.flatten(0, 1)

    def own(self, layer: int, *, with_summary: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer's own columns, the new ones included [E, K, H, P, d]."""
        rows, columns = self.num_envs * self.num_candidates, slice(self._begin - with_summary, self._written)
        keys, values = self._keys[layer, :rows, :, columns], self._values[layer, :rows, :, columns]
        shape = (self.num_envs, self.num_candidates, *keys.shape[1:])
        return keys.view(shape), values.view(shape)

    def advance(self) -> None:
        """Keep the tokens that every layer has written."""
        self._end = self._written

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by continuations of themselves: parents [E, K'] numbers the old ones."""
        firsts = torch.arange(self.num_envs, device=parents.device)[:, None] * self.num_candidates
        rows = (firsts + parents).flatten()
        self.num_candidates = parents.shape[1]
        if self._end > self._begin:
            for layer in range(len(self._keys)):
                torch.index_select(self._keys[layer], 0, rows, out=self._other_keys[layer, : len(rows)])
                torch.index_select(self._values[layer], 0, rows, out=self._other_values[layer, : len(rows)])
            self._keys, self._other_keys = self._other_keys, self._keys
            self._values, self._other_values = self._other_values, self._values

    def share(self, num_tokens: int) -> None:
        """Move the first own tokens to the shared part; the caller knows that all candidates agree on them."""
        columns = slice(self._begin, self._begin + num_tokens)
        firsts = slice(0, self.num_envs * self.num_candidates, self.num_candidates)
        self.shared_keys = torch.cat([self.shared_keys, self._keys[:, firsts, :, columns].mT], dim=-1)
        self.shared_values = torch.cat([self.shared_values, self._values[:, firsts, :, columns]], dim=-2)
        self._begin += num_tokens

    @staticmethod
    def num_bytes(*, layers: int, width: int, rows: int, max_own: int, itemsize: int) -> int:
        """Memory that the own keys and values of so many candidates take, both buffers."""
        return 4 * layers * rows * max_own * width * itemsize
