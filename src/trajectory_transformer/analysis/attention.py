"""Attention maps: how much every token of a sequence reads of every token before it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.data.episode import Episode, MapArray
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.discretizer import TokenArray
from trajectory_transformer.tokens.layout import TokenLayout


@torch.inference_mode()
def attention_maps(model: TrajectoryModel, tokens: TokenArray, map: MapArray | None = None) -> npt.NDArray[np.float32]:
    """Attention weights of all blocks and heads: tokens [L] -> [layers, heads, L, L]; row i is what token i reads."""
    gpt = model.gpt
    if not 1 <= len(tokens) <= gpt.max_tokens:
        raise ValueError(f"a sequence of 1 to {gpt.max_tokens} tokens is needed, got {len(tokens)}")
    mask = gpt.mask[: len(tokens), : len(tokens)]
    found: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        found.append(weights[0])
        return weights @ value

    x = gpt.embed(torch.from_numpy(tokens)[None].to(model.device), 0, model.encode_maps(map))
    for block in gpt.blocks:
        x = block(x, attend)
    return torch.stack(found).cpu().numpy()


def token_labels(layout: TokenLayout, names: list[str], length: int, first_step: int = 0) -> list[str]:
    """Names of the tokens of a sequence with the step they belong to: names [G + D] of goal and slots."""
    labels = names[: layout.goal_dim][:length]
    for position in range(layout.goal_dim, length):
        slot = layout.slot(position)
        step = first_step + (position - layout.goal_dim) // layout.size
        labels.append(f"{names[layout.goal_dim + slot]}, step {step}")
    return labels


def window_tokens(model: TrajectoryModel, episode: Episode, start: int) -> TokenArray:
    """Tokens [L] of the transitions of an episode from a step on, as many as fit; its goal comes first."""
    tokenizer, gpt = model.tokenizer, model.gpt
    rows = tokenizer.encode(episode)[start : start + gpt.config.window]
    return tokenizer.prompt(tokenizer.goals_of([episode])[0], [], rows.ravel())[: gpt.max_tokens]


def uniform_attention(model: TrajectoryModel, length: int) -> npt.NDArray[np.float32]:
    """The map [L, L] of a head that reads all that it may alike."""
    visible = model.gpt.mask[:length, :length].cpu().numpy().astype(np.float32)
    return np.asarray(visible / visible.sum(axis=1, keepdims=True), dtype=np.float32)


@dataclass(frozen=True)
class HeadScores:
    """What a head reads, as shares of all that it reads, in the mean over tokens with two transitions before them.

    `markov`: the last D tokens, D being the size of a transition. These are the token itself, those before it in its
    transition, and the rest of the transition before. `striation`: further back, the one slot that tokens of a slot
    read most, over all transitions; the mean over slots. Stripes show as lines in a map.
    """

    markov: float
    striation: float


def head_scores(weights: npt.NDArray[np.float32], layout: TokenLayout) -> HeadScores:
    """Scores of one attention map [L, L]; it needs more than two transitions."""
    size, goal = layout.size, layout.goal_dim
    if len(weights) <= goal + 2 * size:
        raise ValueError(f"more than two transitions ({goal + 2 * size} tokens) are needed, got {len(weights)} tokens")
    recent: list[float] = []
    stripes: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(size)]  # by the slot that reads, each [D]
    for row in range(goal + 2 * size, len(weights)):
        last = row - size + 1  # first of the last D tokens
        recent.append(float(weights[row, last : row + 1].sum()))
        earlier = np.zeros(-(-(last - goal) // size) * size)
        earlier[: last - goal] = weights[row, goal:last]
        stripes[layout.slot(row)].append(earlier.reshape(-1, size).sum(axis=0))
    strongest = [np.mean(each, axis=0).max() for each in stripes if each]
    return HeadScores(markov=float(np.mean(recent)), striation=float(np.mean(strongest)))
