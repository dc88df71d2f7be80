"""A model's weights, and keys and values, in the order in which the fused kernels read them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trajectory_transformer.gpu.planning.kernels import RANKS
from trajectory_transformer.model.block import Block, apply_linear
from trajectory_transformer.model.gpt import GPT

TILE = 16  # columns of keys and values that are kept together, as in common.cuh


class PackedWeights:
    """Copies of the weights: matrices for the matrix units, biases and norms in float32."""

    def __init__(self, gpt: GPT, dtype: torch.dtype) -> None:
        """Pack the weights as they are now."""
        self._gpt = gpt
        self._dtype = dtype
        self._fast = dtype == torch.bfloat16
        self._parameters = list(gpt.parameters())
        on_gpu = gpt.position_embedding.device.type == "cuda"  # not every CPU can multiply in bfloat16
        linear = [module for module in gpt.modules() if isinstance(module, nn.Linear)]
        self._layers = linear if self._fast and on_gpu else []
        self._seen = self._versions()
        self.matrices, self.vectors, self.heads, *rounded = self._pack()
        self._rounded = dict(zip(self._layers, zip(rounded[::2], rounded[1::2], strict=True), strict=True))

    def refresh(self) -> None:
        """Pack again where a weight has changed, into the same memory."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            rounded = (part for layer in self._layers for part in self._rounded[layer])
            for old, new in zip((self.matrices, self.vectors, self.heads, *rounded), self._pack(), strict=True):
                old.copy_(new)

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Apply a layer of the model to many rows at once, in the packed precision: x [..., in] -> [..., out]."""
        if layer not in self._rounded:
            return apply_linear(layer, x)
        return functional.linear(x.to(self._dtype), *self._rounded[layer])

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    @torch.no_grad()
    def _pack(self) -> list[Tensor]:
        gpt = self._gpt
        matrices, vectors = [], []
        for block in gpt.blocks:
            assert isinstance(block, Block)
            matrices += self._matrices_of(block)
            vectors += [*_norm(block.norm1), block.qkv.bias, block.out.bias]
            vectors += [*_norm(block.norm2), block.up.bias, block.down.bias]
        vectors += _norm(gpt.norm)
        vocabulary = gpt.heads.shape[1]
        padded = functional.pad(gpt.heads, (0, 0, 0, -vocabulary % 128))  # [D, room, width]
        heads = torch.stack([pack_strips(head) if self._fast else head.t().flatten() for head in padded])
        packed = [torch.cat(matrices).to(self._dtype), torch.cat(vectors).float(), heads.to(self._dtype)]
        return packed + [part.to(self._dtype) for layer in self._layers for part in (layer.weight, layer.bias)]

    def _matrices_of(self, block: Block) -> list[Tensor]:
        """The matrices of a block: transposed, or rank by rank what each of the blocks that work together needs."""
        if not self._fast:
            return [layer.weight.t().flatten() for layer in (block.qkv, block.out, block.up, block.down)]
        parts = []
        for rank in range(RANKS):
            qkv = torch.cat([kind.chunk(RANKS)[rank] for kind in block.qkv.weight.chunk(3)])
            # The layer before leaves outputs 0, 8, 1, 9 .. of every 16 side by side.
            down = block.down.weight.chunk(RANKS, dim=1)[rank]
            down = down.reshape(len(down), -1, 2, 8).mT.flatten(1)
            out, up = block.out.weight.chunk(RANKS, dim=1)[rank], block.up.weight.chunk(RANKS)[rank]
            # Two halves of the inputs of `down` are summed apart.
            parts += [pack_strips(matrix) for matrix in (qkv, out, up, *down.chunk(2, dim=1))]
        return parts


def _norm(norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, nn.LayerNorm)
    return norm.weight, norm.bias


def pack_strips(weight: Tensor) -> Tensor:
    """Order the numbers of a matrix [out, in] as the lanes of a warp read them, 16 bytes at a time.

    Outputs go in strips of 16 (g and g + 8), inputs in pieces of 32. Of these, lane t has 8t .. 8t + 7: the first four
    for the first matrix instruction (`e`), the others for the second.
    """
    num_out, num_in = weight.shape
    # strip, upper, g | piece, t, e, high, j
    parts = weight.reshape(num_out // 16, 2, 8, num_in // 32, 4, 2, 2, 2)
    # strip, piece, e, g, t (together the lane), high, upper, j
    return parts.permute(0, 3, 5, 2, 4, 6, 1, 7).flatten()


def pack_tiles(columns: Tensor, *, transposed: bool) -> Tensor:
    """Keys or values [layers, R, H, C, d] in tiles [layers, R, tiles, H, 16 * d].

    A tile of values is transposed. In bfloat16 (d is 32 there) the numbers of a tile are in the order in which a warp's
    lanes read them, as in `key_place` and `value_place` of attention.cuh.
    """
    layers, rows, heads, count, head_dim = columns.shape
    split = columns.view(layers, rows, heads, count // TILE, TILE, head_dim).transpose(2, 3)
    outer = split.shape[:4]
    if columns.dtype != torch.bfloat16:
        ordered = split.mT if transposed else split
    elif transposed:
        # t, high, j | strip, upper, g -> strip, g, t, high, upper, j
        ordered = split.reshape(*outer, 4, 2, 2, 2, 2, 8).permute(0, 1, 2, 3, 7, 9, 4, 5, 8, 6)
    else:
        # two of the three bits of g and upper between them | t, e, high, j -> e, g, t, high, upper, j
        ordered = split.reshape(*outer, 4, 2, 2, 4, 2, 2, 2).permute(0, 1, 2, 3, 8, 4, 6, 7, 9, 5, 10)
    return ordered.flatten(4).contiguous()  # a kernel reads it, and flattening may leave it where it was
