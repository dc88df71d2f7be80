"""Each token passes through the model once; where the window slides, the visible part is read again."""

import os

import torch
from torch import Tensor
from torch.nn import functional

from trajectory_transformer.model.block import Linear, TransposedWeights, apply_linear
from trajectory_transformer.model.gpt import GPT, Level
from trajectory_transformer.search.cache import KVCache
from trajectory_transformer.search.decoder import StepwiseDecoder


class CachedDecoder(StepwiseDecoder):
    """Extends candidates with keys and values kept: the prompt's once per environment, the rest per candidate."""

    def __init__(self, gpt: GPT, window: int | None = None) -> None:
        """Decode with a model; by default as many transitions are visible as in training."""
        super().__init__(gpt, window)
        self._cache: KVCache | None = None
        self._linear: Linear = apply_linear
        self._cropped: int | None = None  # tokens slid out when the cache was filled
        self._read = 0  # visible tokens of each candidate that the cache has seen
        self._shared = 0  # of these, the first ones that all candidates have in common
        self._ahead: Tensor | None = None  # logits that nobody has asked for yet [E, K, V + 1]

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `map_embedding` [E, width] is what `GPT.encode_map` made of each environment's, for models that read one.
        """
        super().begin(prompt, max_candidates=max_candidates, max_new=max_new, map_embedding=map_embedding)
        max_own = min(max_new, self.gpt.layout.length(self.window))
        self._check_memory(len(prompt) * max_candidates, max_own)
        self._cache = self.gpt.make_cache(num_envs=len(prompt), max_candidates=max_candidates, max_own=max_own)
        self._linear = TransposedWeights(self.gpt)  # anew for each search, so that training in between is seen
        self._cropped = self._ahead = None

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""
        if self._ahead is not None:
            logits, self._ahead = self._ahead, None
            return logits
        assert self._cache is not None, "a search begins with a prompt"
        cropped = self.num_cropped()
        prompt, own = self.visible(cropped)
        if cropped != self._cropped:
            # Positions restart after a crop, so nothing read before still holds.
            self._cropped = cropped
            return self._read_anew(prompt, own, self._cache)
        start = prompt.shape[1] + self._read
        logits = self.gpt.extend(own[:, :, self._read :], start, self._cache, self._linear, self.map_embedding)
        self._read = own.shape[2]
        return logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        super().append(tokens)
        self._ahead = None

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        if self._cache is None or self._cropped is None:
            super().select(parents)
            return
        prompt, own = self.visible(self._cropped)
        if parents.shape[1] > own.shape[1] and own.shape[2] > self._read:
            self._ahead = self.logits()  # copies would all read the same
        super().select(parents)
        self._cache.select(parents)
        if self._ahead is not None:
            self._ahead = self._ahead.gather(1, parents[..., None].expand(-1, -1, self._ahead.shape[-1]))
        if self._cache.has_stems:
            return
        # The survivors of a search soon have a common ancestor: up to there they are one, and are kept as one.
        prompt, own = self.visible(self._cropped)
        common = _common_prefix(own[:, :, : self._read])
        if common > self._shared:
            start = prompt.shape[1]
            self._cache.share(len(self.gpt.readable(start + self._shared, start + common)))
            self._shared = common

    def _read_anew(self, prompt: Tensor, own: Tensor, cache: KVCache) -> Tensor:
        """Fill a cache with prompts [E, L] and candidates [E, K, n]; returns the logits after them [E, K, V + 1].

        Candidates that have everything up to some token in common read it together.
        """
        self._read, self._shared = own.shape[2], _common_prefix(own)
        prompt, own = torch.cat([prompt, own[:, 0, : self._shared]], dim=1), own[:, :, self._shared :]
        levels, rows = _branches(own, self._joints(prompt.shape[1], own.shape[2]))
        logits = self.gpt.read_tree(prompt, levels, cache, self._linear, self.map_embedding)
        cache.select(rows)
        return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))

    def _joints(self, start: int, length: int) -> list[int]:
        """Where candidates part: ends of states and of transitions within `length` tokens from position `start` on."""
        layout = self.gpt.layout
        slots = [(start + end - layout.goal_dim) % layout.size for end in range(length)]
        return [end for end, slot in enumerate(slots) if end and slot in (0, layout.observation_dim)] + [length]

    def _check_memory(self, rows: int, max_own: int) -> None:
        """Refuse a search that would not fit, before it is half done."""
        config = self.gpt.config
        itemsize = self.gpt.position_embedding.element_size()
        needed = KVCache.num_bytes(
            layers=config.num_layers, width=config.width, rows=rows, max_own=max_own, itemsize=itemsize
        )
        device = self.gpt.position_embedding.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            raise ValueError(
                f"a search with {rows} candidates needs {needed / 2**30:.1f} GiB for keys and values, "
                f"{free / 2**30:.1f} GiB are free: lower search.beam_width, search.expansion or --num_envs"
            )


def _common_prefix(tokens: Tensor) -> int:
    """Tokens at the front on which all candidates of each environment agree: tokens [E, K, n] -> at most n."""
    agree = (tokens == tokens[:, :1]).all(dim=1).all(dim=0)
    return int(agree.cumprod(dim=0).sum())


def _branches(tokens: Tensor, ends: list[int]) -> tuple[list[Level], Tensor]:
    """The tree that candidates form: tokens [E, K, n], cut at `ends` -> its levels, and each one's leaf [E, K].

    Environments with fewer branches than others repeat one.
    """
    if not tokens.shape[2]:
        return [], tokens.new_zeros(tokens.shape[:2])
    # Equal sums of tokens with random weights, modulo 2^64, mean equal tokens: chance is against it by 1 to 10^17.
    weights = torch.randint(2**62, (tokens.shape[2],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    sums = (tokens * weights.to(tokens.device)).cumsum(dim=-1)[:, :, [end - 1 for end in ends]].mT  # [E, levels, K]
    ordered, order = sums.sort(dim=-1)
    number = (ordered.diff(dim=-1) != 0).cumsum(dim=-1)
    number = functional.pad(number, (1, 0))  # alike candidates share a number
    kinds = torch.zeros_like(order).scatter(-1, order, number)
    one_of = torch.zeros_like(order).scatter(-1, number, order)
    levels = []
    begin, parents = 0, torch.zeros_like(kinds[:, 0])
    for index, (end, most) in enumerate(zip(ends, number[..., -1].amax(dim=0).tolist(), strict=True)):
        some = one_of[:, index, : most + 1]
        own = tokens.gather(1, some[..., None].expand(-1, -1, tokens.shape[2]))[:, :, begin:end]
        levels.append(Level(own, parents.gather(1, some)))
        begin, parents = end, kinds[:, index]
    return levels, parents
