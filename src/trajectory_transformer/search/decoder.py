"""What extends candidates: the `Decoder` protocol, the bookkeeping of a token-by-token decoder, and the naive one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trajectory_transformer.config import Sampler
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.noise import Gumbel
from trajectory_transformer.search.sampling import draw, predicted_value
from trajectory_transformer.tokens.layout import TokenLayout

_HASH_STEP = 6364136223846793005  # odd


@dataclass(frozen=True)
class Candidates:
    """Partial plans of E environments, K each. A decoder may overwrite its own at its next run."""

    tokens: Tensor  # [E, K, n], added so far
    log_prob: Tensor  # [E, K], of all sampled tokens under the unfiltered distribution
    rewards: Tensor  # [E, K, h], predicted; 0 after a predicted end
    value: Tensor  # [E, K], predicted return after the last reward; 0 after a predicted end
    ended: Tensor  # [E, K], whether the plan contains a stop token, so that it sees the episode end
    identity: Tensor  # [E, K], a hash of all sampled states and actions: equal for copies
    prompt: Tensor | None = None  # [E, L], what all candidates continue
    bins: "Bins | None" = None  # what tokens stand for, while an objective looks

    @staticmethod
    def start(prompt: Tensor) -> "Candidates":
        """One empty candidate for each environment: prompt [E, L]."""
        shape, device = (len(prompt), 1), prompt.device
        return Candidates(
            tokens=prompt.new_empty(*shape, 0),
            log_prob=torch.zeros(shape, device=device),
            rewards=torch.zeros(*shape, 0, device=device),
            value=torch.zeros(shape, device=device),
            ended=torch.zeros(shape, dtype=torch.bool, device=device),
            identity=torch.zeros(shape, dtype=torch.long, device=device),
            prompt=prompt,
        )

    def select(self, parents: Tensor) -> "Candidates":
        """Copies of some candidates: parents [E, K']."""
        return replace(
            self,
            tokens=_pick(self.tokens, parents),
            log_prob=_pick(self.log_prob, parents),
            rewards=_pick(self.rewards, parents),
            value=_pick(self.value, parents),
            ended=_pick(self.ended, parents),
            identity=_pick(self.identity, parents),
        )

    @property
    def states(self) -> Tensor:
        """States in real units [E, K, h, O], the current one first: action i is taken in state i."""
        return self._decode(self._layout.observation)

    @property
    def actions(self) -> Tensor:
        """Actions in real units [E, K, h, A]. After a predicted end, states and actions are 0."""
        return self._decode(self._layout.action)

    @property
    def alive(self) -> Tensor:
        """Whether each transition takes place [E, K, h]: false from a predicted end on."""
        _, goes_on = self._transitions()
        return goes_on[..., self._layout.action.stop - 1]

    @property
    def _layout(self) -> TokenLayout:
        assert self.bins is not None, "tokens are decoded for objectives only"
        return self.bins.layout

    def _decode(self, slots: slice) -> Tensor:
        rows, goes_on = self._transitions()
        assert self.bins is not None
        table = self.bins.values_and_stop
        decoded = table[torch.arange(slots.start, slots.stop, device=table.device), rows[..., slots]]
        return decoded.where(goes_on[..., slots], 0.0)

    def _transitions(self) -> tuple[Tensor, Tensor]:
        """Tokens by transition, the current state first, and whether no end was predicted up to each [E, K, h, D]."""
        layout = self._layout
        assert self.prompt is not None and self.bins is not None
        stop = self.bins.values.shape[1]
        state = self.prompt[:, None, -layout.observation_dim :].expand(-1, self.tokens.shape[1], -1)
        rows = torch.cat([state, self.tokens], dim=2).view(*state.shape[:2], -1, layout.size)  # [E, K, h, D]
        goes_on = rows < stop
        goes_on[..., layout.action.stop :] = True  # stop tokens of rewards and values end nothing, as in `ended`
        return rows, goes_on.flatten(2).cumprod(dim=2).bool().view_as(rows)


@dataclass(frozen=True)
class Bins:
    """What tokens stand for: a layout and the value of every bin."""

    layout: TokenLayout
    values: Tensor  # [D, V]

    @property
    def values_and_stop(self) -> Tensor:
        """Values with a last column for the stop token, 0 [D, V + 1]."""
        return torch.cat([self.values, self.values.new_zeros(len(self.values), 1)], dim=1)


@dataclass(frozen=True)
class Run:
    """Slots to extend every candidate by, between two selections."""

    num_slots: int  # S
    sampler: Sampler
    noise: Gumbel | None  # None takes the most likely tokens
    allow_stop: bool = True  # whether the stop token may be chosen
    values: Tensor | None = None  # [2, V], bin values of reward and value: set for the run that predicts them
    percentile: float | None = None  # of the predicted reward and value; None for their means

    def __post_init__(self) -> None:
        """A run predicts a reward and a value, or neither."""
        assert self.values is None or self.num_slots == len(self.values) == 2


class Decoder(Protocol):
    """Candidates of E environments and what may follow each.

    All prompts of one search have the same length. A search starts with one candidate per environment, the prompt.
    """

    candidates: Candidates
    """The current candidates."""

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search: prompt [E, L], room for `max_new` more tokens of at most `max_candidates` candidates.

        `map_embedding` [E, width] comes from `GPT.encode_map`.
        """

    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; call it at most once per token."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K'] are indices of the old ones."""

    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate. Between two selections candidates are independent."""

    def keep(self, scores: Tensor, width: int, *, distinct: bool) -> Tensor:
        """Indices of the best candidates, best first: scores [E, K] -> [E, width].

        With `distinct`, copies of a better candidate rank after all others.
        """


class StepwiseDecoder(ABC):
    """Bookkeeping of a decoder that reads token by token.

    The model sees at most `window` transitions. When a candidate begins another one, the oldest slides out and
    positions restart; the goal stays in front.
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
        """Start a search, see `Decoder`."""
        del max_candidates
        layout = self.gpt.layout
        assert (map_embedding is None) == (self.gpt.map_encoder is None), "exactly models with maps get an embedding"
        if self.window == 1 and not layout.goal_dim and prompt.shape[1] + max_new > layout.size:
            raise ValueError(
                "search.window must be at least 2 to plan more than one transition without a goal (when the second "
                "begins, the first has slid out), got 1"
            )
        self.prompt, self.map_embedding = prompt, map_embedding
        self.candidates = Candidates.start(prompt)

    @abstractmethod
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]."""

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self.candidates = replace(self.candidates, tokens=torch.cat([self.tokens, tokens[:, :, None]], dim=2))

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        self.candidates = self.candidates.select(parents)

    @torch.no_grad()
    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate."""
        for run in runs:
            for slot in range(run.num_slots):
                logits = self.logits()
                allowed = logits
                if not run.allow_stop:
                    allowed = logits.clone()
                    allowed[..., -1] = -torch.inf
                token = draw(run.sampler, allowed, None if run.noise is None else run.noise.slot(slot))
                self.append(token)
                self._record(run, slot, logits, token)

    def keep(self, scores: Tensor, width: int, *, distinct: bool) -> Tensor:
        """Indices of the best candidates, see `Decoder`."""
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if distinct:
            rank = rank + scores.shape[1] * _repeated(self.candidates.identity, rank)
        return rank.argsort(dim=1)[:, :width]

    def _record(self, run: Run, slot: int, logits: Tensor, token: Tensor) -> None:
        """Update what is known of the candidates: logits [E, K, V + 1] and the token sampled from them [E, K]."""
        known = self.candidates
        log_prob = known.log_prob + logits.log_softmax(dim=-1).gather(-1, token[..., None])[..., 0]
        if run.values is None:
            ended = known.ended | (token == logits.shape[-1] - 1)
            identity = known.identity * _HASH_STEP + (token + 1)  # a hash may overflow
            self.candidates = replace(known, log_prob=log_prob, ended=ended, identity=identity)
            return
        expected = predicted_value(logits, run.values[slot], run.percentile).masked_fill(known.ended, 0.0)
        if slot == 0:
            rewards = torch.cat([known.rewards, expected[..., None]], dim=-1)
            self.candidates = replace(known, log_prob=log_prob, rewards=rewards)
        else:
            self.candidates = replace(known, log_prob=log_prob, value=expected)

    def num_cropped(self, num_more: int = 0) -> int:
        """Tokens after the goal that have slid out of the window, in whole transitions.

        With `num_more`: how many it will be after that many more tokens.
        """
        layout = self.gpt.layout
        after_goal = self.prompt.shape[1] + self.tokens.shape[2] + num_more - layout.goal_dim
        return max(after_goal // layout.size - (self.window - 1), 0) * layout.size

    def visible(self, cropped: int) -> tuple[Tensor, Tensor]:
        """Prompts [E, L'] and candidates [E, K, n'] without the first `cropped` tokens after the goal."""
        goal = self.gpt.layout.goal_dim
        in_prompt = min(cropped, self.prompt.shape[1] - goal)
        prompt = self.prompt
        if in_prompt:
            prompt = torch.cat([prompt[:, :goal], prompt[:, goal + in_prompt :]], dim=1)
        return prompt, self.tokens[:, :, cropped - in_prompt :]


class NaiveDecoder(StepwiseDecoder):
    """The readable oracle: a full forward pass over everything visible, for every token of every candidate."""

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]."""
        prompt, own = self.visible(self.num_cropped())
        shared = prompt[:, None].expand(-1, own.shape[1], -1)
        rows = torch.cat([shared, own], dim=2).flatten(0, 1)
        maps = None if self.map_embedding is None else self.map_embedding.repeat_interleave(own.shape[1], dim=0)
        last: Tensor = self.gpt(rows, maps)[:, -1]
        return last.view(*own.shape[:2], -1)


def _pick(part: Tensor, rows: Tensor) -> Tensor:
    """Rows of every environment: part [E, K, ...], rows [E, K'] -> [E, K', ...]."""
    if part.dim() == 2:
        return part.gather(1, rows)
    return part.gather(1, rows[..., None].expand(-1, -1, part.shape[2]))


def _repeated(identity: Tensor, rank: Tensor) -> Tensor:
    """Which candidates are copies of a better one: identity, rank [E, K] -> [E, K], 0 or 1."""
    by_rank = rank.argsort(dim=1)
    order = by_rank.gather(1, identity.gather(1, by_rank).argsort(dim=1, stable=True))  # copies adjacent, best first
    ordered = identity.gather(1, order)
    same = torch.zeros_like(ordered)
    same[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]).long()
    return torch.zeros_like(same).scatter(1, order, same)
