"""Plans stored as they were made, for later viewing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trajectory_transformer.files import replacing
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanTrace


def save_traces(path: Path, traces: Sequence[PlanTrace], model: TrajectoryModel) -> None:
    """Write plans as one `.npz`: P plans of K kept candidates each, best first.

    `env` and `step` [P] say whose plan it was and at which step of the episode, `state` [P, O] where it started,
    `scores` [P, K] what the candidates were worth, `tokens` [P, K, n] the candidates from the first action on, and
    `actions` [P, K, H, A] and `states` [P, K, H - 1, O] the same in real units, NaN after a predicted end.
    """
    layout, discretizer = model.layout, model.discretizer
    tokens = np.stack([trace.tokens for trace in traces])
    starts = np.stack([trace.prompt[-layout.observation_dim :] for trace in traces])
    filler = np.zeros((*tokens.shape[:2], layout.observation_dim), dtype=tokens.dtype)
    rows = np.concatenate([filler, tokens], axis=-1).reshape(*tokens.shape[:2], -1, layout.size)
    arrays = {
        "env": np.array([trace.env for trace in traces]),
        "step": np.array([trace.step for trace in traces]),
        "state": discretizer.decode(starts, layout.observation),
        "scores": np.stack([trace.scores for trace in traces]),
        "tokens": tokens,
        "actions": discretizer.decode(rows[..., layout.action], layout.action),
        "states": discretizer.decode(rows[:, :, 1:, layout.observation], layout.observation),
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
