"""One interface for everything that predicts: the Trajectory Transformer and the probabilistic ensemble.

The Markovian variant is a `TransformerPredictor` of a model trained with `model.window` 2: every prediction is computed
from the tokens of one past transition and of the current one alone, because the decoder starts again with the visible
transitions whenever the window slides. What lies further back cannot change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.analysis.likelihood import Futures
from trajectory_transformer.analysis.masking import MASKED
from trajectory_transformer.checkpoint import checkpoint_kind
from trajectory_transformer.config import SearchConfig, require
from trajectory_transformer.data.episode import DoubleArray, FloatArray
from trajectory_transformer.gpu.backends import make_decoder
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.pets import Behaviour, Ensemble
from trajectory_transformer.pets.ensemble import KIND as ENSEMBLE
from trajectory_transformer.pets.ensemble import Propagation
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.search.predict import sample_futures
from trajectory_transformer.tokens.discretizer import TokenArray

BEHAVIOUR = "behaviour"
"""Folder of the cloned policy within that of an ensemble."""
_FAR = 1e30  # stands for samples that have diverged beyond what floats hold


@dataclass(frozen=True)
class Past:
    """C transitions before each of S states, oldest first; NaN for unobserved entries."""

    states: FloatArray  # [S, C, O]
    actions: FloatArray  # [S, C, A]


class Predictor(Protocol):
    """Anything that predicts states. Unobserved entries of states are NaN."""

    def predict(
        self,
        state: FloatArray,
        past: Past,
        actions: FloatArray | None,
        steps: int,
        samples: int,
        *,
        seed: int = 0,
    ) -> Futures:
        """Sample futures from states [S, O] after their past.

        With `actions` [S, H, A] all samples of a start take these; without, each sample takes those that the predictor
        expects of the policy that recorded the data.
        """

    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        """Log-density of the observed entries of next states [S, O] after states [S, O] and actions [S, A] -> [S]."""


class TransformerPredictor:
    """A Trajectory Transformer of states and actions: samples tokens, and each bin is a uniform density."""

    def __init__(
        self,
        model: TrajectoryModel,
        *,
        temperature: float = 1.0,
        backend: str = "cached",
        max_rows: int = 2048,
    ) -> None:
        """Predict with a model; `max_rows` sequences at a time bound the memory."""
        layout = model.layout
        if layout.rewards or layout.goal_dim or layout.map_shape:
            raise ValueError(
                "prediction studies need a model of states and actions only, the model also has rewards, goals or "
                "maps: train with --tokens.rewards false, without goals and maps"
            )
        require(max_rows >= 1, "max_rows must be at least 1", max_rows)
        self.model = model
        self.temperature = temperature
        self.max_rows = max_rows
        self.masked = model.metadata.get(MASKED) is not None
        self._search = SearchConfig(backend=backend)  # type: ignore[arg-type]

    @property
    def edges(self) -> tuple[DoubleArray, ...]:
        """Edges of the bins of each state dimension, without the bin of the mask token."""
        edges = self.model.tokenizer.discretizer.edges[self.model.layout.observation]
        return tuple(bounds[:-1] for bounds in edges) if self.masked else edges

    @property
    def mask_tokens(self) -> TokenArray:
        """The mask token of each state dimension [O]."""
        edges = self.model.tokenizer.discretizer.edges[self.model.layout.observation]
        return np.array([max(len(bounds) - 2, 0) for bounds in edges])

    @torch.inference_mode()
    def predict(
        self,
        state: FloatArray,
        past: Past,
        actions: FloatArray | None,
        steps: int,
        samples: int,
        *,
        seed: int = 0,
    ) -> Futures:
        """Sample futures, see `Predictor`. The past beyond the window of the model is not read."""
        _check(state, past, actions, steps, samples)
        model, layout = self.model, self.model.layout
        prompts = torch.from_numpy(self._prompts(state, past, model.gpt.config.window - 1))
        given = None if actions is None else model.tokenizer.discretizer.encode(actions, layout.action)
        states = np.empty((len(state), samples, steps, layout.observation_dim))
        ended = np.empty(states.shape[:3], dtype=np.bool_)
        count = min(samples, self.max_rows)  # samples of a start at a time
        group = max(self.max_rows // count, 1)  # starts at a time
        decoder = make_decoder(model.gpt, self._search)
        for first in range(0, len(state), group):
            rows = slice(first, min(first + group, len(state)))
            for begin in range(0, samples, count):
                seeds = [stream_seed(seed, index, begin) for index in range(rows.start, rows.stop)]
                tokens = sample_futures(
                    decoder,
                    prompts[rows].to(model.device),
                    horizon=steps,
                    num_samples=min(count, samples - begin),
                    seeds=torch.tensor(seeds, device=model.device),
                    actions=None if given is None else torch.from_numpy(given[rows]).to(model.device),
                    temperature=self.temperature,
                )
                part = self._decode(tokens.cpu().numpy())
                states[rows, begin : begin + count], ended[rows, begin : begin + count] = part
        return Futures(states, ended)

    @torch.inference_mode()
    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        """Log-density of next states, see `Predictor`.

        For a model of masked states the density is that of observed entries, given which entries are observed.
        """
        model, layout = self.model, self.model.layout
        window = model.gpt.config.window
        require(window >= 2, "the model must see the transition before a state: model.window at least 2", window)
        prompts = self._prompts(state, past, window - 2)
        following = self._state_tokens(next_state)
        acted = model.tokenizer.discretizer.encode(action, layout.action)
        rows = torch.from_numpy(np.concatenate([prompts, acted, following], axis=1))
        found = []
        for part, targets in zip(torch.split(rows, 256), torch.split(torch.from_numpy(following), 256), strict=True):
            logits = model.gpt(part[:, :-1].to(model.device))[:, -layout.observation_dim :].double()
            log_probs = logits.log_softmax(dim=-1)
            chosen = log_probs.gather(-1, targets[..., None].to(model.device))[..., 0]  # [B, O]
            if self.masked:
                hidden = torch.from_numpy(self.mask_tokens).to(model.device)
                hidden_prob = log_probs.gather(-1, hidden.expand(len(part), -1)[..., None])[..., 0].exp()
                chosen = chosen - torch.log1p(-hidden_prob)
            found.append(chosen.cpu().numpy())
        each = np.concatenate(found)
        for dim, bounds in enumerate(self.edges):
            if len(bounds) > 1:
                widths = np.diff(bounds)
                each[:, dim] -= np.log(widths[np.minimum(following[:, dim], len(widths) - 1)])
        return np.asarray(np.where(np.isnan(next_state), 0.0, each).sum(axis=1))

    def _state_tokens(self, states: FloatArray) -> TokenArray:
        """Tokens of states [..., O]; that of the mask for unobserved entries."""
        hidden = np.isnan(states)
        _check_hidden(hidden, self.masked)
        tokens = self.model.tokenizer.encode_states(np.where(hidden, np.float32(0.0), states))
        if not self.masked:
            return tokens
        # A value above the range of the data belongs to the last observed bin, not to the mask.
        return np.where(hidden, self.mask_tokens, np.minimum(tokens, self.mask_tokens - 1))

    def _prompts(self, state: FloatArray, past: Past, context: int) -> TokenArray:
        """Tokens of up to `context` past transitions and of the state: [S, L]."""
        first = max(past.states.shape[1] - context, 0)
        rows = [
            self._state_tokens(past.states[:, first:]),
            self.model.tokenizer.discretizer.encode(past.actions[:, first:], self.model.layout.action),
        ]
        transitions = np.concatenate(rows, axis=2).reshape(len(state), -1)
        return np.concatenate([transitions, self._state_tokens(state)], axis=1)

    def _decode(self, tokens: TokenArray) -> tuple[DoubleArray, npt.NDArray[np.bool_]]:
        """States and ends of continuations [E, N, H * D] -> [E, N, H, O] and [E, N, H]."""
        layout, tokenizer = self.model.layout, self.model.tokenizer
        ahead = tokens.reshape(*tokens.shape[:2], -1, layout.size)  # [E, N, H, D], action first
        following = ahead[..., layout.action_dim :]
        ended = np.logical_or.accumulate((ahead == tokenizer.stop).any(axis=-1), axis=-1)
        states = tokenizer.discretizer.decode(following, layout.observation)
        if self.masked:
            states = np.where(following == self.mask_tokens, np.nan, states)
        return states, ended


class EnsemblePredictor:
    """The probabilistic ensemble, with a policy cloned from the same data where actions are not given.

    A masked ensemble reads states as in training: the start as it was observed, and of predicted states a random part
    (`hidden` is the probability of a hidden entry), another one for each group of samples.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        behaviour: Behaviour | None = None,
        *,
        hidden: float = 0.5,
        propagation: Propagation = "ts1",
        max_rows: int = 16384,
    ) -> None:
        """Join an ensemble and a policy for its predicted states; `max_rows` futures at a time bound the memory."""
        require(max_rows >= 1, "max_rows must be at least 1", max_rows)
        self.ensemble = ensemble
        self.behaviour = behaviour
        self.hidden = hidden
        self.propagation: Propagation = propagation
        self.max_rows = max_rows

    @torch.no_grad()
    def predict(
        self,
        state: FloatArray,
        past: Past,
        actions: FloatArray | None,
        steps: int,
        samples: int,
        *,
        seed: int = 0,
    ) -> Futures:
        """Sample futures, see `Predictor`. The past is not read, and no future ends."""
        _check(state, past, actions, steps, samples)
        _check_hidden(np.isnan(state), self.ensemble.masked)
        require(
            actions is not None or self.behaviour is not None,
            "an ensemble needs a cloned policy to predict without given actions",
            "none",
        )
        count = max(self.max_rows // samples, 1)  # starts at a time
        parts = []
        for first in range(0, len(state), count):
            rows = slice(first, first + count)
            given = None if actions is None else actions[rows]
            parts.append(self._sample(state[rows], given, steps, samples, seed=stream_seed(seed, first)))
        states = np.concatenate(parts)
        return Futures(states, np.zeros(states.shape[:3], dtype=np.bool_))

    def _sample(
        self, state: FloatArray, actions: FloatArray | None, steps: int, samples: int, *, seed: int
    ) -> DoubleArray:
        """Sampled states [S, N, H, O]."""
        ensemble = self.ensemble
        # Masks differ between groups of samples, so a start is repeated once per group.
        groups = -(-samples // ensemble.config.num_elites) if ensemble.masked else 1
        each = -(-samples // groups)
        start = torch.from_numpy(np.nan_to_num(state)).expand(groups, -1, -1)
        generator = torch.Generator(ensemble.device).manual_seed(stream_seed(seed, 0))
        masks: Tensor | None = None
        if ensemble.masked:
            shape = (groups, len(state), steps, ensemble.observation_dim)
            masks = (torch.rand(shape, device=ensemble.device, generator=generator) >= self.hidden).float()
            masks[:, :, 0] = torch.from_numpy((~np.isnan(state)).astype(np.float32)).to(ensemble.device)
        found = ensemble.predict(
            start,
            self._policy(masks, generator) if actions is None else torch.from_numpy(actions).expand(groups, -1, -1, -1),
            steps,
            each,
            propagation=self.propagation,
            seed=stream_seed(seed, 1),
            masks=masks,
        ).states  # [N / groups, groups, S, H, O]
        states = found.flatten(0, 1)[:samples].transpose(0, 1).double().cpu().numpy()
        return np.asarray(np.nan_to_num(states, nan=_FAR, posinf=_FAR, neginf=-_FAR))

    def log_prob(self, state: FloatArray, past: Past, action: FloatArray, next_state: FloatArray) -> DoubleArray:
        """Log-density of next states under the mixture of the networks, see `Predictor`."""
        del past
        hidden, hidden_next = np.isnan(state), np.isnan(next_state)
        _check_hidden(hidden, self.ensemble.masked)
        found = self.ensemble.log_prob(
            np.nan_to_num(state),
            action,
            np.nan_to_num(next_state),
            mask=(~hidden).astype(np.float32) if self.ensemble.masked else None,
            next_mask=(~hidden_next).astype(np.float32),
        )
        return np.asarray(found.double().cpu().numpy())

    def _policy(self, masks: Tensor | None, generator: torch.Generator) -> "_Acting":
        assert self.behaviour is not None
        return _Acting(self.behaviour, None if masks is None else masks.flatten(0, 1), generator)


class _Acting:
    """The cloned policy in predicted states, step by step; it reads what the ensemble reads."""

    def __init__(self, behaviour: Behaviour, masks: Tensor | None, generator: torch.Generator) -> None:
        self._behaviour = behaviour
        self._masks = masks  # [S, H, O]
        self._generator = generator
        self._step = 0

    def __call__(self, states: Tensor) -> Tensor:
        """States [P, O] -> actions [P, A]; states of the same start come one after the other for each sample."""
        masks = None
        if self._masks is not None:
            masks = self._masks[:, self._step].repeat(len(states) // len(self._masks), 1)
        self._step += 1
        return self._behaviour.sample(states, self._generator, masks)


def load_predictor(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    temperature: float = 1.0,
    backend: str = "cached",
    max_rows: int = 2048,
    hidden: float = 0.5,
) -> TransformerPredictor | EnsemblePredictor:
    """The predictor in a folder: a run of `tt train`, or an ensemble with its cloned policy that `tt pets` wrote."""
    if checkpoint_kind(folder) == ENSEMBLE:
        policy = Path(folder) / BEHAVIOUR
        behaviour = Behaviour.load(policy, device) if policy.is_dir() else None
        return EnsemblePredictor(Ensemble.load(folder, device), behaviour, hidden=hidden)
    model = TrajectoryModel.load(folder, device)
    return TransformerPredictor(model, temperature=temperature, backend=backend, max_rows=max_rows)


def _check(state: FloatArray, past: Past, actions: FloatArray | None, steps: int, samples: int) -> None:
    """Refuse shapes that do not fit together."""
    require(steps >= 1 and samples >= 1, "steps and samples must be at least 1", (steps, samples))
    sizes: Sequence[int] = [len(state), len(past.states), len(past.actions)]
    require(len(set(sizes)) == 1, "states and their past must have as many starts", sizes)
    require(
        past.states.shape[1] == past.actions.shape[1],
        "every past transition needs a state and an action",
        (past.states.shape[1], past.actions.shape[1]),
    )
    if actions is not None:
        expected = (len(state), steps)
        require(actions.shape[:2] == expected, f"given actions must have shape {expected} + [A]", actions.shape)


def _check_hidden(hidden: npt.NDArray[np.bool_], masked: bool) -> None:
    """Refuse unobserved entries for a predictor that never saw any."""
    require(masked or not bool(hidden.any()), "unobserved entries need a predictor trained with masks", "one without")
