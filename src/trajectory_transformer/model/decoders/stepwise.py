"""What every decoder that reads token by token shares: the candidates' tokens, the sliding crop, runs of slots."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.model.sampling import Estimate, Gumbel, Sampler


@dataclass(frozen=True)
class Run:
    """Slots to extend every candidate by, between two selections."""

    num_slots: int  # S
    sampler: Sampler
    noise: Gumbel | None  # None takes the most likely tokens
    allow_stop: bool = True  # whether the stop token may be drawn
    values: Tensor | None = None  # [S, V], what the tokens are worth, where that is wanted
    estimate: Estimate | None = None  # how a distribution over them is summed up


@dataclass(frozen=True)
class Extension:
    """What a run added to every candidate."""

    tokens: Tensor  # [E, K, S]
    log_prob: Tensor  # [E, K, S], under the model's own distribution, unfiltered
    worth: Tensor | None  # [E, K, S], where the run asked for it


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
        self.context: Tensor | None = None  # [E, width]
        self.tokens = torch.empty(0, 0, 0, dtype=torch.long)  # [E, K, n], added so far

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, context: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `context` [E, width] is what `GPT.encode_context` made of each environment's, for models that read one.
        """
        del max_candidates
        layout = self.gpt.layout
        assert (context is None) == (self.gpt.context_encoder is None), "a context is given where the model reads one"
        if self.window == 1 and not layout.goal_dim and prompt.shape[1] + max_new > layout.size:
            raise ValueError(
                "search.window must be at least 2 to plan more than one transition without a goal (where the second "
                "begins, the first has slid out), got 1"
            )
        self.prompt, self.context = prompt, context
        self.tokens = prompt.new_empty(prompt.shape[0], 1, 0)

    @abstractmethod
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; may be asked for once per token."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self.tokens = torch.cat([self.tokens, tokens[:, :, None]], dim=2)

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] numbers the old ones."""
        self.tokens = self.tokens.gather(1, parents[..., None].expand(-1, -1, self.tokens.shape[2]))

    @torch.no_grad()
    def extend(self, run: Run) -> Extension:
        """Add a run of slots to every candidate."""
        tokens, log_probs, worths = [], [], []
        for slot in range(run.num_slots):
            logits = self.logits()
            drawn_from = logits
            if not run.allow_stop:
                drawn_from = logits.clone()
                drawn_from[..., -1] = -torch.inf
            token = run.sampler.draw(drawn_from, None if run.noise is None else run.noise.slot(slot))
            self.append(token)
            tokens.append(token)
            log_probs.append(logits.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0])
            if run.values is not None and run.estimate is not None:
                worths.append(run.estimate(logits, run.values[slot], token))
        worth = torch.stack(worths, dim=-1) if worths else None
        return Extension(torch.stack(tokens, dim=-1), torch.stack(log_probs, dim=-1), worth)

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
        prompt = torch.cat([self.prompt[:, :goal], self.prompt[:, goal + in_prompt :]], dim=1)
        return prompt, self.tokens[:, :, cropped - in_prompt :]
