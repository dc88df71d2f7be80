"""Key/value cache of a search, and attention over it.

Candidates of one plan share the prompt: its keys and values are stored once per environment (`shared`), those of the
planned tokens once per candidate (`own`). If a selection only multiplies candidates, what they had is stored once for
all copies of each (`stem`), and nothing is copied. Value tokens, which nothing may attend to, are never stored.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.limits import GIB, available_bytes

HEADROOM = 16
"""Free columns after a selection, about one transition."""


class KVCache:
    """Preallocated keys and values of all layers, for E environments with up to K candidates each.

    Candidates are rows, environment by environment. A selection copies rows from one buffer to another and packs them
    densely, because strided reads are slow. What all candidates have in common moves to the shared part.
    """

    def __init__(self, like: Tensor, *, layers: int, num_envs: int, max_candidates: int, max_own: int) -> None:
        """Allocate `max_own` tokens per candidate besides the prompts; `like` [H, d] gives sizes, type and device."""
        heads, head_dim = like.shape
        self.num_envs = num_envs
        self._sizes = (layers, heads, head_dim)
        self._max_own = max_own
        size = layers * 2 * num_envs * max_candidates * heads * max_own * head_dim
        self._buffers = [like.new_empty(size) for _ in range(3)]  # used in turn
        self.restart(like.new_empty(layers, 2, num_envs, heads, 0, head_dim), None)

    def restart(self, shared: Tensor, own: Tensor | None) -> None:
        """Start again with prompts [layers, 2, E, H, C, d] and candidates [layers, 2, E * K, H, P, d]."""
        self.shared = shared
        self._stem: Tensor | None = None  # [layers, 2, E * K / copies, H, P, d]
        self._own = shared[..., :0, :] if own is None else own
        self._end = self._written = self._own.shape[4]  # columns written by all layers, by some layers

    @property
    def num_candidates(self) -> int:
        """K."""
        return self._own.shape[2] // self.num_envs

    @property
    def has_stems(self) -> bool:
        """Whether candidates share a stem with their siblings."""
        return self._stem is not None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append S new tokens of a layer: keys, values [E, K, H, S, d]."""
        self._written = self._end + keys.shape[3]
        if self._written > self._own.shape[4]:
            self._pack(None, keys.shape[3] + HEADROOM)
        self._own[layer, 0, :, :, self._end : self._written] = keys.flatten(0, 1)
        self._own[layer, 1, :, :, self._end : self._written] = values.flatten(0, 1)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a layer, new ones included, as parts [E * B, H, C, d].

        Each row of a part is shared by K / B consecutive candidates.
        """
        parts = [self.shared[layer], self._own[layer, ..., : self._written, :]]
        if self._stem is not None:
            parts.insert(1, self._stem[layer])
        return [(part[0], part[1]) for part in parts if part.shape[3]]

    def advance(self) -> None:
        """Commit the tokens that all layers have written."""
        self._end = self._written

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] are indices of the old ones."""
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
        """Move the first own tokens to the shared part; all candidates must agree on them."""
        assert self._stem is None, "stems are not shared by all candidates"
        firsts = self._own[:, :, :: self.num_candidates, :, :num_tokens]
        self.shared = torch.cat([self.shared, firsts], dim=4)
        self._own = self._own[..., num_tokens:, :]
        self._end = self._written = self._end - num_tokens

    def _room(self, num_rows: int, columns: int) -> Tensor:
        """The next buffer, viewed as [layers, 2, rows, H, columns, d]."""
        layers, heads, head_dim = self._sizes
        columns = min(columns, self._max_own)
        self._buffers.append(self._buffers.pop(0))
        room = self._buffers[-1].view(layers, -1)[:, : 2 * num_rows * heads * columns * head_dim]
        return room.view(layers, 2, num_rows, heads, columns, head_dim)

    def _pack(self, rows: Tensor | None, spare: int) -> None:
        """Copy rows (all by default), stem and own columns together, into the next buffer with spare columns."""
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
        """Memory of the own keys and values of `rows` candidates, in all buffers."""
        return 6 * layers * rows * max_own * width * itemsize


def check_free_memory(needed: int, num_candidates: int, device: torch.device) -> None:
    """Refuse a search whose keys and values do not fit into the memory of its device."""
    if device.type == "cuda":
        # What torch keeps of freed tensors counts as used in the driver, but new tensors get it.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free: int | None = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"a search with {num_candidates} candidates needs {needed / GIB:.1f} GiB for keys and values, "
            f"{free / GIB:.1f} GiB are free: lower search.beam_width, search.expansion or --num_envs "
            "(in a study: --max_rows)"
        )


def attend_many(query: Tensor, cache: KVCache, layer: int, mask: Tensor) -> Tensor:
    """Attention of S new tokens over all columns: query [E, K, H, S, d], mask [S, last own columns] -> like query.

    Shared columns are copied for each candidate, which is cheap compared with the work on S tokens.
    """
    rows = query.flatten(0, 1)
    parts = [[part.repeat_interleave(len(rows) // len(part), dim=0) for part in both] for both in cache.parts(layer)]
    keys, values = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    old = mask.new_ones(len(mask), keys.shape[2] - mask.shape[1])
    attended = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=torch.cat([old, mask], dim=1))
    return attended.view(query.shape)


def attend_one(query: Tensor, cache: KVCache, layer: int) -> Tensor:
    """Attention of one new token over all columns: query [E, K, H, 1, d] -> the same.

    Candidates that share columns read them in one matmul, without copies. The results of the parts are combined with
    the weights that a softmax over all columns would give them.
    """
    rows = query[..., 0, :].flatten(0, 1)  # [E * K, H, d]
    found, weight = None, None
    for keys, values in cache.parts(layer):
        together = rows.view(len(keys), -1, *rows.shape[1:]).transpose(1, 2)  # [E * B, H, K / B, d]
        part_found, part_weight = _attend(together, keys, values)
        part_found = part_found.transpose(1, 2).reshape(rows.shape)
        part_weight = part_weight.transpose(1, 2).reshape(rows.shape[:2])
        if found is None or weight is None:
            found, weight = part_found, part_weight
        else:
            share = torch.sigmoid(part_weight - weight)[..., None]
            found = torch.lerp(found, part_found, share.to(found.dtype))
            weight = torch.logaddexp(weight, part_weight)
    assert found is not None, "a token attends at least to itself or to something before it"
    return found.view(query.shape)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp: query [B, H, S, d], keys and values [B, H, C, d] -> like query, and [B, H, S]."""
    if query.device.type == "cpu":
        found, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values)
        return found, weight
    if query.dtype == torch.bfloat16:  # scores rounded to bfloat16 would be too coarse; this kernel keeps float32
        found, weight = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values)[:2]
        return found, weight
    scores = query @ keys.mT / math.sqrt(query.shape[-1])
    weight = scores.logsumexp(dim=-1)
    return (scores - weight[..., None]).exp() @ values, weight
