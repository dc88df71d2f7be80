"""Which decoder a device and a model get, and why not a faster one."""

import logging
from typing import Literal

from trajectory_transformer.gpu.planning.fused import FusedDecoder, why_not_fused
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Decoder
from trajectory_transformer.search.naive import NaiveDecoder

log = logging.getLogger(__name__)


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
