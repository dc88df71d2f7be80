"""One plan opened: every token with its probability, what the filter kept, and how scores develop over the horizon."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.config import Sampler
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.planner import Planner
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Bins, Candidates
from trajectory_transformer.search.sampling import filtered, predicted_value
from trajectory_transformer.tokens.discretizer import TokenArray


@dataclass(frozen=True)
class TokenRow:
    """One token of the winner."""

    index: int  # of the token after the prompt
    step: int  # of the plan, 0 for the first action
    slot: int  # of the transition
    token: int
    value: float  # decoded, NaN for a stop token
    probability: float  # under the unfiltered distribution


@dataclass(frozen=True)
class OpenedPlan:
    """The kept candidates of a search, read again token by token."""

    tokens: TokenArray  # [K, n]
    scores: FloatArray  # [K], of the search
    log_probs: FloatArray  # [K, n], of each token under the unfiltered distribution
    distributions: FloatArray  # [n, V + 1], of the winner's tokens
    kept: npt.NDArray[np.bool_]  # [n, V + 1], tokens that the filter or the beam kept after the winner's prefix
    score_paths: FloatArray  # [K, h], score after each transition
    rows: tuple[TokenRow, ...]  # the winner's tokens


@torch.inference_mode()
def open_plan(
    planner: Planner,
    prompt: TokenArray,
    tokens: TokenArray,
    scores: FloatArray,
    map_embedding: Tensor | None = None,
) -> OpenedPlan:
    """Read the candidates [K, n] of a plan from a prompt [L] again: what the model predicted for each token."""
    model, layout = planner.model, planner.model.layout
    num_candidates, length = tokens.shape
    device = model.device
    decoder = CachedDecoder(model.gpt, window=planner.search.window)
    decoder.begin(
        torch.from_numpy(prompt)[None].to(device),
        max_candidates=num_candidates,
        max_new=length,
        map_embedding=map_embedding,
    )
    decoder.select(torch.zeros(1, num_candidates, dtype=torch.long, device=device))
    given = torch.from_numpy(tokens)[None].to(device)  # [1, K, n]
    values = model.bin_values()  # [D, V]
    first_step = len(prompt) == layout.goal_dim + layout.observation_dim
    log_probs, distributions, kept = [], [], []
    rewards: list[Tensor] = []  # [1, K] each
    value = torch.zeros(1, num_candidates, device=device)
    ended = torch.zeros(1, num_candidates, dtype=torch.bool, device=device)
    paths: list[Tensor] = []
    for index in range(length):
        slot = (layout.observation_dim + index) % layout.size
        logits = decoder.logits()  # [1, K, V + 1]
        chosen = given[..., index]
        by_token = logits.log_softmax(dim=-1)
        log_probs.append(by_token.gather(-1, chosen[..., None])[0, :, 0])
        distributions.append(by_token[0, 0].exp())
        kept.append(_kept(planner, logits[0, 0], given[0], index, slot, first_step and index < layout.action_dim))
        if slot < layout.action.stop:
            ended = ended | (chosen == model.tokenizer.stop)
        elif slot == layout.reward:
            rewards.append(predicted_value(logits, values[slot], planner.percentile).masked_fill(ended, 0.0))
        else:
            value = predicted_value(logits, values[slot], planner.percentile).masked_fill(ended, 0.0)
        decoder.append(chosen)
        if slot == layout.size - 1:  # a transition is complete
            total = torch.stack(log_probs).sum(dim=0)[None]
            known = replace(
                Candidates.start(decoder.prompt),
                tokens=given[..., : index + 1],
                log_prob=total,
                rewards=torch.stack(rewards, dim=-1) if rewards else given.new_zeros(1, num_candidates, 0).float(),
                value=value,
                ended=ended,
                bins=Bins(layout, values),
            )
            paths.append((total if planner.objective is None else planner.objective(known))[0])
    return OpenedPlan(
        tokens=tokens,
        scores=scores,
        log_probs=torch.stack(log_probs, dim=1).cpu().numpy(),
        distributions=torch.stack(distributions).cpu().numpy(),
        kept=torch.stack(kept).cpu().numpy(),
        score_paths=torch.stack(paths, dim=1).cpu().numpy() if paths else np.zeros((num_candidates, 0), np.float32),
        rows=tuple(_rows(planner, tokens[0], torch.stack(distributions).cpu().numpy())),
    )


def sampler_of(planner: Planner, slot: int, first_action: bool) -> Sampler:
    """The sampler of a slot when planning for return or an objective."""
    search, layout = planner.search, planner.model.layout
    if slot < layout.observation_dim:
        return search.observation
    if slot < layout.action.stop:
        return search.first_action if first_action and search.first_action is not None else search.action
    return search.reward


def _kept(planner: Planner, logits: Tensor, tokens: Tensor, index: int, slot: int, first_action: bool) -> Tensor:
    """Which tokens could follow the winner's prefix: logits [V + 1], tokens [K, n] -> [V + 1]."""
    if planner.objective is not None:
        sampler = sampler_of(planner, slot, first_action)
        if sampler.greedy:
            return torch.arange(len(logits), device=logits.device) == logits.argmax()
        allowed = logits.clone()
        if index < planner.model.layout.action_dim:
            allowed[-1] = -torch.inf  # the first action is certain to be taken
        return filtered(sampler, allowed).isfinite()
    # Without a filter, the beam keeps the continuations of this prefix that are among its candidates.
    same = (tokens[:, :index] == tokens[0, :index]).all(dim=1)
    found = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    found[tokens[same, index]] = True
    return found


def _rows(planner: Planner, tokens: TokenArray, distributions: FloatArray) -> Iterator[TokenRow]:
    layout, discretizer = planner.model.layout, planner.model.tokenizer.discretizer
    for index, token in enumerate(tokens.tolist()):
        place = layout.observation_dim + index
        slot = place % layout.size
        decoded = discretizer.decode(np.array([token]), slice(slot, slot + 1))
        probability = float(distributions[index, token])
        yield TokenRow(index, place // layout.size, slot, token, float(decoded[0]), probability)
