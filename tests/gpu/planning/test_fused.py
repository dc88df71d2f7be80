"""The fused decoder's kernels and book-keeping, run by the CPU, against full passes and the naive decoder."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.search.test_decoders import LAYOUTS, random_gpt, random_search, search_lengths

from trajectory_transformer.config import ModelConfig, SearchConfig
from trajectory_transformer.gpu.backends import make_decoder
from trajectory_transformer.gpu.planning.fused import FusedDecoder, sizes_of, why_not_fused
from trajectory_transformer.gpu.planning.kernels import HostKernels, Sizes, find_compiler
from trajectory_transformer.gpu.planning.packed import pack_strips, pack_tiles
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import Plan, beam_search, keep_best, likelihood_search, median_continuation
from trajectory_transformer.search.decoder import Candidates, Run
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.sampling import Noise, Sampler
from trajectory_transformer.tokens.layout import TokenLayout

MakeDecoder = Callable[..., FusedDecoder]


@pytest.fixture(scope="session")
def make_fused(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """Fused decoders in float32 whose kernels the CPU runs, compiled once for each size of model."""
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
            lambda gpt, window: make_fused(gpt, window),
            random_gpt(layout, seed=seed),
            window=window,
            prompt_length=prompt_length,
            num_tokens=num_tokens,
            rng=rng,
        )
        assert worst < 1e-5, f"prompt of {prompt_length}"


SEARCHES = {
    "default": SearchConfig(beam_width=5, expansion=2, horizon=4),
    "wide": SearchConfig(beam_width=12, expansion=3, horizon=3, action_top_k=3, action_nucleus=None),
    "noisy": SearchConfig(beam_width=4, horizon=5, observation_top_k=None, temperature=0.7, action_nucleus=0.9),
    "filtered": SearchConfig(beam_width=4, horizon=4, observation_top_k=4, observation_nucleus=0.6, action_top_k=2),
    "middle": SearchConfig(beam_width=4, horizon=4, observation_top_k=None, action_middle=0.5),
    "sampled": SearchConfig(beam_width=5, horizon=4, estimate="sampled"),
    "percentile": SearchConfig(beam_width=5, horizon=4, estimate="percentile", percentile=0.3),
}


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
        values = torch.randn(layout.size, 5, generator=generator)
        fused = make_fused(gpt, window)

        def plan(decoder: object, keep: object) -> Plan:
            return beam_search(
                decoder,  # type: ignore[arg-type]
                prompt,  # noqa: B023
                objective,
                layout=layout,
                values=values,  # noqa: B023
                config=config,
                noise=Noise(torch.arange(3)),
                keep=keep,  # type: ignore[arg-type]
            )

        naive = make_decoder("naive", gpt, window)
        expected, found = plan(naive, keep_best), plan(fused, fused.keep)
        assert torch.equal(found.tokens, expected.tokens), seed
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)
        for field in fields(Candidates):
            parts = (getattr(decoder.candidates, field.name) for decoder in (fused, naive))
            torch.testing.assert_close(*parts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("search", [partial(likelihood_search, beam_width=6), median_continuation])
@pytest.mark.parametrize("kind", ["plain", "goal-rewards"])
def test_searches_without_an_objective_find_what_the_naive_decoder_finds(
    make_fused: MakeDecoder, kind: str, search: Callable[..., Plan]
) -> None:
    layout = LAYOUTS[kind]
    gpt = random_gpt(layout)
    prompt = torch.randint(5, (2, layout.length(1) + 1), generator=torch.Generator().manual_seed(0))
    naive, fused = (
        search(decoder, prompt, num_tokens=14, min_tokens=2)
        for decoder in (make_decoder("naive", gpt), make_fused(gpt))
    )
    assert torch.equal(fused.tokens, naive.tokens)
    torch.testing.assert_close(fused.scores, naive.scores, atol=1e-4, rtol=1e-4)


def test_a_decoder_sees_weights_that_change_between_searches(make_fused: MakeDecoder) -> None:
    gpt = random_gpt(LAYOUTS["rewards"])
    decoder, prompt = make_fused(gpt), torch.tensor([[0, 1, 2, 3, 4]])
    for _ in range(2):
        decoder.begin(prompt, max_candidates=1, max_new=1)
        torch.testing.assert_close(decoder.logits()[0, 0], gpt(prompt)[0, -1], atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.mul_(-1.5)


def test_prompts_and_transitions_of_several_tiles_are_read(make_fused: MakeDecoder) -> None:
    layout = TokenLayout(0, 17, 5, rewards=True)  # 23 columns a transition, two tiles; the prompt has 63, four tiles
    gpt = random_gpt(layout)
    rng = np.random.default_rng(0)
    prompt = torch.from_numpy(rng.integers(5, size=(2, layout.length(2) + 17)))
    fused, naive = make_fused(gpt), make_decoder("naive", gpt)
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


# Of two layers, one's keys and values are asked for while the other is at work; a single one needs its own again.
@pytest.mark.parametrize(("bf16", "layers", "tolerance"), [(False, 1, 1e-5), (True, 1, 3e-2), (True, 2, 3e-2)])
def test_lanes_warps_and_clusters_compute_what_a_full_forward_pass_does(
    tmp_path: Path, bf16: bool, layers: int, tolerance: float
) -> None:
    # Every GPU thread is a fiber here, the matrix instructions and the exchange within clusters included.
    if find_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with")
    layout = LAYOUTS["goal-1-rewards"]
    gpt = GPT(layout, 40, ModelConfig(window=3, dropout=0.0, num_layers=layers)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    gpt.token_embedding.weight.normal_(generator=generator)
    gpt.position_embedding.normal_(std=0.3, generator=generator)
    kernels = HostKernels(sizes_of(gpt, bf16=bf16), tmp_path, "fibers")
    fused, naive = FusedDecoder(gpt, bf16=bf16, kernels=kernels), make_decoder("naive", gpt)
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
            # Copies are the same to the last bit, in whichever block they are worked on.
            assert torch.equal(found[0, [1, 2, 4, 8]], found[0, [2, 4, 8, 1]])
        tokens = torch.from_numpy(rng.integers(41, size=fused.tokens.shape[:2]))
        for decoder in (fused, naive):
            decoder.append(tokens)
    # Two runs of slots in one launch: each drawn token counts with the probability that the model gives it.
    filters = {2: Sampler(nucleus=0.9), 1: Sampler(middle=0.3)}
    runs = [Run(count, kind, Noise(torch.arange(2)).gumbel(9, count, 41)) for count, kind in filters.items()]
    fused.extend(*runs)
    expected = torch.zeros(2, 9)
    for token in fused.tokens[..., -3:].unbind(dim=-1):
        logits = naive.logits()
        expected += logits.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0]
        naive.append(token)
    if not bf16:
        drawn = Sampler(middle=0.3).draw(logits, Noise(torch.arange(2)).gumbel(9, 1, 41).slot(0))
        assert torch.equal(token, drawn)
    torch.testing.assert_close(fused.candidates.log_prob, expected, atol=3 * tolerance, rtol=0)
    for count in (20, 300, 700):  # sorted within a warp, by all threads, and by all with two numbers each
        scores, identity = (torch.from_numpy(rng.integers(count // 2, size=(2, count))) for _ in range(2))
        kept = fused.keep(scores.float(), identity, count // 2, distinct=True)
        assert torch.equal(kept, keep_best(scores.float(), identity, count // 2, distinct=True))


@pytest.mark.parametrize("distinct", [True, False])
def test_the_kernel_keeps_whom_the_search_keeps(make_fused: MakeDecoder, distinct: bool) -> None:
    decoder = make_fused(random_gpt(LAYOUTS["plain"]))
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 40))
        # Few values, so that ties and copies are common; copies need not score alike.
        scores = torch.from_numpy(rng.integers(6, size=(3, count)).astype(np.float32))
        identity = torch.from_numpy(rng.integers(12, size=(3, count)))
        width = int(rng.integers(1, count + 1))
        expected = keep_best(scores, identity, width, distinct=distinct)
        assert torch.equal(decoder.keep(scores, identity, width, distinct=distinct), expected)


def test_matrix_units_find_every_weight_once_and_in_its_place() -> None:
    weight = torch.arange(96 * 128.0).view(96, 128)
    packed = pack_strips(weight)
    assert packed.sort().values.equal(weight.flatten())
    # Strip 4, third piece of 32 inputs, second instruction, lane 14 (g 3, t 2): the first four of its eight numbers are
    # inputs 8t + 4, 8t + 5 of outputs g and g + 8, the others inputs 8t + 6, 8t + 7.
    place = (((4 * 4 + 2) * 2 + 1) * 32 + 14) * 8
    row, column = 4 * 16 + 3, 2 * 32 + 8 * 2 + 4
    expected = [weight[row + upper, column + high + j].item() for high in (0, 2) for upper in (0, 8) for j in (0, 1)]
    assert packed[place : place + 8].tolist() == expected


def test_a_tile_lies_as_the_matrix_units_read_it() -> None:
    # Numbers say which column and which of a head's 32 they are of; two tiles, the second from column 16 on.
    columns = torch.arange(32.0)[:, None].expand(32, 32).bfloat16()
    numbers = torch.arange(32.0).expand(32, 32).bfloat16()
    of_keys, of_values = (
        torch.stack([pack_tiles(x.view(1, 1, 1, 32, 32), transposed=transposed) for x in (columns, numbers)], dim=-1)
        for transposed in (False, True)
    )
    # Lane 14 (g 3, t 2), its second 16 bytes: keys of columns 5 and 7, numbers 20, 21 of both, then 22, 23.
    found = of_keys[0, 0, 1, 0, 256 + 14 * 8 :][:8].tolist()
    assert found == [[16 + column, number + j] for number in (20, 22) for column in (5, 7) for j in (0, 1)]
    # Values: numbers 16 + g and 24 + g of columns 4t and 4t + 1, then of 4t + 2 and 4t + 3.
    found = of_values[0, 0, 0, 0, 256 + 14 * 8 :][:8].tolist()
    assert found == [[column + j, number] for column in (8, 10) for number in (19, 27) for j in (0, 1)]


def test_the_reason_why_a_model_cannot_be_fused_is_given() -> None:
    layout = LAYOUTS["plain"]
    small = GPT(layout, 5, ModelConfig(window=3, width=64, num_heads=2, num_layers=1))
    reason = why_not_fused(small, 3, bf16=True) or ""
    assert "a width of 128, 4 heads and at most 127 bins, the model has 64, 2 and 5" in reason
    assert why_not_fused(small, 3, bf16=False) is None
    long = GPT(layout, 5, ModelConfig(window=70, width=128, num_heads=4, num_layers=1))
    assert "at most 60 transitions" in (why_not_fused(long, 70, bf16=True) or "")
    with pytest.raises(ValueError, match="search.decoder fused needs a GPU, the model is on the CPU"):
        make_decoder("fused", small)
