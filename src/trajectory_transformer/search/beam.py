"""Beam search over any decoder: expand, score, keep."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.model.decoders import Decoder


@dataclass(frozen=True)
class Plan:
    """What a search kept, best first."""

    tokens: Tensor  # [E, K, n], the tokens after the prompt
    scores: Tensor  # [E, K], decreasing

    @property
    def best(self) -> Tensor:
        """The winner's tokens [E, n]."""
        return self.tokens[:, 0]


def likelihood_search(
    decoder: Decoder, prompt: Tensor, *, num_tokens: int, beam_width: int, min_tokens: int = 0
) -> Plan:
    """The most likely continuations of a prompt, Algorithm 1 of the paper: prompt [E, L] -> Plan of `num_tokens` each.

    Every candidate is extended by every token, and the `beam_width` most likely sequences are kept, token by token.
    The first `min_tokens` may not be stop tokens: whoever plans knows that the episode goes on.
    """
    decoder.begin(prompt, max_candidates=beam_width, max_new=num_tokens)
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
    return Plan(tokens=decoder.tokens, scores=log_prob)
