"""One layer of the transformer, and the ways in which its linear layers are applied."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trajectory_transformer.config import ModelConfig

Linear = Callable[[nn.Linear, Tensor], Tensor]
"""How a linear layer is applied: layer, x [..., in] -> [..., out]."""


def apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer itself."""
    result: Tensor = layer(x)
    return result


def settle_keys(bias: Tensor) -> Tensor:
    """The biases of queries, keys and values [3 * width], those of keys without a gradient.

    They add the same to all scores of a query, which softmax takes away again: their gradient is rounding, and Adam
    makes steps of it as large as any other. See docs/decisions/0009.
    """
    queries, keys, values = bias.chunk(3)
    return torch.cat([queries, keys.detach(), values])


class Projection(nn.Linear):
    """Queries, keys and values in one layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., 3 * width]."""
        return functional.linear(x, self.weight, settle_keys(self.bias))


class TransposedWeights:
    """Applies linear layers to few rows at a time, with weights laid out for it: on some CPUs twice as fast."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the weights of all linear layers as they are now."""
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._weights = {layer: layer.weight.detach().t().contiguous() for layer in layers}

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Apply a layer: x [..., in] -> [..., out]."""
        rows = torch.addmm(layer.bias, x.reshape(-1, layer.in_features), self._weights[layer])
        return rows.view(*x.shape[:-1], layer.out_features)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and around a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        """Build from sizes."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = Projection(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def project(self, x: Tensor, linear: Linear = apply_linear) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: [..., L, width] -> three of [..., H, L, d]."""
        flat = linear(self.qkv, self.norm1(x))
        heads = flat.view(*flat.shape[:-1], 3 * self.num_heads, x.shape[-1] // self.num_heads).transpose(-3, -2)
        query, key, value = heads.chunk(3, dim=-3)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor, linear: Linear = apply_linear) -> Tensor:
        """Everything after the attention: x [..., L, width], attended [..., H, L, d] -> [..., L, width]."""
        x = x + self._drop(linear(self.out, attended.transpose(-3, -2).flatten(-2)))
        return x + self._drop(linear(self.down, functional.gelu(linear(self.up, self.norm2(x)))))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """A whole sequence [B, L, width] -> the same."""
        query, key, value = self.project(x)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.finish(x, attended)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)
