"""Weights, keys and values in the memory order of the fused kernels."""

import pytest
import torch

from tests.search.test_cached import causal
from tests.search.test_decoder import LAYOUTS, random_gpt
from trajectory_transformer.config import ModelConfig
from trajectory_transformer.gpu.planning.packed import (
    PackedWeights,
    RoundedLinear,
    pack_strips,
    pack_tiles,
)
from trajectory_transformer.model.gpt import Block


@pytest.mark.filterwarnings("ignore::UserWarning")  # CPUs without bfloat16 instructions
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_a_block_with_rounded_weights_equals_the_plain_block(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    block = Block(ModelConfig(num_heads=2, width=16, dropout=0.0)).eval()
    for parameter in block.parameters():
        parameter.normal_(std=0.2, generator=generator)
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled):  # torch may disable it for bfloat16
        rounded = block.with_linear(lambda layer: RoundedLinear(layer, dtype))
        assert sum(isinstance(module, RoundedLinear) for module in rounded.children()) == 4
        assert not any(isinstance(module, RoundedLinear) for module in block.children()), "the original is unchanged"
        for module in rounded.children():
            if isinstance(module, RoundedLinear):
                assert module.weight.dtype == module.bias.dtype == dtype
        x = torch.randn(3, 7, 16, generator=generator)
        torch.testing.assert_close(rounded(x, causal).float(), block(x, causal), rtol=0, atol=tolerance)


@torch.no_grad()
def test_packed_weights_are_refreshed_in_place_when_a_weight_changes() -> None:
    gpt = random_gpt(LAYOUTS["rewards"])
    packed = PackedWeights(gpt, torch.float32)
    parts = (packed.matrices, packed.vectors, packed.heads)
    places, before = [part.data_ptr() for part in parts], [part.clone() for part in parts]
    packed.refresh()
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    for parameter in gpt.parameters():
        parameter.mul_(2.0)
    packed.refresh()
    for part, old in zip((packed.matrices, packed.vectors, packed.heads), before, strict=True):
        assert torch.equal(part, 2.0 * old)
    assert [part.data_ptr() for part in (packed.matrices, packed.vectors, packed.heads)] == places


def test_packed_strips_hold_every_weight_in_the_place_where_a_lane_reads_it() -> None:
    weight = torch.arange(96 * 128.0).view(96, 128)
    packed = pack_strips(weight)
    assert packed.sort().values.equal(weight.flatten())
    # Strip 4, third piece of 32 inputs, second instruction, lane 14 (g 3, t 2): the first four of its eight numbers are
    # inputs 8t + 4, 8t + 5 of outputs g and g + 8, the others inputs 8t + 6, 8t + 7.
    place = (((4 * 4 + 2) * 2 + 1) * 32 + 14) * 8
    row, column = 4 * 16 + 3, 2 * 32 + 8 * 2 + 4
    expected = [weight[row + upper, column + high + j].item() for high in (0, 2) for upper in (0, 8) for j in (0, 1)]
    assert packed[place : place + 8].tolist() == expected


def test_packed_tiles_have_the_order_in_which_lanes_read_them() -> None:
    # Each number is its column, or its index among the 32 of a head; two tiles, the second from column 16 on.
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
