"""Plans stored as they were made, to look at later."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trajectory_transformer.files import replacing
from trajectory_transformer.planner import PlanTrace
from trajectory_transformer.tokens.tokenizer import Tokenizer


def save_traces(path: str | Path, traces: Sequence[PlanTrace], tokenizer: Tokenizer) -> None:
    """Write plans as one `.npz`: P plans of K kept candidates each, best first.

    `env` and `step` [P] are the environment and the step of the episode, `state` [P, O] is the current state, `scores`
    [P, K] are the candidates' scores, `tokens` [P, K, n] the candidates from the first action on. `actions`
    [P, K, H, A] and `states` [P, K, H - 1, O] are the same in real units, NaN for stop tokens.
    """
    # A deadline may have made plans narrower or shorter.
    widest, longest = (max(trace.tokens.shape[axis] for trace in traces) for axis in (0, 1))
    tokens = np.full((len(traces), widest, longest), tokenizer.stop)
    scores = np.full((len(traces), widest), np.nan, np.float32)
    for index, trace in enumerate(traces):
        tokens[index, : trace.tokens.shape[0], : trace.tokens.shape[1]] = trace.tokens
        scores[index, : len(trace.scores)] = trace.scores
    starts = np.stack([trace.prompt[-tokenizer.layout.observation_dim :] for trace in traces])
    decoded = tokenizer.decode(np.repeat(starts[:, None], tokens.shape[1], axis=1), tokens)
    arrays = {
        "env": np.array([trace.env for trace in traces]),
        "step": np.array([trace.step for trace in traces]),
        "state": decoded.states[:, 0, 0],
        "scores": scores,
        "tokens": tokens,
        "actions": decoded.actions,
        "states": decoded.states[:, :, 1:],
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
