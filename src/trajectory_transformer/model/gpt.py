"""The GPT of the paper: token and position embeddings, transformer blocks, one output head per slot."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trajectory_transformer.config import ModelConfig
from trajectory_transformer.model.map_encoder import MapEncoder
from trajectory_transformer.tokens.layout import TokenLayout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one block: query, key, value [..., H, L, d] -> [..., H, L, d]."""


def detach_key_bias(bias: Tensor) -> Tensor:
    """Biases of queries, keys and values [3 * width], with the key biases detached.

    A key bias adds the same number to all scores of a query, and softmax removes it again. Its gradient is rounding
    error, which Adam would turn into full-sized steps (docs/decisions/0009).
    """
    queries, keys, values = bias.chunk(3)
    return torch.cat([queries, keys.detach(), values])


class QKVLinear(nn.Linear):
    """Queries, keys and values in one linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., 3 * width]."""
        return functional.linear(x, self.weight, detach_key_bias(self.bias))


class Block(nn.Module):
    """Attention and an MLP, each with a layer norm in front and a residual connection around it."""

    def __init__(self, config: ModelConfig) -> None:
        """Build from sizes."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = QKVLinear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[..., L, width] -> the same shape."""
        return self.finish(x, attend(*self.project(x)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: [..., L, width] -> three of [..., H, L, d]."""
        flat = self.qkv(self.norm1(x))
        heads = flat.view(*flat.shape[:-1], 3 * self.num_heads, x.shape[-1] // self.num_heads).transpose(-3, -2)
        query, key, value = heads.chunk(3, dim=-3)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention: x [..., L, width], attended [..., H, L, d] -> [..., L, width]."""
        x = x + self._drop(self.out(attended.transpose(-3, -2).flatten(-2)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm2(x)))))

    def with_linear(self, replace: Callable[[nn.Linear], nn.Module]) -> "Block":
        """The same block with its linear layers replaced, for example by ones with another weight layout."""
        changed = copy.copy(self)
        changed._modules = {
            name: replace(module) if isinstance(module, nn.Linear) else module for name, module in self._modules.items()
        }
        return changed

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Next-token logits for sequences laid out by a `TokenLayout`: V bins per slot and one stop token."""

    offsets: Tensor
    readable: Tensor
    mask: Tensor

    def __init__(self, layout: TokenLayout, num_bins: int, config: ModelConfig) -> None:
        """Build with random weights from torch's global generator."""
        super().__init__()
        self.layout = layout
        self.num_bins = num_bins
        self.config = config
        self.max_tokens = layout.length(config.window) - 1  # the last token of a window is only ever predicted
        num_slots = layout.goal_dim + layout.size

        # One embedding per slot and bin, and a single one for the stop token of every slot.
        self.token_embedding = nn.Embedding(num_slots * num_bins + 1, config.width)
        self.position_embedding = nn.Parameter(torch.zeros(self.max_tokens, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.heads = nn.Parameter(torch.empty(layout.size, num_bins + 1, config.width))  # by the slot predicted
        self.apply(_initialize)
        nn.init.uniform_(self.heads, -(config.width**-0.5), config.width**-0.5)
        self.map_encoder = MapEncoder(layout.map_shape, config.map_channels, config.width) if layout.map_shape else None

        goal_slots = torch.arange(layout.goal_dim)
        slots = layout.goal_dim + torch.arange(layout.size).repeat(config.window)
        self.register_buffer("offsets", torch.cat([goal_slots, slots])[:-1] * num_bins, persistent=False)
        # Causal, and no token attends to a value token, not even the value token itself.
        positions = torch.arange(self.max_tokens)
        self.register_buffer("readable", torch.tensor(layout.readable(0, self.max_tokens)), persistent=False)
        mask = (positions[:, None] >= positions[None, :]) & self.readable[None, :]
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor, map_embedding: Tensor | None = None) -> Tensor:
        """Logits of every token after the first goal token: tokens [B, L] -> [B, L - max(G - 1, 0), V + 1].

        The last position predicts the token that would follow. Without a goal, the first one predicts token 1.
        `map_embedding` [B, width] comes from `encode_map`.
        """
        length = tokens.shape[1]
        mask = self.mask[:length, :length] if self.layout.rewards else None  # without values plain causality suffices
        dropout = self.config.dropout if self.training else 0.0

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout
            )

        x = self.embed(tokens, 0, map_embedding)
        for block in self.blocks:
            x = block(x, attend)
        return self._all_logits(x)

    def encode_map(self, maps: Tensor | None) -> Tensor | None:
        """Embedding of each episode's map: maps [B, C, H, W] -> [B, width]; None for models without maps."""
        if self.map_encoder is None:
            return None
        assert maps is not None, "the model reads a map"
        encoded: Tensor = self.map_encoder(maps)
        return encoded

    def embed(self, tokens: Tensor, start: int, map_embedding: Tensor | None) -> Tensor:
        """Token plus position embeddings: tokens [..., L] at positions start.. -> [..., L, width].

        `map_embedding` [..., width] is added at every position.
        """
        end = start + tokens.shape[-1]
        assert end <= self.max_tokens, f"{end} tokens do not fit the {self.max_tokens} of the model's window"
        stop = self.token_embedding.num_embeddings - 1
        index = torch.where(tokens == self.num_bins, stop, tokens + self.offsets[start:end])
        x = self.token_embedding(index) + self.position_embedding[start:end]
        if map_embedding is not None:
            x = x + map_embedding[..., None, :]
        return functional.dropout(x, self.config.dropout, self.training)

    def logits_after(self, x: Tensor, num_read: int) -> Tensor:
        """Logits of the token at position `num_read` from the hidden state before it: [..., width] -> [..., V + 1]."""
        return functional.linear(self.norm(x), self.heads[self.layout.slot(num_read)])

    def _all_logits(self, x: Tensor) -> Tensor:
        """Apply to each position the head of the slot that follows it: x [B, L, width] -> [B, L', V + 1]."""
        x = self.norm(x)
        # Align whole transitions so that entry j predicts slot j mod D: drop positions that predict goal tokens, or
        # without a goal insert one unused entry where slot 0 of the first transition would be predicted.
        unused = 0 if self.layout.goal_dim else 1
        x = x[:, max(self.layout.goal_dim - 1, 0) :]
        used = unused + x.shape[1]
        x = functional.pad(x, (0, 0, unused, -used % self.layout.size))
        by_slot = x.reshape(len(x), -1, self.layout.size, x.shape[-1])  # [B, transitions, D, width]
        logits = torch.einsum("btdw,dvw->btdv", by_slot, self.heads)
        return logits.flatten(1, 2)[:, unused:used]


def _initialize(module: nn.Module) -> None:
    """Small normal weights and zero biases, as in GPT."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
