"""Pack weights, keys and values in the memory layout of the fused kernels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trajectory_transformer.gpu.planning.kernels import RANKS
from trajectory_transformer.model.gpt import GPT, Block

TILE = 16  # columns of keys and values stored together, as in common.cuh


class RoundedLinear(nn.Module):
    """A linear layer with weights rounded to a lower precision."""

    weight: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        """Round a copy of the current weights."""
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().to(dtype))
        self.register_buffer("bias", layer.bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class PackedWeights:
    """Packed copies of the weights: matrices in tensor core layout, biases and layer norms in float32."""

    def __init__(self, gpt: GPT, dtype: torch.dtype) -> None:
        """Pack the current weights."""
        self._gpt = gpt
        self._dtype = dtype
        self._bf16 = dtype == torch.bfloat16
        self._parameters = list(gpt.parameters())
        self._seen = self._versions()
        own = [block for block in gpt.blocks if isinstance(block, Block)]
        rounds = self._bf16 and gpt.position_embedding.device.type == "cuda"  # not every CPU supports bfloat16 matmuls
        self.blocks = [block.with_linear(lambda layer: RoundedLinear(layer, dtype)) for block in own] if rounds else own
        self.matrices, self.vectors, self.heads = self._pack()

    def refresh(self) -> None:
        """Repack in place if a weight has changed."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            self._pack_again()

    @torch.no_grad()
    def _pack_again(self) -> None:
        for old, new in zip((self.matrices, self.vectors, self.heads), self._pack(), strict=True):
            old.copy_(new)
        for block, changed in zip(self._gpt.blocks, self.blocks, strict=True):
            for name, layer in changed.named_children():
                if isinstance(layer, RoundedLinear):
                    source = block.get_submodule(name)
                    layer.weight.copy_(source.weight)  # type: ignore[arg-type]
                    layer.bias.copy_(source.bias)  # type: ignore[arg-type]

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
        padded = functional.pad(gpt.heads, (0, 0, 0, -vocabulary % 128))  # [D, padded vocabulary, width]
        heads = torch.stack([pack_strips(head) if self._bf16 else head.t().flatten() for head in padded])
        return [torch.cat(matrices).to(self._dtype), torch.cat(vectors).float(), heads.to(self._dtype)]

    def _matrices_of(self, block: Block) -> list[Tensor]:
        """Packed matrices of a block: transposed in float32, split between the blocks of a cluster in bfloat16."""
        if not self._bf16:
            return [layer.weight.t().flatten() for layer in (block.qkv, block.out, block.up, block.down)]
        parts = []
        for rank in range(RANKS):
            qkv = torch.cat([kind.chunk(RANKS)[rank] for kind in block.qkv.weight.chunk(3)])
            # The up projection stores its outputs in the order 0, 8, 1, 9, .. within every 16.
            down = block.down.weight.chunk(RANKS, dim=1)[rank]
            down = down.reshape(len(down), -1, 2, 8).mT.flatten(1)
            out, up = block.out.weight.chunk(RANKS, dim=1)[rank], block.up.weight.chunk(RANKS)[rank]
            # The two halves of the inputs of `down` are accumulated by different warps.
            parts += [pack_strips(matrix) for matrix in (qkv, out, up, *down.chunk(2, dim=1))]
        return parts


def _norm(norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, nn.LayerNorm)
    return norm.weight, norm.bias


def pack_strips(weight: Tensor) -> Tensor:
    """Reorder a matrix [out, in] to the order in which the lanes of a warp load it, 16 bytes at a time.

    Outputs are grouped in strips of 16 (g and g + 8), inputs in pieces of 32. Lane t holds inputs 8t .. 8t + 7 of a
    piece: the first four for the first matrix instruction (`e`), the others for the second.
    """
    num_out, num_in = weight.shape
    # strip, upper, g | piece, t, e, high, j
    parts = weight.reshape(num_out // 16, 2, 8, num_in // 32, 4, 2, 2, 2)
    # strip, piece, e, g, t (together the lane), high, upper, j
    return parts.permute(0, 3, 5, 2, 4, 6, 1, 7).flatten()


def pack_tiles(columns: Tensor, *, transposed: bool) -> Tensor:
    """Pack keys or values [layers, R, H, C, d] into tiles [layers, R, tiles, H, 16 * d].

    A tile of values is transposed. In bfloat16 (where d is 32) the elements of a tile are in the order in which the
    lanes of a warp load them, see `key_offset` and `value_offset` in attention.cuh.
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
        # column bits: two of g, upper, one of g | t, e, high, j -> e, g, t, high, upper, j
        ordered = split.reshape(*outer, 4, 2, 2, 4, 2, 2, 2).permute(0, 1, 2, 3, 8, 4, 6, 7, 9, 5, 10)
    return ordered.flatten(4).contiguous()  # kernels need contiguous memory, and flatten may return a view
