"""What extends candidates: `naive` reads everything anew for every token, `cached` reads each token once.

`fused` does so in one kernel for a whole run of slots, on GPUs.
"""

import logging
from typing import Literal, Protocol

from torch import Tensor

from trajectory_transformer.model.decoders.cached import CachedDecoder
from trajectory_transformer.model.decoders.fused import FusedDecoder, why_not_fused
from trajectory_transformer.model.decoders.naive import NaiveDecoder
from trajectory_transformer.model.decoders.stepwise import Candidates, Run
from trajectory_transformer.model.gpt import GPT

__all__ = ["DECODERS", "CachedDecoder", "Candidates", "Decoder", "FusedDecoder", "NaiveDecoder", "Run", "make_decoder"]

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Candidates of E environments and what may follow each.

    Every prompt of one search has the same length. A search starts with one candidate per environment, the prompt.
    """

    candidates: Candidates
    """As many as there are now, K of each."""

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, context: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `context` [E, width] is what `GPT.encode_context` made of each environment's, for models that read one.
        """

    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] numbers the old ones."""

    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate, one after the other: between two selections they are independent."""


DECODERS: dict[str, type[NaiveDecoder] | type[CachedDecoder]] = {"cached": CachedDecoder, "naive": NaiveDecoder}


def make_decoder(
    name: str, gpt: GPT, window: int | None = None, *, precision: Literal["auto", "bf16", "float32"] = "auto"
) -> Decoder:
    """A decoder by name; `window` transitions are visible at once, by default as many as in training.

    `auto` is `fused` on a GPU where that can be, else `cached`. Only `fused` can compute in bfloat16.
    """
    on_gpu = gpt.position_embedding.device.type == "cuda"
    if name == "fused" and not on_gpu:
        raise ValueError("search.decoder fused needs a GPU, the model is on the CPU: use cached")
    if name == "fused" or (name == "auto" and on_gpu):
        bf16 = precision == "bf16"
        if precision == "auto":
            bf16 = why_not_fused(gpt, window or gpt.config.window, bf16=True) is None
        try:
            return FusedDecoder(gpt, window, bf16=bf16)
        except (OSError, RuntimeError, ValueError) as error:
            if name == "fused":
                raise ValueError(f"search.decoder fused cannot be used here: {error}") from error
            log.warning("planning with the cached decoder instead of the fused one: %s", error)
    return DECODERS["cached" if name == "auto" else name](gpt, window)
