"""One pass over a tree of tokens, against a full forward pass for every leaf."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.search.test_decoder import LAYOUTS, NUM_BINS, random_gpt
from trajectory_transformer.model.gpt import GPT, Block
from trajectory_transformer.search.cache import KVCache
from trajectory_transformer.search.cached import TransposedLinear
from trajectory_transformer.search.tree import Level, read_tree

ENVS = 2


def random_tree(ends: list[int], widths: list[int], generator: torch.Generator) -> tuple[list[Level], Tensor]:
    """Random levels that end at `ends` after the prompt, and the tokens of every leaf [E, U, n]."""
    levels: list[Level] = []
    paths = torch.empty(ENVS, 1, 0, dtype=torch.long)
    for (start, end), width in zip(pairwise([0, *ends]), widths, strict=True):
        parents = torch.randint(paths.shape[1], (ENVS, width), generator=generator)
        tokens = torch.randint(NUM_BINS + 1, (ENVS, width, end - start), generator=generator)
        levels.append(Level(tokens, parents))
        above = paths.gather(1, parents[..., None].expand(-1, -1, paths.shape[2]))
        paths = torch.cat([above, tokens], dim=2)
    return levels, paths


def leaf_logits(gpt: GPT, prompt: Tensor, paths: Tensor, maps: Tensor | None) -> Tensor:
    """Logits after every leaf, each by a pass of its own [E, U, V + 1]."""
    rows = torch.cat([prompt[:, None].expand(-1, paths.shape[1], -1), paths], dim=2).flatten(0, 1)
    embedding = None if maps is None else maps.repeat_interleave(paths.shape[1], dim=0)
    last: Tensor = gpt(rows, embedding)[:, -1]
    return last.view(ENVS, paths.shape[1], -1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_logits_after_a_tree_equal_full_forward_passes(kind: str, transposed: bool) -> None:
    layout = LAYOUTS[kind]
    gpt = random_gpt(layout).double()
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(ENVS, gpt.config.width, generator=generator, dtype=torch.float64) if layout.map_shape else None
    own = [block for block in gpt.blocks if isinstance(block, Block)]
    blocks = [block.with_linear(TransposedLinear) for block in own] if transposed else own
    sizes = gpt.position_embedding[0].view(gpt.config.num_heads, -1)
    for length in (layout.goal_dim + 1, layout.length(1), layout.length(1) + 1):
        prompt = torch.randint(NUM_BINS + 1, (ENVS, length), generator=generator)
        room = gpt.max_tokens - length
        for ends, widths in (([], []), ([1], [3]), ([room], [2]), ([1, 2, room], [2, 4, 3]), ([room - 1], [5])):
            levels, paths = random_tree(ends, widths, generator)
            cache = KVCache(sizes, layers=len(blocks), num_envs=ENVS, max_candidates=5, max_own=gpt.max_tokens)
            found = read_tree(gpt, blocks, prompt, levels, cache, maps)
            torch.testing.assert_close(found, leaf_logits(gpt, prompt, paths, maps), rtol=0, atol=1e-12)
            assert cache.num_candidates == paths.shape[1]


def test_value_tokens_are_not_stored() -> None:
    layout = LAYOUTS["rewards"]
    gpt = random_gpt(layout)
    blocks = [block for block in gpt.blocks if isinstance(block, Block)]
    sizes = gpt.position_embedding[0].view(gpt.config.num_heads, -1)
    cache = KVCache(sizes, layers=len(blocks), num_envs=1, max_candidates=1, max_own=gpt.max_tokens)
    prompt = torch.zeros(1, layout.length(2) + 1, dtype=torch.long)
    read_tree(gpt, blocks, prompt, [], cache)
    assert cache.shared.shape[4] == 2 * (layout.size - 1) + 1
