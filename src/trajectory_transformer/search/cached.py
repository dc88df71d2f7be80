"""The cached decoder: the model reads each token once, and everything visible again when the window slides."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trajectory_transformer.model.gpt import GPT, Block
from trajectory_transformer.search.cache import KVCache, attend_many, attend_one, check_free_memory
from trajectory_transformer.search.decoder import StepwiseDecoder
from trajectory_transformer.search.tree import Level, read_tree


class CachedDecoder(StepwiseDecoder):
    """Extends candidates with a key/value cache: the prompt's once per environment, the rest once per candidate."""

    def __init__(self, gpt: GPT, window: int | None = None, *, bf16: bool = False) -> None:
        """Decode with a model; by default as many transitions are visible as in training.

        With `bf16`, matmuls, keys and values are bfloat16; what the layers add up stays in the type of the model.
        """
        super().__init__(gpt, window)
        self.dtype = torch.bfloat16 if bf16 else gpt.position_embedding.dtype
        self._cache: KVCache | None = None
        self._blocks: list[Block] = []
        self._cropped: int | None = None  # tokens that had slid out when the cache was filled
        self._read = 0  # visible tokens of each candidate that the cache has read
        self._shared = 0  # the first of these, which all candidates have in common
        self._ahead: Tensor | None = None  # logits computed before a selection [E, K, V + 1]

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search, see `Decoder`."""
        super().begin(prompt, max_candidates=max_candidates, max_new=max_new, map_embedding=map_embedding)
        config = self.gpt.config
        max_own = min(max_new, self.gpt.layout.length(self.window))
        self._check_memory(len(prompt) * max_candidates, max_own)
        self._cache = KVCache(
            self.gpt.position_embedding.detach()[0].view(config.num_heads, -1).to(self.dtype),
            layers=config.num_layers,
            num_envs=len(prompt),
            max_candidates=max_candidates,
            max_own=max_own,
        )
        # Again for each search, so that weights may change in between.
        self._blocks = [
            block.with_linear(lambda layer: TransposedLinear(layer, self.dtype))
            for block in self.gpt.blocks
            if isinstance(block, Block)
        ]
        self._cropped = self._ahead = None

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; call it at most once per token."""
        if self._ahead is not None:
            logits, self._ahead = self._ahead, None
            return logits
        assert self._cache is not None, "a search begins with a prompt"
        cropped = self.num_cropped()
        prompt, own = self.visible(cropped)
        if cropped != self._cropped:
            # Positions restart after a crop, so the cache is no longer valid.
            self._cropped = cropped
            return self._read_visible(prompt, own, self._cache)
        logits = self._extend(own[:, :, self._read :], prompt.shape[1] + self._read, self._cache)
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
            self._ahead = self.logits()  # before candidates are copied: all copies would compute the same
        super().select(parents)
        self._cache.select(parents)
        if self._ahead is not None:
            self._ahead = self._ahead.gather(1, parents[..., None].expand(-1, -1, self._ahead.shape[-1]))
        if self._cache.has_stems:
            return
        # The survivors of a search soon have a common ancestor. What they share is stored once.
        prompt, own = self.visible(self._cropped)
        common = _common_prefix(own[:, :, : self._read])
        if common > self._shared:
            start = prompt.shape[1]
            self._cache.share(sum(self.gpt.layout.readable(start + self._shared, start + common)))
            self._shared = common

    def _extend(self, tokens: Tensor, start: int, cache: KVCache) -> Tensor:
        """Read S more tokens of every candidate from position `start`: tokens [E, K, S] -> logits [E, K, V + 1]."""
        num_new = tokens.shape[2]
        maps = None if self.map_embedding is None else self.map_embedding[:, None]
        x = self.gpt.embed(tokens, start, maps)  # [E, K, S, width]
        readable = [index for index, kept in enumerate(self.gpt.layout.readable(start, start + num_new)) if kept]
        # Among the new columns a token sees those up to its own; it sees all older ones.
        mask = None if num_new == 1 else self.gpt.mask[start : start + num_new, start : start + num_new][:, readable]

        for layer, block in enumerate(self._blocks):

            def attend(query: Tensor, key: Tensor, value: Tensor, layer: int = layer) -> Tensor:
                if len(readable) < num_new:
                    key, value = key[..., readable, :], value[..., readable, :]
                cache.write(layer, key, value)
                return attend_one(query, cache, layer) if mask is None else attend_many(query, cache, layer, mask)

            x = block(x, attend)
        cache.advance()
        return self.gpt.logits_after(x[:, :, -1], start + num_new)

    def _read_visible(self, prompt: Tensor, own: Tensor, cache: KVCache) -> Tensor:
        """Fill the cache with prompts [E, L] and candidates [E, K, n]; returns the logits after them [E, K, V + 1].

        Candidates with a common beginning read it once.
        """
        self._read, self._shared = own.shape[2], _common_prefix(own)
        prompt, own = torch.cat([prompt, own[:, 0, : self._shared]], dim=1), own[:, :, self._shared :]
        levels, rows = _branches(own, self._joints(prompt.shape[1], own.shape[2]))
        logits = read_tree(self.gpt, self._blocks, prompt, levels, cache, self.map_embedding)
        cache.select(rows)
        return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))

    def _joints(self, start: int, length: int) -> list[int]:
        """Where candidates can part: ends of states and transitions within `length` tokens from position `start`."""
        layout = self.gpt.layout
        slots = [(start + end - layout.goal_dim) % layout.size for end in range(length)]
        return [end for end, slot in enumerate(slots) if end and slot in (0, layout.observation_dim)] + [length]

    def _check_memory(self, rows: int, max_own: int) -> None:
        """Refuse a search that would not fit into memory."""
        config = self.gpt.config
        needed = KVCache.num_bytes(
            layers=config.num_layers, width=config.width, rows=rows, max_own=max_own, itemsize=self.dtype.itemsize
        )
        check_free_memory(needed, rows, self.gpt.position_embedding.device)


class TransposedLinear(nn.Module):
    """A linear layer with transposed weights: on some CPUs twice as fast for few rows."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype | None = None) -> None:
        """Copy the weights as they are now, perhaps as another type."""
        super().__init__()
        self._bias = layer.bias.detach().to(dtype)
        self._weight = layer.weight.detach().to(dtype).t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = torch.addmm(self._bias, x.reshape(-1, len(self._weight)).to(self._weight.dtype), self._weight)
        return rows.view(*x.shape[:-1], -1)


def _common_prefix(tokens: Tensor) -> int:
    """Number of leading tokens on which all candidates of each environment agree: tokens [E, K, n] -> at most n."""
    agree = (tokens == tokens[:, :1]).all(dim=1).all(dim=0)
    return int(agree.cumprod(dim=0).sum())


def _branches(tokens: Tensor, ends: list[int]) -> tuple[list[Level], Tensor]:
    """The tree that candidates form: tokens [E, K, n], cut at `ends` -> its levels, and each candidate's leaf [E, K].

    Environments with fewer branches than others repeat one.
    """
    if not tokens.shape[2]:
        return [], tokens.new_zeros(tokens.shape[:2])
    # Tokens are compared by random linear hashes modulo 2^64; a collision has a probability of about 10^-17.
    weights = torch.randint(2**62, (tokens.shape[2],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    sums = (tokens * weights.to(tokens.device)).cumsum(dim=-1)[:, :, [end - 1 for end in ends]].mT  # [E, levels, K]
    ordered, order = sums.sort(dim=-1)
    number = (ordered.diff(dim=-1) != 0).cumsum(dim=-1)
    number = functional.pad(number, (1, 0))  # equal candidates have equal numbers
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
