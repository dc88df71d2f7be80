"""Each token passes through the model once; where the window slides, the visible part is read again."""

import os

import torch
from torch import Tensor

from trajectory_transformer.model.cache import KVCache
from trajectory_transformer.model.decoders.stepwise import StepwiseDecoder
from trajectory_transformer.model.gpt import GPT, Linear, TransposedWeights, apply_linear


class CachedDecoder(StepwiseDecoder):
    """Extends candidates with keys and values kept: the prompt's once per environment, the rest per candidate."""

    def __init__(self, gpt: GPT, window: int | None = None) -> None:
        """Decode with a model; by default as many transitions are visible as in training."""
        super().__init__(gpt, window)
        self._cache: KVCache | None = None
        self._linear: Linear = apply_linear
        self._cropped = 0  # tokens slid out when the cache was filled
        self._read = 0  # visible tokens of each candidate that the cache has seen
        self._shared = 0  # of these, the first ones that all candidates have in common
        self._max_candidates = 1
        self._max_own = 0

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, context: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `context` [E, width] is what `GPT.encode_context` made of each environment's, for models that read one.
        """
        super().begin(prompt, max_candidates=max_candidates, max_new=max_new, context=context)
        self._cache = None
        self._linear = TransposedWeights(self.gpt)  # anew for each search, so that training in between is seen
        self._max_candidates = max_candidates
        self._max_own = min(max_new, self.gpt.layout.length(self.window))
        self._check_memory(len(prompt) * max_candidates)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""
        cropped = self.num_cropped()
        prompt, own = self.visible(cropped)
        if self._cache is None or cropped != self._cropped:
            # Positions restart after a crop, so nothing read before still holds.
            self._cropped = cropped
            return self._read_anew(prompt, own)
        start = prompt.shape[1] + self._read
        logits = self.gpt.extend(own[:, :, self._read :], start, self._cache, self._linear, self.context)
        self._read = own.shape[2]
        return logits

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        super().select(parents)
        if self._cache is None:
            return
        self._cache.select(parents)
        # The survivors of a search soon have a common ancestor: up to there they are one, and are kept as one.
        prompt, own = self.visible(self._cropped)
        common = _common_prefix(own[:, :, : self._read])
        if common > self._shared:
            start = prompt.shape[1]
            self._cache.share(len(self.gpt.readable(start + self._shared, start + common)))
            self._shared = common

    def _read_anew(self, prompt: Tensor, own: Tensor) -> Tensor:
        """Fill a new cache with prompts [E, L] and candidates [E, K, n]; returns the logits after them [E, K, V + 1].

        Candidates that have a transition and all before it in common read it together.
        """
        self._read, self._shared = own.shape[2], _common_prefix(own)
        prompt = torch.cat([prompt, own[:, 0, : self._shared]], dim=1)
        logits, cache = self.gpt.prefill(
            prompt, max_candidates=self._max_candidates, max_own=self._max_own, context=self.context
        )
        self._cache = cache
        cache.num_candidates = 1
        rows = own.new_zeros(own.shape[:2])  # which of the rows read so far each candidate continues
        size, after_goal = self.gpt.layout.size, prompt.shape[1] - self.gpt.layout.goal_dim
        done = self._shared
        while done < self._read:
            end = min(done + size - (after_goal - self._shared + done) % size, self._read)
            first, next_rows = _distinct(own[:, :, :end])
            cache.select(rows.gather(1, first))
            tokens = own.gather(1, first[..., None].expand(-1, -1, own.shape[2]))[:, :, done:end]
            start = prompt.shape[1] - self._shared + done
            logits = self.gpt.extend(tokens, start, cache, self._linear, self.context)
            rows, done = next_rows, end
        assert logits is not None, "a search needs a prompt"
        cache.select(rows)
        return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))

    def _check_memory(self, rows: int) -> None:
        """Refuse a search that would not fit, before it is half done."""
        config = self.gpt.config
        itemsize = self.gpt.position_embedding.element_size()
        needed = KVCache.num_bytes(
            layers=config.num_layers, width=config.width, rows=rows, max_own=self._max_own, itemsize=itemsize
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


def _distinct(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Different rows of every environment: tokens [E, K, n] -> one of each kind [E, U], and the kind of each [E, K].

    Environments with fewer kinds than others repeat one.
    """
    firsts, kinds = [], []
    for rows in tokens:
        _, kind = torch.unique(rows, dim=0, return_inverse=True)
        number = torch.arange(len(rows), device=rows.device)
        first = torch.full((int(kind.max()) + 1,), len(rows), device=rows.device).scatter_reduce(
            0, kind, number, "amin"
        )
        firsts.append(first)
        kinds.append(kind)
    most = max(len(first) for first in firsts)
    padded = [torch.cat([first, first[:1].expand(most - len(first))]) for first in firsts]
    return torch.stack(padded), torch.stack(kinds)
