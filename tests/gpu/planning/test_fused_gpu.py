"""The fused decoder on a GPU, against the naive decoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig
from trajectory_transformer.gpu.planning.fused import FusedDecoder
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search, likelihood_search
from trajectory_transformer.search.decoder import Bins, NaiveDecoder
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.sampling import Noise
from trajectory_transformer.tokens.layout import TokenLayout

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NUM_BINS = 60
LAYOUTS = {
    "hopper": TokenLayout(0, 11, 3, rewards=True),
    "ant": TokenLayout(0, 27, 8, rewards=True),
    "goal": TokenLayout(2, 3, 1, rewards=False),
    "small": TokenLayout(1, 2, 1, rewards=True),
}


def random_gpt(layout: TokenLayout, *, window: int = 8, width: int = 128, num_heads: int = 4) -> GPT:
    """The sizes of the paper with large random embeddings."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # the other weights
    gpt = GPT(layout, NUM_BINS, ModelConfig(window=window, dropout=0.0, width=width, num_heads=num_heads))
    with torch.no_grad():
        gpt.token_embedding.weight.normal_(generator=generator)
        gpt.position_embedding.normal_(std=0.3, generator=generator)
    return gpt.eval().requires_grad_(False).to(GPU)


@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 3e-2)])
def test_logits_equal_a_full_forward_pass(kind: str, window: int | None, bf16: bool, tolerance: float) -> None:
    layout = LAYOUTS[kind]
    gpt = random_gpt(layout)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(NUM_BINS + 1, size=(2, layout.length(2) + layout.observation_dim))).to(GPU)
    fused, naive = FusedDecoder(gpt, window, bf16=bf16), NaiveDecoder(gpt, window)
    for decoder in (fused, naive):
        decoder.begin(prompt, max_candidates=24, max_new=layout.size * 4)
    for step in range(layout.size * 4 - 1):
        if step % 3 == 0:
            shape = (2, int(rng.integers(1, 25)))
            parents = torch.from_numpy(rng.integers(fused.tokens.shape[1], size=shape)).to(GPU)
            for decoder in (fused, naive):
                decoder.select(parents)
        torch.testing.assert_close(fused.logits(), naive.logits(), atol=tolerance, rtol=0)
        tokens = torch.from_numpy(rng.integers(NUM_BINS + 1, size=fused.tokens.shape[:2])).to(GPU)
        for decoder in (fused, naive):
            decoder.append(tokens)


def plan(decoder: FusedDecoder | NaiveDecoder, config: SearchConfig, *, seed: int, num_envs: int) -> Plan:
    """A search from random prompts."""
    layout = decoder.gpt.layout
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(NUM_BINS, (num_envs, layout.length(2) + layout.observation_dim), generator=generator)
    values = torch.randn(layout.size, NUM_BINS, generator=generator)
    return beam_search(
        decoder,
        prompt.to(GPU),
        discounted_return(0.99) if layout.rewards else log_likelihood,
        bins=Bins(layout, values.to(GPU)),
        config=config,
        noise=Noise(torch.arange(num_envs, device=GPU) + 100 * seed),
    )


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("kind", ["hopper", "goal", "small"])
def test_plans_in_float32_equal_those_of_the_naive_decoder(kind: str, window: int | None) -> None:
    # 6 settings of 168 prompts: 1,008.
    gpt = random_gpt(LAYOUTS[kind])
    fused, naive = FusedDecoder(gpt, window, bf16=False), NaiveDecoder(gpt, window)
    for seed in range(6):
        observation = Sampler(top_k=None if seed % 2 else 1)
        config = SearchConfig(beam_width=6, horizon=4, observation=observation, action=Sampler(nucleus=0.8))
        if seed % 3 == 2:
            config = replace(config, action=Sampler(nucleus=0.8, middle=0.5))
        expected, found = (plan(decoder, config, seed=seed, num_envs=28) for decoder in (naive, fused))
        assert torch.equal(found.tokens, expected.tokens), seed
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-3, rtol=1e-4)


def test_likelihood_search_in_float32_equals_the_naive_one() -> None:
    gpt = random_gpt(LAYOUTS["small"])
    prompt = torch.randint(NUM_BINS, (3, 8), generator=torch.Generator().manual_seed(0)).to(GPU)
    plans = [
        likelihood_search(decoder, prompt, num_tokens=12, beam_width=5)
        for decoder in (NaiveDecoder(gpt), FusedDecoder(gpt, bf16=False))
    ]
    assert torch.equal(plans[0].tokens, plans[1].tokens)
