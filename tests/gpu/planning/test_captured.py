"""Searches captured as CUDA graphs give the plans of the searches themselves."""

import pytest
import torch

from tests.gpu.planning.test_fused_gpu import GPU, LAYOUTS, NUM_BINS, random_gpt
from trajectory_transformer.config import SearchConfig
from trajectory_transformer.gpu.planning.captured import CapturedSearch, Search
from trajectory_transformer.gpu.planning.fused import FusedDecoder
from trajectory_transformer.search.beam import Objective, Plan, beam_search, median_continuation
from trajectory_transformer.search.decoder import Bins, Candidates, NaiveDecoder
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return, q_guided

pytestmark = pytest.mark.gpu


def search_by(objective: Objective, decoder: FusedDecoder, bins: Bins) -> Search:
    """A small beam search by an objective."""

    def search(prompts: torch.Tensor, seeds: torch.Tensor, map_embedding: torch.Tensor | None) -> Plan:
        return beam_search(
            decoder,
            prompts,
            objective,
            bins=bins,
            config=SearchConfig(beam_width=16, horizon=4),
            noise=Noise(seeds),
            map_embedding=map_embedding,
        )

    return search


def assert_same_plans(captured: CapturedSearch, search: Search) -> None:
    """Capturing, and replaying what was captured, give the plans of the search."""
    prompts = torch.randint(NUM_BINS, (2, 27), generator=torch.Generator().manual_seed(1))
    seeds = torch.arange(2)
    for _ in range(2):
        found = captured(prompts, seeds)
        tokens, scores = found.tokens.clone(), found.scores.clone()
        expected = search(prompts.to(GPU), seeds.to(GPU), None)
        assert torch.equal(tokens, expected.tokens)
        assert torch.equal(scores, expected.scores)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_captured_search_equals_the_search(bf16: bool) -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    decoder = FusedDecoder(gpt, bf16=bf16)
    values = torch.randn(16, NUM_BINS, generator=torch.Generator().manual_seed(0)).to(GPU)

    search = search_by(discounted_return(0.99), decoder, Bins(gpt.layout, values))
    captured = CapturedSearch(search, GPU, refresh=decoder.refresh)
    generator = torch.Generator().manual_seed(1)
    for num_envs in (3, 1, 3, 4):
        prompts = torch.randint(NUM_BINS, (num_envs, 27), generator=generator)
        seeds = torch.randint(1000, (num_envs,), generator=generator)
        found = captured(prompts, seeds)
        tokens, scores = found.tokens.clone(), found.scores.clone()
        assert found.best.device.type == "cpu" and torch.equal(found.best, tokens[:, 0].cpu())
        # With as many environments as it rounds up to: sums of other sizes may be rounded differently.
        rows = {3: [0, 1, 2, 0]}.get(num_envs, list(range(num_envs)))
        expected = search(prompts[rows].to(GPU), seeds[rows].to(GPU), None)
        assert torch.equal(tokens, expected.tokens[:num_envs])
        assert torch.equal(scores, expected.scores[:num_envs])
        with torch.no_grad():  # weights may change between two plans
            for parameter in gpt.parameters():
                parameter.mul_(1.01)


def test_captured_medians_in_float32_equal_the_naive_ones() -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    prompts = torch.randint(NUM_BINS, (4, 27), generator=torch.Generator().manual_seed(0))
    naive, fused = NaiveDecoder(gpt), FusedDecoder(gpt, bf16=False)

    def search(prompts: torch.Tensor, seeds: torch.Tensor, map_embedding: torch.Tensor | None = None) -> Plan:
        del seeds
        return median_continuation(fused, prompts, num_tokens=19, min_tokens=3, map_embedding=map_embedding)

    captured = CapturedSearch(search, GPU, refresh=fused.refresh)
    for _ in range(2):
        found = captured(prompts, torch.zeros(4, dtype=torch.long))
        expected = median_continuation(naive, prompts.to(GPU), num_tokens=19, min_tokens=3)
        assert torch.equal(found.best, expected.best.cpu())
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-3, rtol=1e-4)


def test_objectives_of_a_captured_search_may_read_states_and_actions() -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    decoder = FusedDecoder(gpt, bf16=False)
    values = torch.randn(16, NUM_BINS, generator=torch.Generator().manual_seed(0)).to(GPU)

    def objective(candidates: Candidates) -> torch.Tensor:
        return candidates.states[..., 0].sum(dim=2) - candidates.actions.abs().sum(dim=(2, 3))

    search = search_by(objective, decoder, Bins(gpt.layout, values))
    captured = CapturedSearch(search, GPU, refresh=decoder.refresh)
    assert_same_plans(captured, search)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_captured_search_guided_by_q_equals_the_eager_one(bf16: bool) -> None:
    gpt = random_gpt(LAYOUTS["hopper"])
    layout, decoder = gpt.layout, FusedDecoder(gpt, bf16=bf16)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(16, NUM_BINS, generator=generator).to(GPU)
    inner = torch.randn(2, layout.observation_dim + layout.action_dim, 32, generator=generator).to(GPU)
    outer = torch.randn(2, 32, 1, generator=generator).to(GPU)

    def q(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([states, actions], dim=-1)
        hidden = torch.relu(inputs.flatten(0, 1).expand(2, -1, -1) @ inner)
        return (hidden @ outer)[..., 0].amin(dim=0).view(inputs.shape[:2])  # the smaller of two networks

    search = search_by(q_guided(q, 0.99, reward_shift=-1.0), decoder, Bins(layout, values))
    captured = CapturedSearch(search, GPU, refresh=decoder.refresh)
    assert_same_plans(captured, search)
    assert all(graph is not None for graph in captured._graphs.values()), "captured, not run eagerly"
