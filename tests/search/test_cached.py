"""The parts of the cached decoder; its logits and plans are compared in test_decoder.py and test_beam*.py."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.search.test_decoder import LAYOUTS, random_gpt, random_search, search_lengths
from trajectory_transformer.config import ModelConfig
from trajectory_transformer.limits import GIB
from trajectory_transformer.model.gpt import Block
from trajectory_transformer.search.cache import check_free_memory
from trajectory_transformer.search.cached import CachedDecoder, TransposedLinear


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


@torch.no_grad()
def test_a_block_with_transposed_weights_equals_the_plain_block() -> None:
    generator = torch.Generator().manual_seed(0)
    block = Block(ModelConfig(num_heads=2, width=16, dropout=0.0)).double().eval()
    for parameter in block.parameters():
        parameter.normal_(std=0.3, generator=generator)
    transposed = block.with_linear(TransposedLinear)
    assert sum(isinstance(module, TransposedLinear) for module in transposed.children()) == 4
    assert not any(isinstance(module, TransposedLinear) for module in block.children()), "the original is unchanged"
    for shape in ((3, 7, 16), (2, 4, 1, 16)):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(transposed(x, causal), block(x, causal), rtol=0, atol=1e-12)


def test_bfloat16_changes_logits_by_rounding_alone_and_predicts_in_float32() -> None:
    for kind in ("plain", "goal-rewards", "rewards-map"):
        layout = LAYOUTS[kind]
        _, longest, num_tokens = search_lengths(layout, None)
        worst = random_search(
            lambda gpt, window: CachedDecoder(gpt, window, bf16=True),
            random_gpt(layout),
            window=None,
            prompt_length=longest - 1,
            num_tokens=num_tokens,
            rng=np.random.default_rng(0),
        )
        assert 1e-5 < worst < 0.05, kind
    decoder = CachedDecoder(random_gpt(LAYOUTS["plain"]), bf16=True)
    decoder.begin(torch.tensor([[0, 1, 2, 3, 4]]), max_candidates=1, max_new=1)
    assert decoder.logits().dtype == torch.float32


def test_a_decoder_uses_weights_that_change_between_searches() -> None:
    gpt = random_gpt(LAYOUTS["rewards"])
    decoder, prompt = CachedDecoder(gpt), torch.tensor([[0, 1, 2, 3, 4]])
    for _ in range(2):
        decoder.begin(prompt, max_candidates=1, max_new=1)
        torch.testing.assert_close(decoder.logits()[0, 0], gpt(prompt)[0, -1], atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.mul_(-1.5)


def test_a_search_that_does_not_fit_into_memory_is_refused() -> None:
    decoder = CachedDecoder(random_gpt(LAYOUTS["rewards"]))
    with pytest.raises(ValueError, match=r"2000000000000 candidates needs .* GiB .*: lower search.beam_width"):
        decoder.begin(torch.zeros(2, 2, dtype=torch.long), max_candidates=10**12, max_new=8)


def test_memory_that_torch_keeps_of_freed_tensors_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * GIB)
    device = torch.device("cuda", 0)
    check_free_memory(5 * GIB, 8, device)
    with pytest.raises(ValueError, match=r"8 candidates needs 6.0 GiB for keys and values, 5.0 GiB are free"):
        check_free_memory(6 * GIB, 8, device)


@pytest.mark.gpu
def test_bfloat16_changes_logits_on_a_gpu_by_rounding_alone() -> None:
    gpt = random_gpt(LAYOUTS["plain"]).cuda()
    prompt = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]).cuda()
    exact, rounded = CachedDecoder(gpt), CachedDecoder(gpt, bf16=True)
    for decoder in (exact, rounded):
        decoder.begin(prompt, max_candidates=3, max_new=12)
        decoder.select(torch.zeros(2, 3, dtype=torch.long).cuda())
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):  # the window slides
        found, expected = rounded.logits(), exact.logits()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
        tokens = torch.randint(5, (2, 3), generator=generator).cuda()
        rounded.append(tokens)
        exact.append(tokens)
