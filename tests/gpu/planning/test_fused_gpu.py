"""The fused decoder where it belongs: on a GPU, against the naive decoder and the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trajectory_transformer.config import ModelConfig, SearchConfig
from trajectory_transformer.gpu.backends import make_decoder
from trajectory_transformer.gpu.planning.captured import CapturedSearch
from trajectory_transformer.gpu.planning.fused import FusedDecoder
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search, likelihood_search, median_continuation
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.naive import NaiveDecoder
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
    """The paper's sizes with weights large enough to matter."""
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


def plan(
    decoder: FusedDecoder | NaiveDecoder | CachedDecoder, config: SearchConfig, *, seed: int, num_envs: int
) -> Plan:
    """A search from random prompts."""
    layout = decoder.gpt.layout
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(NUM_BINS, (num_envs, layout.length(2) + layout.observation_dim), generator=generator)
    values = torch.randn(layout.size, NUM_BINS, generator=generator)
    return beam_search(
        decoder,
        prompt.to(GPU),
        discounted_return(0.99) if layout.rewards else log_likelihood,
        layout=layout,
        values=values.to(GPU),
        config=config,
        noise=Noise(torch.arange(num_envs, device=GPU) + 100 * seed),
        keep=decoder.keep if isinstance(decoder, FusedDecoder) else None,
    )


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("kind", ["hopper", "goal", "small"])
def test_plans_in_float32_equal_those_of_the_naive_decoder(kind: str, window: int | None) -> None:
    # 6 settings of 168 prompts: 1,008.
    gpt = random_gpt(LAYOUTS[kind])
    fused, naive = FusedDecoder(gpt, window, bf16=False), NaiveDecoder(gpt, window)
    for seed in range(6):
        config = SearchConfig(beam_width=6, horizon=4, observation_top_k=None if seed % 2 else 1, action_nucleus=0.8)
        if seed % 3 == 2:
            config = replace(config, action_middle=0.5)
        expected, found = (plan(decoder, config, seed=seed, num_envs=28) for decoder in (naive, fused))
        assert torch.equal(found.tokens, expected.tokens), seed
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_captured_search_is_the_search(bf16: bool) -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    decoder = FusedDecoder(gpt, bf16=bf16)
    values = torch.randn(16, NUM_BINS, generator=torch.Generator().manual_seed(0)).to(GPU)

    def search(prompts: torch.Tensor, seeds: torch.Tensor, map_embedding: torch.Tensor | None = None) -> Plan:
        return beam_search(
            decoder,
            prompts,
            discounted_return(0.99),
            layout=gpt.layout,
            values=values,
            config=SearchConfig(beam_width=16, horizon=4),
            noise=Noise(seeds),
            keep=decoder.keep,
            map_embedding=map_embedding,
        )

    captured = CapturedSearch(search, GPU, refresh=decoder.refresh)
    generator = torch.Generator().manual_seed(1)
    for num_envs in (3, 1, 3, 4):
        prompts = torch.randint(NUM_BINS, (num_envs, 27), generator=generator)
        seeds = torch.randint(1000, (num_envs,), generator=generator)
        found = captured(prompts.numpy(), seeds.numpy())
        tokens, scores = found.tokens.clone(), found.scores.clone()
        assert np.array_equal(captured.winners(), tokens[:, 0].cpu().numpy())
        # With as many environments as it rounds up to: sums of other sizes may be rounded otherwise.
        rows = {3: [0, 1, 2, 0]}.get(num_envs, list(range(num_envs)))
        expected = search(prompts[rows].to(GPU), seeds[rows].to(GPU))
        assert torch.equal(tokens, expected.tokens[:num_envs])
        assert torch.equal(scores, expected.scores[:num_envs])
        with torch.no_grad():  # training between two plans is seen
            for parameter in gpt.parameters():
                parameter.mul_(1.01)


def test_likelihood_search_in_float32_equals_the_naive_one() -> None:
    gpt = random_gpt(LAYOUTS["small"])
    prompt = torch.randint(NUM_BINS, (3, 8), generator=torch.Generator().manual_seed(0)).to(GPU)
    plans = [
        likelihood_search(decoder, prompt, num_tokens=12, beam_width=5)
        for decoder in (NaiveDecoder(gpt), FusedDecoder(gpt, bf16=False))
    ]
    assert torch.equal(plans[0].tokens, plans[1].tokens)


def test_captured_medians_in_float32_equal_the_naive_ones() -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    prompts = torch.randint(NUM_BINS, (4, 27), generator=torch.Generator().manual_seed(0))
    naive, fused = NaiveDecoder(gpt), FusedDecoder(gpt, bf16=False)

    def search(prompts: torch.Tensor, seeds: torch.Tensor, map_embedding: torch.Tensor | None = None) -> Plan:
        del seeds
        return median_continuation(fused, prompts, num_tokens=19, min_tokens=3, map_embedding=map_embedding)

    captured = CapturedSearch(search, GPU, refresh=fused.refresh)
    for _ in range(2):
        found = captured(prompts.numpy(), np.zeros(4, np.int64))
        expected = median_continuation(naive, prompts.to(GPU), num_tokens=19, min_tokens=3)
        assert np.array_equal(captured.winners(), expected.best.cpu().numpy())
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-3, rtol=1e-4)


def test_the_decoder_is_chosen_by_what_the_gpu_can_do(caplog: pytest.LogCaptureFixture) -> None:
    paper = make_decoder("auto", random_gpt(LAYOUTS["small"]))
    assert isinstance(paper, FusedDecoder)
    assert paper.dtype == torch.bfloat16
    other = make_decoder("auto", random_gpt(LAYOUTS["small"], width=64, num_heads=2))
    assert isinstance(other, FusedDecoder)
    assert other.dtype == torch.float32
    assert not caplog.messages
    long = random_gpt(LAYOUTS["small"], window=70)
    assert isinstance(make_decoder("auto", long), CachedDecoder)
    assert "at most 60 transitions" in caplog.messages[0]
    with pytest.raises(ValueError, match="search.decoder fused cannot be used here: .* at most 60 transitions"):
        make_decoder("fused", long)
