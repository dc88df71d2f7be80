"""Beam search over any decoder: expand, score, keep. The objective alone decides what a candidate is worth."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trajectory_transformer.config import Sampler, SearchConfig
from trajectory_transformer.search.deadline import Deadline
from trajectory_transformer.search.decoder import Bins, Candidates, Decoder, Run
from trajectory_transformer.search.noise import Noise

Objective = Callable[[Candidates], Tensor]
"""Score of every candidate [E, K], larger is better."""


@dataclass(frozen=True)
class Plan:
    """The candidates that a search kept, best first."""

    tokens: Tensor  # [E, K, n], the tokens after the prompt
    scores: Tensor  # [E, K], decreasing
    winner: Tensor | None = None  # [E, n], a copy of the best candidate's tokens on the host, if there is one

    @property
    def best(self) -> Tensor:
        """Tokens of the best candidate [E, n]."""
        return self.tokens[:, 0] if self.winner is None else self.winner


@torch.inference_mode()
def likelihood_search(
    decoder: Decoder,
    prompt: Tensor,
    *,
    num_tokens: int,
    beam_width: int,
    min_tokens: int = 0,
    map_embedding: Tensor | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """The most likely continuations of a prompt, Algorithm 1 of the paper: prompt [E, L] -> Plan of `num_tokens` each.

    Extend every candidate by every token, keep the `beam_width` most likely sequences, and repeat. The first
    `min_tokens` cannot be stop tokens: the episode is known to go on. With a `deadline` the beam may become narrower,
    and the plan may end after the first `min_tokens`.
    """
    decoder.begin(prompt, max_candidates=beam_width, max_new=num_tokens, map_embedding=map_embedding)
    log_prob = torch.zeros(prompt.shape[0], 1, device=prompt.device)  # [E, K]
    for index in range(num_tokens):
        if deadline is not None:
            allowed = deadline.width(beam_width, num_tokens - index)
            if not allowed and index >= min_tokens:
                break
            beam_width = max(allowed, 1)
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
    decoder: Decoder,
    prompt: Tensor,
    *,
    num_tokens: int,
    min_tokens: int = 0,
    map_embedding: Tensor | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Each token in turn at the median of its prediction: prompt [E, L] -> Plan of one candidate.

    The most likely bin need not be typical: it may be wide, or hold all actions that were clipped at a limit. The
    median does not depend on where bins end. The stop token ranks above all bins; the first `min_tokens` cannot be it.
    """
    decoder.begin(prompt, max_candidates=1, max_new=num_tokens, map_embedding=map_embedding)
    log_prob = torch.zeros(prompt.shape[0], 1, device=prompt.device)  # [E, 1]
    for index in range(num_tokens):
        if deadline is not None and not deadline.width(1, num_tokens - index) and index >= min_tokens:
            break
        logits = decoder.logits()  # [E, 1, V + 1]
        step = (logits[..., :-1] if index < min_tokens else logits).log_softmax(dim=-1)
        below = (step.exp().cumsum(dim=-1) < 0.5).sum(dim=-1)  # [E, 1], bins that end below the median
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
    bins: Bins,
    config: SearchConfig,
    noise: Noise,
    first_step: bool = False,
    percentile: float | None = None,
    map_embedding: Tensor | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Search over sampled transitions: prompt [E, L] that ends with a state -> Plan.

    Each step samples `expansion` actions for every candidate, predicts reward and value if the layout has them, keeps
    the `beam_width` best by the objective, and predicts their next states. Copies of a candidate are kept only if there
    are too few others: copies of one good start must not crowd out what pays later. A candidate that sampled a stop
    token earns nothing more.

    `first_step`: the prompts are the first states of their episodes (`SearchConfig.first_action`).
    `percentile`: judge candidates by this percentile of predicted rewards and values instead of their means.
    `deadline`: keep fewer candidates, or end with fewer transitions, instead of being late.
    """
    layout, width, crowd = bins.layout, config.beam_width, config.beam_width * config.expansion
    vocabulary = bins.values.shape[1] + 1
    first_action = config.first_action if first_step and config.first_action is not None else config.action

    def run(num_slots: int, sampler: Sampler, num_candidates: int, allow_stop: bool = True) -> Run:
        drawn = noise.gumbel(num_candidates, num_slots, vocabulary)
        return Run(num_slots, sampler, None if sampler.greedy else drawn, allow_stop)

    max_new = config.horizon * layout.size - layout.observation_dim
    # First of all, because it refuses a search that does not fit into memory.
    decoder.begin(prompt, max_candidates=crowd, max_new=max_new, map_embedding=map_embedding)
    every = torch.arange(crowd, device=prompt.device)
    for step in range(config.horizon):
        if deadline is not None:
            allowed = deadline.width(width, config.horizon - step)
            if step > 0 and not allowed:
                break
            if step > 0 and allowed < width:
                decoder.select(every[:allowed].repeat(len(prompt), 1))  # the best come first
            width = max(allowed, 1)
            crowd = width * config.expansion
        siblings = (every[:crowd] // config.expansion).repeat(len(prompt), 1)  # [E, crowd]
        if step == 0:
            decoder.select(torch.zeros_like(siblings))
        else:
            decoder.extend(run(layout.observation_dim, config.observation, width))
            decoder.select(siblings)
        # The first action is certain to be taken, so it cannot be a stop token.
        runs = [run(layout.action_dim, config.action if step > 0 else first_action, crowd, step > 0)]
        if layout.rewards:
            # Sampled reward tokens would favour lucky draws, because the value is predicted given the reward.
            values = bins.values[layout.reward :]
            runs.append(replace(run(2, config.reward, crowd), values=values, percentile=percentile))
        decoder.extend(*runs)
        scores = objective(replace(decoder.candidates, bins=bins))  # [E, crowd]
        kept = decoder.keep(scores, width, distinct=step + 1 < config.horizon)
        decoder.select(kept)
        scores = scores.gather(1, kept)  # [E, width]
    return Plan(tokens=decoder.candidates.tokens, scores=scores)
