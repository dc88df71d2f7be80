"""Beam search over any decoder: expand, score, keep. The objective alone decides what a candidate is worth."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trajectory_transformer.config import SearchConfig
from trajectory_transformer.search.decoder import Candidates, Decoder, Run
from trajectory_transformer.search.sampling import (
    Estimate,
    Noise,
    Percentile,
    Sampler,
    expected_value,
    sampled_value,
)
from trajectory_transformer.tokens.layout import TokenLayout

Objective = Callable[[Candidates], Tensor]
"""Worth of every candidate [E, K], larger is better."""


class Keep(Protocol):
    """Chooses who goes on."""

    def __call__(self, scores: Tensor, identity: Tensor, width: int, *, distinct: bool) -> Tensor:
        """Numbers of the best candidates, best first: scores, identity [E, K] -> [E, width].

        Where they are to be `distinct`, copies (of equal identity) of one that ranks before them come after all others.
        """


@dataclass(frozen=True)
class Plan:
    """What a search kept, best first."""

    tokens: Tensor  # [E, K, n], the tokens after the prompt
    scores: Tensor  # [E, K], decreasing

    @property
    def best(self) -> Tensor:
        """The winner's tokens [E, n]."""
        return self.tokens[:, 0]


@torch.inference_mode()
def likelihood_search(
    decoder: Decoder,
    prompt: Tensor,
    *,
    num_tokens: int,
    beam_width: int,
    min_tokens: int = 0,
    map_embedding: Tensor | None = None,
) -> Plan:
    """The most likely continuations of a prompt, Algorithm 1 of the paper: prompt [E, L] -> Plan of `num_tokens` each.

    Every candidate is extended by every token, and the `beam_width` most likely sequences are kept, token by token.
    The first `min_tokens` may not be stop tokens: whoever plans knows that the episode goes on. `map_embedding` [E, width]
    is for models that read one (`GPT.encode_map`).
    """
    decoder.begin(prompt, max_candidates=beam_width, max_new=num_tokens, map_embedding=map_embedding)
    log_prob = torch.zeros(prompt.shape[0], 1, device=prompt.device)  # [E, K]
    for index in range(num_tokens):
        step = decoder.logits().log_softmax(dim=-1)  # [E, K, V + 1]
        if index < min_tokens:
            step[..., -1] = -torch.inf
        vocabulary = step.shape[-1]
        extended = (log_prob[..., None] + step).flatten(1)  # [E, K * (V + 1)]
        possible = extended.shape[1] - (step.shape[1] if index < min_tokens else 0)
        log_prob, chosen = extended.topk(min(beam_width, possible), dim=1)
        decoder.select(chosen // vocabulary)
        decoder.append(chosen % vocabulary)
    return Plan(tokens=decoder.candidates.tokens, scores=log_prob)


@torch.inference_mode()
def median_continuation(
    decoder: Decoder, prompt: Tensor, *, num_tokens: int, min_tokens: int = 0, map_embedding: Tensor | None = None
) -> Plan:
    """Each token in turn at the median of its prediction: prompt [E, L] -> Plan of one candidate, `num_tokens` long.

    The most likely bin need not be a typical one: it may be wide, or hold all that was cut off at the limit of a motor.
    Half of the mass lies on each side of the median, wherever bins end. The stop token ranks behind all numbers; the
    first `min_tokens` may not be it. `map_embedding` as in `likelihood_search`.
    """
    decoder.begin(prompt, max_candidates=1, max_new=num_tokens, map_embedding=map_embedding)
    log_prob = torch.zeros(prompt.shape[0], 1, device=prompt.device)  # [E, 1]
    for index in range(num_tokens):
        logits = decoder.logits()  # [E, 1, V + 1]
        step = (logits[..., :-1] if index < min_tokens else logits).log_softmax(dim=-1)
        below = (step.exp().cumsum(dim=-1) < 0.5).sum(dim=-1)  # [E, 1], bins that end before half of the mass
        token = below.clamp(max=step.shape[-1] - 1)
        log_prob = log_prob + step.gather(-1, token[..., None])[..., 0]
        decoder.append(token)
    return Plan(tokens=decoder.candidates.tokens, scores=log_prob)


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    prompt: Tensor,
    objective: Objective,
    *,
    layout: TokenLayout,
    values: Tensor,
    config: SearchConfig,
    noise: Noise,
    opening: bool = False,
    keep: Keep | None = None,
    map_embedding: Tensor | None = None,
) -> Plan:
    """Search over sampled transitions: prompt [E, L] ending in a state, values [D, V] of the bins -> Plan.

    Each step samples `expansion` actions for every candidate (with reward and return-to-go where the layout has them),
    keeps the `beam_width` that the objective likes best, and samples their next states. A candidate drawn twice is kept
    twice only where there are too few others: copies of one good start must not crowd out what pays later. Once a
    candidate has drawn a stop token the task is over for it: it earns nothing more. `opening`: the prompts begin their
    episodes (`SearchConfig.opening_nucleus`). `keep` ranks (`keep_best`). `map_embedding` [E, width] is for models that read
    one (`GPT.encode_map`).
    """
    keep = keep or keep_best
    envs, width, vocabulary = prompt.shape[0], config.beam_width, values.shape[1] + 1
    crowd = width * config.expansion
    act = Sampler(config.temperature, config.action_top_k, config.action_nucleus)
    if config.action_middle is not None:
        act = Sampler(config.temperature, middle=config.action_middle)
    first = Sampler(config.temperature, None, config.opening_nucleus) if opening and config.opening_nucleus else act
    observe = Sampler(config.temperature, config.observation_top_k, config.observation_nucleus)
    judge = Sampler(config.temperature)
    estimate = make_estimate(config)
    worths = values[layout.reward :].contiguous() if layout.rewards else values  # of rewards and values

    max_new = config.horizon * layout.size - layout.observation_dim
    decoder.begin(prompt, max_candidates=crowd, max_new=max_new, map_embedding=map_embedding)
    parents = _siblings(envs, crowd, crowd, prompt.device)  # all from the prompt
    for step in range(config.horizon):
        decoder.select(parents)
        # The first action is certain to be taken: whoever plans knows that the episode goes on.
        gumbel = noise.gumbel(crowd, layout.action_dim, vocabulary)
        runs = [Run(layout.action_dim, act if step else first, gumbel, allow_stop=step > 0)]
        if layout.rewards:
            gumbel = noise.gumbel(crowd, 2, vocabulary)
            runs.append(Run(2, judge, gumbel, values=worths, estimate=estimate))
        decoder.extend(*runs)
        scores = objective(decoder.candidates)  # [E, crowd]
        kept = keep(scores, decoder.candidates.identity, width, distinct=step + 1 < config.horizon)
        decoder.select(kept)
        if step + 1 < config.horizon:
            gumbel = noise.gumbel(width, layout.observation_dim, vocabulary)
            decoder.extend(Run(layout.observation_dim, observe, gumbel))
            parents = _siblings(envs, crowd, config.expansion, prompt.device)
    return Plan(tokens=decoder.candidates.tokens, scores=scores.gather(1, kept))


def make_estimate(config: SearchConfig) -> Estimate:
    """How predicted rewards and values are summed up."""
    if config.estimate == "percentile":
        return Percentile(config.percentile)
    return {"mean": expected_value, "sampled": sampled_value}[config.estimate]


def keep_best(scores: Tensor, identity: Tensor, width: int, *, distinct: bool) -> Tensor:
    """Numbers of the best candidates, best first: see `Keep`."""
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    if distinct:
        rank = rank + scores.shape[1] * _repeated(identity, rank)
    return rank.argsort(dim=1)[:, :width]


@functools.cache
def _siblings(envs: int, candidates: int, expansion: int, device: torch.device) -> Tensor:
    """Parents that have `expansion` children each [E, K]. Made once, as operations on a GPU add up."""
    return (torch.arange(candidates, device=device) // expansion).repeat(envs, 1)


def _repeated(identity: Tensor, rank: Tensor) -> Tensor:
    """Which candidates are copies of one that ranks before them: identity, rank [E, K] -> [E, K], 0 or 1."""
    by_rank = rank.argsort(dim=1)
    order = by_rank.gather(1, identity.gather(1, by_rank).argsort(dim=1, stable=True))  # alike side by side, best first
    ordered = identity.gather(1, order)
    same = torch.zeros_like(ordered)
    same[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]).long()
    return torch.zeros_like(same).scatter(1, order, same)
