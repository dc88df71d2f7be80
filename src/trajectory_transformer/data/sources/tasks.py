"""Benchmark tasks by name: our own collection where there is one, else Minari's public data for the same task.

The two are made by different policies: scores compare methods on the same data, not across the two.
"""

import re

from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.sources.minari import is_local, load_minari

_TASK = re.compile(r"(hopper|halfcheetah|walker2d|ant|humanoid)-(simple|medium|expert|medium-replay|medium-expert)")
# What Minari's `mujoco` namespace has of a task; it keeps no replay buffers.
_PUBLIC = {
    "simple": ("simple",),
    "medium": ("medium",),
    "expert": ("expert",),
    "medium-expert": ("medium", "expert"),
}


def is_task(name: str) -> bool:
    """Whether a name is that of a benchmark task: `hopper-medium`."""
    return _TASK.fullmatch(name) is not None


def load_task(name: str) -> Dataset:
    """The dataset of a benchmark task."""
    own = f"tt/{name}-v0"
    if is_local(own):
        return load_minari(own)
    match = _TASK.fullmatch(name)
    assert match is not None, "only names of tasks come here"
    missing = f"{name}: not collected yet (tt collect --recipe {name} --policies DIR)"
    try:
        parts = [load_minari(f"mujoco/{match[1]}/{kind}-v0") for kind in _PUBLIC.get(match[2], ())]
    except ValueError as error:
        raise ValueError(f"{missing}, and the public one is not here: {error}") from error
    if not parts:
        raise ValueError(f"{missing}, and Minari has no public one")
    episodes = tuple(episode for part in parts for episode in part)
    source = " + ".join(str(part.metadata["minari"]) for part in parts)
    first = parts[0]
    metadata = {**first.metadata, "minari": source}
    return Dataset(episodes, metadata, first.observation_dimensions, first.action_dimensions)
