"""The fused decoder with its kernels run by the CPU, against full passes and the naive decoder."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.search.lottery import LOTTERY, SAFE, first_choice, lottery_model
from tests.search.test_beam_return import check_decoded_candidates
from tests.search.test_decoder import LAYOUTS, random_gpt, random_search, search_lengths
from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig
from trajectory_transformer.gpu.planning.fused import FusedDecoder, sizes_of, why_not_fused
from trajectory_transformer.gpu.planning.kernels import HostKernels, Sizes, find_compiler
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search, likelihood_search, median_continuation
from trajectory_transformer.search.decoder import Bins, Candidates, NaiveDecoder, Run
from trajectory_transformer.search.noise import Noise
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.predict import sample_futures
from trajectory_transformer.search.sampling import draw
from trajectory_transformer.tokens.layout import TokenLayout

MakeDecoder = Callable[..., FusedDecoder]


@pytest.fixture(scope="session")
def make_fused(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """Fused decoders in float32 with kernels for the CPU, compiled once for each size of model."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with")
    compiled: dict[Sizes, HostKernels] = {}

    def make(gpt: GPT, window: int | None = None) -> FusedDecoder:
        sizes = sizes_of(gpt, bf16=False)
        if sizes not in compiled:
            compiled[sizes] = HostKernels(sizes, tmp_path_factory.mktemp("kernels"), "serial")
        return FusedDecoder(gpt, window, bf16=False, kernels=compiled[sizes])

    return make


@pytest.mark.parametrize("window", [1, 2, 3, None])
@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_logits_equal_a_full_forward_pass(make_fused: MakeDecoder, kind: str, window: int | None) -> None:
    layout = LAYOUTS[kind]
    shortest, longest, num_tokens = search_lengths(layout, window)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        prompt_length = (shortest, longest - 1, int(rng.integers(shortest, longest)))[seed]
        worst = random_search(
            make_fused,
            random_gpt(layout, seed=seed),
            window=window,
            prompt_length=prompt_length,
            num_tokens=num_tokens,
            rng=rng,
        )
        assert worst < 1e-5, f"prompt of {prompt_length}"


@pytest.mark.parametrize("at_once", [1, 40])
def test_prompts_may_be_read_in_parts(make_fused: MakeDecoder, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("trajectory_transformer.gpu.planning.prompt.TOKENS_AT_ONCE", at_once)
    layout = LAYOUTS["rewards-map"]
    _, longest, num_tokens = search_lengths(layout, 2)
    worst = random_search(
        make_fused,
        random_gpt(layout),
        window=2,
        prompt_length=longest - 1,
        num_tokens=num_tokens,
        rng=np.random.default_rng(0),
    )
    assert worst < 1e-5


COOL = Sampler(temperature=0.7)
SEARCHES = {
    "default": SearchConfig(beam_width=5, expansion=2, horizon=4),
    "wide": SearchConfig(beam_width=12, expansion=3, horizon=3, action=Sampler(top_k=3)),
    "noisy": SearchConfig(beam_width=4, horizon=5, observation=COOL, action=replace(COOL, nucleus=0.9)),
    "filtered": SearchConfig(
        beam_width=4, horizon=4, observation=Sampler(top_k=4, nucleus=0.6), action=Sampler(top_k=2, nucleus=0.4)
    ),
    "middle": SearchConfig(beam_width=4, horizon=4, observation=Sampler(), action=Sampler(middle=0.5)),
    # The middle replaces top_k and nucleus.
    "only-middle": SearchConfig(beam_width=4, horizon=4, action=Sampler(top_k=1, nucleus=0.1, middle=0.7)),
    "percentile": SearchConfig(beam_width=5, horizon=4),
    "first": SearchConfig(beam_width=6, horizon=3, action=Sampler(top_k=1), first_action=Sampler(nucleus=0.9)),
}


PERCENTILES = {"percentile": 0.3, "noisy": 0.8}  # of predicted rewards and values


@pytest.mark.parametrize("window", [2, None])
@pytest.mark.parametrize("kind", ["rewards", "goal", "goal-1-rewards"])
@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_searches_find_what_the_naive_decoder_finds(
    make_fused: MakeDecoder, search: str, kind: str, window: int | None
) -> None:
    layout, config = LAYOUTS[kind], SEARCHES[search]
    objective = discounted_return(0.9) if layout.rewards else log_likelihood
    for seed in range(4):
        gpt = random_gpt(layout, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(5, (3, layout.length(seed % 3) + layout.observation_dim), generator=generator)
        bins = Bins(layout, torch.randn(layout.size, 5, generator=generator))
        fused, naive = make_fused(gpt, window), NaiveDecoder(gpt, window)
        expected, found = (
            beam_search(
                decoder,
                prompt,
                objective,
                bins=bins,
                config=config,
                noise=Noise(torch.arange(3)),
                first_step=seed % 3 == 0,
                percentile=PERCENTILES.get(search),
            )
            for decoder in (naive, fused)
        )
        assert torch.equal(found.tokens, expected.tokens), seed
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)
        assert fused.candidates.bins is None and naive.candidates.bins is None
        for name in {field.name for field in fields(Candidates)} - {"bins"}:
            parts = (getattr(decoder.candidates, name) for decoder in (fused, naive))
            torch.testing.assert_close(*parts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "rewards", "goal-rewards"])
def test_objectives_see_states_and_actions_in_real_units(make_fused: MakeDecoder, kind: str) -> None:
    gpt = random_gpt(LAYOUTS[kind])
    counts = [check_decoded_candidates(make_fused(gpt), gpt, seed=seed) for seed in range(3)]
    assert all(sum(part) > 0 for part in zip(*counts, strict=True)), "some plans end, some do not"


@pytest.mark.parametrize("search", [partial(likelihood_search, beam_width=6), median_continuation])
@pytest.mark.parametrize("kind", ["plain", "goal-rewards"])
def test_searches_without_an_objective_find_what_the_naive_decoder_finds(
    make_fused: MakeDecoder, kind: str, search: Callable[..., Plan]
) -> None:
    layout = LAYOUTS[kind]
    gpt = random_gpt(layout)
    prompt = torch.randint(5, (2, layout.length(1) + 1), generator=torch.Generator().manual_seed(0))
    naive, fused = (
        search(decoder, prompt, num_tokens=14, min_tokens=2) for decoder in (NaiveDecoder(gpt), make_fused(gpt))
    )
    assert torch.equal(fused.tokens, naive.tokens)
    torch.testing.assert_close(fused.scores, naive.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("size", [(3, 2), (19, 4)])
def test_sampled_futures_are_those_of_the_naive_decoder_while_the_window_slides(
    make_fused: MakeDecoder, size: tuple[int, int], given: bool
) -> None:
    layout = TokenLayout(0, *size, rewards=False)  # the larger one has two tiles per transition
    gpt = random_gpt(layout)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(5, size=(2, layout.length(1) + layout.observation_dim)))
    actions = torch.from_numpy(rng.integers(5, size=(2, 7, layout.action_dim))) if given else None
    fused, naive = (
        sample_futures(
            decoder, prompt, horizon=7, num_samples=9, seeds=torch.tensor([3, 4]), actions=actions, temperature=0.9
        )
        for decoder in (make_fused(gpt, 3), NaiveDecoder(gpt, 3))
    )
    assert fused.shape == (2, 9, 7 * layout.size) and len(set(map(tuple, fused.flatten(0, 1).tolist()))) > 9
    assert torch.equal(fused, naive)


def test_a_decoder_uses_weights_that_change_between_searches(make_fused: MakeDecoder) -> None:
    gpt = random_gpt(LAYOUTS["rewards"])
    decoder, prompt = make_fused(gpt), torch.tensor([[0, 1, 2, 3, 4]])
    for _ in range(2):
        decoder.begin(prompt, max_candidates=1, max_new=1)
        torch.testing.assert_close(decoder.logits()[0, 0], gpt(prompt)[0, -1], atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.mul_(-1.5)


def test_prompts_and_transitions_may_fill_several_tiles(make_fused: MakeDecoder) -> None:
    layout = TokenLayout(0, 17, 5, rewards=True)  # 23 columns per transition, two tiles; the prompt has 63, four tiles
    gpt = random_gpt(layout)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(5, size=(2, layout.length(2) + 17)))
    fused, naive = make_fused(gpt), NaiveDecoder(gpt)
    for decoder in (fused, naive):
        decoder.begin(prompt, max_candidates=5, max_new=layout.size)
    for step in range(layout.size - 1):
        if step % 4 == 0:
            parents = torch.from_numpy(rng.integers(fused.tokens.shape[1], size=(2, 5)))
            for decoder in (fused, naive):
                decoder.select(parents)
        torch.testing.assert_close(fused.logits(), naive.logits(), atol=1e-5, rtol=0)
        tokens = torch.from_numpy(rng.integers(5, size=(2, 5)))
        for decoder in (fused, naive):
            decoder.append(tokens)


# With two layers, the keys and values of one are prefetched while the other is computed; a single layer prefetches its
# own.
@pytest.mark.parametrize(("bf16", "layers", "tolerance"), [(False, 1, 1e-5), (True, 1, 3e-2), (True, 2, 3e-2)])
def test_lanes_warps_and_clusters_compute_a_full_forward_pass(
    tmp_path: Path, bf16: bool, layers: int, tolerance: float
) -> None:
    # Every GPU thread is a fiber here, including matrix instructions and the exchange within clusters.
    if find_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with")
    layout = LAYOUTS["goal-1-rewards"]
    gpt = GPT(layout, 40, ModelConfig(window=3, dropout=0.0, num_layers=layers)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    gpt.token_embedding.weight.normal_(generator=generator)
    gpt.position_embedding.normal_(std=0.3, generator=generator)
    kernels = HostKernels(sizes_of(gpt, bf16=bf16), tmp_path, "fibers")
    fused, naive = FusedDecoder(gpt, bf16=bf16, kernels=kernels), NaiveDecoder(gpt)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(41, size=(2, layout.length(1) + 2)))
    for decoder in (fused, naive):
        decoder.begin(prompt, max_candidates=9, max_new=6)
    for parents in ([[0] * 3, [0] * 3], [[0, 2, 2, 1, 2, 1, 0, 0, 2], [1, 1, 0, 2, 0, 1, 2, 1, 0]], None):
        for decoder in (fused, naive):
            if parents is not None:
                decoder.select(torch.tensor(parents))
        found = fused.logits()
        torch.testing.assert_close(found, naive.logits(), atol=tolerance, rtol=0)
        if parents is not None and len(parents[0]) == 9 and not bf16:
            # Copies are equal bit for bit, whichever thread block computes them.
            assert torch.equal(found[0, [1, 2, 4, 8]], found[0, [2, 4, 8, 1]])
        tokens = torch.from_numpy(rng.integers(41, size=fused.tokens.shape[:2]))
        for decoder in (fused, naive):
            decoder.append(tokens)
    # Two runs of slots in one launch: each sampled token adds its log-probability.
    filters = {2: Sampler(nucleus=0.9), 1: Sampler(middle=0.3)}
    runs = [Run(count, kind, Noise(torch.arange(2)).gumbel(9, count, 41)) for count, kind in filters.items()]
    fused.extend(*runs)
    expected = torch.zeros(2, 9)
    for token in fused.tokens[..., -3:].unbind(dim=-1):
        logits = naive.logits()
        expected += logits.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0]
        naive.append(token)
    if not bf16:
        drawn = draw(Sampler(middle=0.3), logits, Noise(torch.arange(2)).gumbel(9, 1, 41).slot(0))
        assert torch.equal(token, drawn)
    torch.testing.assert_close(fused.candidates.log_prob, expected, atol=3 * tolerance, rtol=0)
    for count in (20, 300, 700):  # sorted within a warp, by all threads, and by all threads with two numbers each
        scores, identity = (torch.from_numpy(rng.integers(count // 2, size=(2, count))) for _ in range(2))
        found, wanted = (keep(decoder, scores.float(), identity, count // 2) for decoder in (fused, naive))
        assert torch.equal(found, wanted)


def test_the_most_likely_rewards_do_not_mislead_the_search(make_fused: MakeDecoder) -> None:
    decoder = make_fused(lottery_model().gpt)
    action, score = first_choice(decoder, SearchConfig().reward)
    assert action == SAFE and score == pytest.approx(11.0, abs=0.3)
    assert first_choice(decoder, Sampler())[0] == LOTTERY


def keep(
    decoder: FusedDecoder | NaiveDecoder, scores: Tensor, identity: Tensor, width: int, *, distinct: bool = True
) -> Tensor:
    """What a decoder keeps of candidates with these scores and identities [E, K]."""
    decoder.candidates = replace(decoder.candidates, identity=identity)
    if isinstance(decoder, FusedDecoder):
        decoder._store = replace(decoder._store, identity=identity)
    return decoder.keep(scores, width, distinct=distinct)


@pytest.mark.parametrize("distinct", [True, False])
def test_the_kernel_keeps_the_candidates_that_the_naive_decoder_keeps(make_fused: MakeDecoder, distinct: bool) -> None:
    gpt = random_gpt(LAYOUTS["plain"])
    fused, naive = make_fused(gpt), NaiveDecoder(gpt)
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 40))
        # Few values, so that ties and copies are common; copies may have different scores.
        scores = torch.from_numpy(rng.integers(6, size=(3, count)).astype(np.float32))
        identity = torch.from_numpy(rng.integers(12, size=(3, count)))
        width = int(rng.integers(1, count + 1))
        found, expected = (keep(each, scores, identity, width, distinct=distinct) for each in (fused, naive))
        assert torch.equal(found, expected)


def test_models_that_cannot_be_fused_are_refused_with_a_reason() -> None:
    layout = LAYOUTS["plain"]
    small = GPT(layout, 5, ModelConfig(window=3, width=64, num_heads=2, num_layers=1))
    reason = why_not_fused(small, 3, bf16=True) or ""
    assert "a width of 128, 4 heads and at most 127 bins, the model has 64, 2 and 5" in reason
    assert why_not_fused(small, 3, bf16=False) is None
    long = GPT(layout, 5, ModelConfig(window=70, width=128, num_heads=4, num_layers=1))
    assert "at most 60 transitions" in (why_not_fused(long, 70, bf16=True) or "")
    with pytest.raises(ValueError, match="the fused decoder cannot be used: in bfloat16 it needs a width of 128"):
        FusedDecoder(small)


def test_too_many_candidates_are_refused(make_fused: MakeDecoder) -> None:
    decoder = make_fused(random_gpt(LAYOUTS["plain"]))
    with pytest.raises(ValueError, match="at most 4096 candidates .*, got 4097: use search.backend cached"):
        decoder.begin(torch.zeros(1, 2, dtype=torch.long), max_candidates=4097, max_new=1)
