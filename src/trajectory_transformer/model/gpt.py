"""The GPT of the paper over slots: embeddings, blocks, one output head per slot, and the same pass with a cache."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trajectory_transformer.config import ModelConfig
from trajectory_transformer.model.block import Block, Linear, apply_linear
from trajectory_transformer.model.map_encoder import MapEncoder
from trajectory_transformer.search.attention import attend_many, attend_one
from trajectory_transformer.search.cache import KVCache
from trajectory_transformer.tokens.layout import TokenLayout


@dataclass(frozen=True)
class Level:
    """What follows the rows of the level before, in a tree of tokens: E environments with U rows each."""

    tokens: Tensor  # [E, U, S]
    parents: Tensor  # [E, U], rows of the level before


class GPT(nn.Module):
    """Next-token logits for sequences laid out by a `TokenLayout`: V bins a slot and one stop token."""

    offsets: Tensor
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
        bound = math.sqrt(3.0 / config.width)
        nn.init.uniform_(self.heads, -bound, bound)
        # Built last: models without one get the random weights that they always got.
        self.map_encoder = MapEncoder(layout.map_shape, config.map_channels, config.width) if layout.map_shape else None

        goal_slots = torch.arange(layout.goal_dim)
        slots = layout.goal_dim + torch.arange(layout.size).repeat(config.window)
        self.register_buffer("offsets", torch.cat([goal_slots, slots])[:-1] * num_bins, persistent=False)
        # A value token is the return that followed, known only in hindsight. If later tokens could read it, training
        # would leak the future that planning lacks. So no token attends to a value's column, not even its own.
        positions = torch.arange(self.max_tokens)
        readable = torch.tensor([not layout.is_value(int(position)) for position in positions])
        mask = (positions[:, None] >= positions[None, :]) & readable[None, :]
        self.register_buffer("mask", mask, persistent=False)

    def encode_map(self, maps: Tensor | None) -> Tensor | None:
        """What is added to every token of an episode: maps [B, C, H, W] -> [B, width]; None for models without."""
        if self.map_encoder is None:
            return None
        assert maps is not None, "the model reads a map_embedding"
        encoded: Tensor = self.map_encoder(maps)
        return encoded

    def forward(self, tokens: Tensor, map_embedding: Tensor | None = None) -> Tensor:
        """Logits of every token after the goal's first: tokens [B, L] -> [B, L - max(G - 1, 0), V + 1].

        The last of them predicts the token that would follow. Without a goal, the first predicts token 1. `map_embedding`
        [B, width] is what `encode_map` made of each episode's.
        """
        x = self._embed(tokens, 0, map_embedding)
        mask = self._mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self._all_logits(x)

    def read(
        self,
        tokens: Tensor,
        map_embedding: Tensor | None = None,
        linear: Linear = apply_linear,
        *,
        multiple_of: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, of one pass over tokens [B, L], that later tokens may read: two of [layers, B, H, C, d].

        Columns behind the last are filled up to a multiple with copies of it.
        """
        # Nothing attends to a value: without them plain causality says it all.
        x = self._embed(tokens, 0, map_embedding)[
            :, _readable_rows(self.layout, tokens.shape[1], multiple_of, tokens.device)
        ]
        keys, values = [], []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            query, key, value = block.project(x, linear)
            keys.append(key)
            values.append(value)
            if layer + 1 < len(self.blocks):
                # Not by cuDNN, which for so few tokens takes longer to start than to work.
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
                x = block.finish(x, attended, linear)
        return torch.stack(keys), torch.stack(values)

    def extend(
        self,
        tokens: Tensor,
        start: int,
        cache: KVCache,
        linear: Linear = apply_linear,
        map_embedding: Tensor | None = None,
    ) -> Tensor:
        """Read S more tokens of every candidate from position `start`: tokens [E, K, S] -> logits [E, K, V + 1].

        `map_embedding` [E, width] is shared by the candidates of an environment.
        """
        num_new = tokens.shape[2]
        x = self._embed(tokens, start, None if map_embedding is None else map_embedding[:, None])  # [E, K, S, width]
        readable = self.readable(start, start + num_new)
        # Of the new columns, a token sees those up to its own; all older ones are in its past.
        mask = None if num_new == 1 else self.mask[start : start + num_new, start : start + num_new][:, readable]
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            query, key, value = block.project(x, linear)
            if len(readable) < num_new:
                key, value = key[..., readable, :], value[..., readable, :]
            cache.write(layer, key, value)
            attended = attend_one(query, cache, layer) if mask is None else attend_many(query, cache, layer, mask)
            x = block.finish(x, attended, linear)
        cache.advance()
        return self._logits_after(x[:, :, -1], start + num_new)

    def make_cache(self, *, num_envs: int, max_candidates: int, max_own: int) -> KVCache:
        """An empty cache with room for so many tokens of so many candidates of each environment, prompts apart."""
        return KVCache(
            self.position_embedding.detach()[0].view(self.config.num_heads, -1),
            layers=self.config.num_layers,
            num_envs=num_envs,
            max_candidates=max_candidates,
            max_own=max_own,
        )

    def read_tree(
        self,
        prompt: Tensor,
        levels: Sequence[Level],
        cache: KVCache,
        linear: Linear,
        map_embedding: Tensor | None = None,
    ) -> Tensor:
        """Read prompts [E, L] and all that branches from them, everything once, into a cache.

        The cache then holds the last level's rows as candidates; returns the logits after them [E, U, V + 1]. `map_embedding`
        [E, width] is shared by all rows of an environment.
        """
        map_embedding = None if map_embedding is None else map_embedding[:, None]
        levels = [Level(prompt[:, None], prompt.new_zeros(len(prompt), 1)), *levels]
        parts, columns, masks = [], [], []
        end = 0
        for level in levels:
            start, end = end, end + level.tokens.shape[2]
            # Nothing attends to a value: it need not be read, unless what follows it is asked for.
            kept = readable = self.readable(start, end)
            if level is levels[-1] and end - start - 1 not in readable:
                kept = [*readable, end - start - 1]
            parts.append(self._embed(level.tokens, start, map_embedding)[:, :, kept].flatten(0, 1))  # [E * U, S, width]
            columns.append(len(readable))
            masks.append(self.mask[start:end, :end][kept][:, self.readable(0, end)])
        sizes = [part.shape[:2] for part in parts]
        x = torch.cat([part.flatten(0, 1) for part in parts])  # [N, width], so that linear layers see all at once
        shared, own = [], []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            last = layer + 1 == len(self.blocks)
            query, key, value = (_by_level(part, sizes) for part in block.project(x, linear))
            attended = []
            path = torch.stack([key[0][:, :, :0], value[0][:, :, :0]])  # [2, E * U, H, C, d], up to and with each row
            for index, level in enumerate(levels):
                firsts = torch.arange(len(prompt), device=prompt.device)[:, None] * (path.shape[1] // len(prompt))
                new = (key[index][:, :, : columns[index]], value[index][:, :, : columns[index]])
                path = _longer(path, (firsts + level.parents).flatten(), new)
                if index == 0:
                    shared.append(path)
                asking = query[index]
                if last:  # beyond keys and values, only what comes after the last tokens is wanted
                    asking = asking[:, :, -1:] if index + 1 == len(levels) else asking[:, :, :0]
                if asking.shape[2]:
                    mask = masks[index][-asking.shape[2] :]
                    found = functional.scaled_dot_product_attention(asking, path[0], path[1], attn_mask=mask)
                    attended.append(found.transpose(1, 2).flatten(0, 1))  # [E * U * S, H, d]
            own.append(path[:, :, :, shared[-1].shape[3] :])
            if last:
                x = x[-math.prod(sizes[-1]) :].view(*sizes[-1], -1)[:, -1]
            x = block.finish(x, torch.cat(attended).transpose(0, 1), linear)
        cache.restart(torch.stack(shared), torch.stack(own))
        return self._logits_after(x.view(len(prompt), -1, x.shape[-1]), end)

    def _embed(self, tokens: Tensor, start: int, map_embedding: Tensor | None) -> Tensor:
        """Token plus position embeddings: tokens [..., L] at positions start.. -> [..., L, width].

        `map_embedding` [..., width] is added to all of them.
        """
        end = start + tokens.shape[-1]
        assert end <= self.max_tokens, f"{end} tokens do not fit the {self.max_tokens} of the model's window"
        stop = self.token_embedding.num_embeddings - 1
        index = torch.where(tokens == self.num_bins, stop, tokens + self.offsets[start:end])
        x = self.token_embedding(index) + self.position_embedding[start:end]
        if map_embedding is not None:
            x = x + map_embedding[..., None, :]
        return functional.dropout(x, self.config.dropout, self.training)

    def _mask(self, length: int) -> Tensor | None:
        """Which columns each row may read; None where plain causality says it all."""
        return self.mask[:length, :length] if self.layout.rewards else None

    def readable(self, start: int, end: int) -> list[int]:
        """Offsets, within a range of positions, of the tokens that later ones may read."""
        return [position - start for position in range(start, end) if not self.layout.is_value(position)]

    def _all_logits(self, x: Tensor) -> Tensor:
        """Apply to each position the head of the slot that follows it: x [B, L, width] -> [B, L', V + 1]."""
        x = self.norm(x)
        # Shift so that entry j predicts slot j mod D: drop goal positions that predict goal tokens, or without a goal
        # put one unused entry where slot 0 of the first transition would be predicted. Then whole transitions.
        unused = 0 if self.layout.goal_dim else 1
        x = x[:, max(self.layout.goal_dim - 1, 0) :]
        used = unused + x.shape[1]
        x = functional.pad(x, (0, 0, unused, -used % self.layout.size))
        by_slot = x.reshape(len(x), -1, self.layout.size, x.shape[-1])  # [B, transitions, D, width]
        logits = torch.einsum("btdw,dvw->btdv", by_slot, self.heads)
        return logits.flatten(1, 2)[:, unused:used]

    def _logits_after(self, x: Tensor, num_read: int) -> Tensor:
        """Logits of the token at position `num_read` from the hidden state before it: [..., width] -> [..., V + 1]."""
        return functional.linear(self.norm(x), self.heads[self.layout.slot(num_read)])


@functools.cache
def _readable_rows(layout: TokenLayout, length: int, multiple_of: int, device: torch.device) -> Tensor:
    """Which of so many tokens later ones may read, the last repeated up to a multiple."""
    rows = [position for position in range(length) if not layout.is_value(position)]
    return torch.tensor(rows + rows[-1:] * (-len(rows) % multiple_of), dtype=torch.long, device=device)


def _by_level(rows: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Take apart what all levels went through together: rows [H, N, d] -> [B, H, S, d] for each size (B, S)."""
    parts = torch.split(rows, [math.prod(size) for size in sizes], dim=1)
    return [
        part.view(len(rows), *size, rows.shape[-1]).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)
    ]


def _longer(path: Tensor, rows: Tensor, new: tuple[Tensor, Tensor]) -> Tensor:
    """Some rows of keys and values [2, B, H, C, d], rows [B'], with new columns after the old [B', H, S, d]."""
    done = path.shape[3]
    longer = path.new_empty(2, len(rows), path.shape[2], done + new[0].shape[2], path.shape[4])
    for old, part, more in zip(path, longer, new, strict=True):
        if done:
            torch.index_select(old, 0, rows, out=part[:, :, :done])
        part[:, :, done:] = more
    return longer


def _initialize(module: nn.Module) -> None:
    """Small normal weights and zero biases, as GPT."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
