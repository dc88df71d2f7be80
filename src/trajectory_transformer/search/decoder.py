"""What every decoder that reads token by token shares: the candidates, the sliding crop, runs of slots."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.sampling import Estimate, Gumbel, Sampler

_HASH_STEP = 6364136223846793005  # odd


@dataclass(frozen=True)
class Candidates:
    """Partial plans and what is known of them. A decoder's own may be overwritten by its next run."""

    tokens: Tensor  # [E, K, n], added so far
    log_prob: Tensor  # [E, K], of all tokens that runs drew, under the model's own distribution, unfiltered
    rewards: Tensor  # [E, K, h], predicted, one for each judging run; 0 after a predicted end
    value: Tensor  # [E, K], predicted return that follows the last reward; 0 after a predicted end
    ended: Tensor  # [E, K], whether a run other than a judging one drew a stop token
    identity: Tensor  # [E, K], a hash of all that such runs drew: equal for copies

    @staticmethod
    def start(prompt: Tensor) -> "Candidates":
        """One for each environment, with nothing behind its prompt [E, L]."""
        shape, device = (len(prompt), 1), prompt.device
        return Candidates(
            tokens=prompt.new_empty(*shape, 0),
            log_prob=torch.zeros(shape, device=device),
            rewards=torch.zeros(*shape, 0, device=device),
            value=torch.zeros(shape, device=device),
            ended=torch.zeros(shape, dtype=torch.bool, device=device),
            identity=torch.zeros(shape, dtype=torch.long, device=device),
        )

    def select(self, parents: Tensor) -> "Candidates":
        """Copies of some: parents [E, K']."""
        return Candidates(*(_pick(getattr(self, field.name), parents) for field in fields(self)))


@dataclass(frozen=True)
class Run:
    """Slots to extend every candidate by, between two selections."""

    num_slots: int  # S
    sampler: Sampler
    noise: Gumbel | None  # None takes the most likely tokens
    allow_stop: bool = True  # whether the stop token may be drawn
    values: Tensor | None = None  # [2, V], what the bins stand for: then this is a judging run, of a reward and a value
    estimate: Estimate | None = None  # how a distribution over them is summed up

    def __post_init__(self) -> None:
        """Refuse what decoders do not expect."""
        assert self.values is None or (self.num_slots == len(self.values) == 2 and self.estimate is not None)


class Decoder(Protocol):
    """Candidates of E environments and what may follow each.

    Every prompt of one search has the same length. A search starts with one candidate per environment, the prompt.
    """

    candidates: Candidates
    """As many as there are now, K of each."""

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `map_embedding` [E, width] is what `GPT.encode_map` made of each environment's, for models that read one.
        """

    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] numbers the old ones."""

    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate, one after the other: between two selections they are independent."""


class StepwiseDecoder(ABC):
    """Candidates of E environments, extended one token at a time.

    A pass of the model may hold `window` transitions at most. When a candidate has that many whole ones and begins
    another, the oldest slides out and positions restart; the goal stays in front. Every prompt of one search has the
    same length, and a search starts with one candidate per environment, the prompt.
    """

    def __init__(self, gpt: GPT, window: int | None = None) -> None:
        """Decode with a model; by default as many transitions are visible as in training."""
        self.gpt = gpt
        self.window = gpt.config.window if window is None else window
        if self.window > gpt.config.window:
            raise ValueError(
                f"search.window must not exceed the {gpt.config.window} transitions the model was trained on, "
                f"got {self.window}"
            )
        self.prompt = torch.empty(0, 0, dtype=torch.long)  # [E, L]
        self.map_embedding: Tensor | None = None  # [E, width]
        self.candidates = Candidates.start(self.prompt)

    @property
    def tokens(self) -> Tensor:
        """Tokens added so far [E, K, n]."""
        return self.candidates.tokens

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `map_embedding` [E, width] is what `GPT.encode_map` made of each environment's, for models that read one.
        """
        del max_candidates
        layout = self.gpt.layout
        assert (map_embedding is None) == (self.gpt.map_encoder is None), (
            "a map_embedding is given where the model reads one"
        )
        if self.window == 1 and not layout.goal_dim and prompt.shape[1] + max_new > layout.size:
            raise ValueError(
                "search.window must be at least 2 to plan more than one transition without a goal (where the second "
                "begins, the first has slid out), got 1"
            )
        self.prompt, self.map_embedding = prompt, map_embedding
        self.candidates = Candidates.start(prompt)

    @abstractmethod
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self.candidates = replace(self.candidates, tokens=torch.cat([self.tokens, tokens[:, :, None]], dim=2))

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] numbers the old ones."""
        self.candidates = self.candidates.select(parents)

    @torch.no_grad()
    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate, one after the other."""
        for run in runs:
            for slot in range(run.num_slots):
                logits = self.logits()
                drawn_from = logits
                if not run.allow_stop:
                    drawn_from = logits.clone()
                    drawn_from[..., -1] = -torch.inf
                token = run.sampler.draw(drawn_from, None if run.noise is None else run.noise.slot(slot))
                self.append(token)
                self._add_up(run, slot, logits, token)

    def _add_up(self, run: Run, slot: int, logits: Tensor, token: Tensor) -> None:
        """Note what the token drawn in a slot changes: logits [E, K, V + 1], token [E, K]."""
        known = self.candidates
        rewards, value, ended, identity = known.rewards, known.value, known.ended, known.identity
        if run.values is None or run.estimate is None:
            ended = ended | (token == logits.shape[-1] - 1)
            identity = identity * _HASH_STEP + (token + 1)  # wraps round, as a hash may
        else:
            worth = run.estimate(logits, run.values[slot], token).masked_fill(ended, 0.0)
            if slot:
                value = worth
            else:
                rewards = torch.cat([rewards, worth[..., None]], dim=-1)
        self.candidates = Candidates(
            known.tokens,
            known.log_prob + logits.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0],
            rewards,
            value,
            ended,
            identity,
        )

    def num_cropped(self, num_more: int = 0) -> int:
        """Tokens after the goal that have slid out, counted over prompt and candidate; whole transitions.

        With `num_more`, how many it will be when each candidate has so many more tokens.
        """
        layout = self.gpt.layout
        after_goal = self.prompt.shape[1] + self.tokens.shape[2] + num_more - layout.goal_dim
        return max(after_goal // layout.size - (self.window - 1), 0) * layout.size

    def visible(self, cropped: int) -> tuple[Tensor, Tensor]:
        """What is left of prompts [E, L'] and candidates [E, K, n'] after `cropped` tokens behind the goal are gone."""
        goal = self.gpt.layout.goal_dim
        in_prompt = min(cropped, self.prompt.shape[1] - goal)
        prompt = self.prompt
        if in_prompt:
            prompt = torch.cat([prompt[:, :goal], prompt[:, goal + in_prompt :]], dim=1)
        return prompt, self.tokens[:, :, cropped - in_prompt :]


def _pick(part: Tensor, rows: Tensor) -> Tensor:
    """Rows of every environment: part [E, K, ...], rows [E, K'] -> [E, K', ...]."""
    if part.dim() == 2:
        return part.gather(1, rows)
    return part.gather(1, rows[..., None].expand(-1, -1, part.shape[2]))
