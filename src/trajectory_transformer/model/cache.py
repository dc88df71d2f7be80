"""Keys and values of tokens already read, so that each token passes through the model once.

Candidates of one plan share the prompt: its keys and values are kept once per environment (`shared`), those of the
planned tokens once per candidate (`own`). Tokens that nothing may attend to (values) are never stored.
"""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of all layers, for E environments with up to K candidates each."""

    def __init__(self, shared_keys: Tensor, shared_values: Tensor, *, max_candidates: int, max_own: int) -> None:
        """Start from the prompt's keys and values [layers, E, H, C, d], with room for `max_own` tokens a candidate."""
        self.shared_keys = shared_keys
        self.shared_values = shared_values
        layers, envs, heads, _, head_dim = shared_keys.shape
        room = (layers, envs, max_candidates, heads, max_own, head_dim)
        self._keys = shared_keys.new_empty(room)
        self._values = shared_keys.new_empty(room)
        self.num_candidates = 1
        self.own_length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put S new tokens after the own ones of a layer, [E, K, H, S, d]; returns all own ones [E, K, H, P, d]."""
        end = self.own_length + keys.shape[3]
        self._keys[layer, :, : self.num_candidates, :, self.own_length : end] = keys
        self._values[layer, :, : self.num_candidates, :, self.own_length : end] = values
        return (
            self._keys[layer, :, : self.num_candidates, :, :end],
            self._values[layer, :, : self.num_candidates, :, :end],
        )

    def advance(self, num_tokens: int) -> None:
        """Keep the tokens that every layer has written."""
        self.own_length += num_tokens

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by continuations of themselves: parents [E, K'] numbers the old ones."""
        envs = torch.arange(parents.shape[0], device=parents.device)[:, None]
        self.num_candidates = parents.shape[1]
        if self.own_length:
            used = slice(0, self.own_length)
            for store in (self._keys, self._values):
                store[:, :, : self.num_candidates, :, used] = store[:, envs, parents, :, used]
