"""Benchmark tasks by name: the dataset collected by a recipe if it exists, else Minari's public data of the same task.

Different policies made the two, so compare scores only on the same data.
"""

import re

from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.sources.minari import is_local, load_minari

_TASK = re.compile(
    r"(hopper|halfcheetah|walker2d|ant|humanoid)-(simple|medium|expert|medium-replay|medium-expert)"
    r"|(antmaze)-(umaze|(medium|large)-(play|diverse))"
)
# Datasets of a task in Minari's `mujoco` namespace, which has no replay buffers.
_PUBLIC = {
    "simple": ("simple",),
    "medium": ("medium",),
    "expert": ("expert",),
    "medium-expert": ("medium", "expert"),
}


def is_task(name: str) -> bool:
    """Whether a name is a benchmark task, such as `hopper-medium`."""
    return _TASK.fullmatch(name) is not None


def load_task(name: str) -> Dataset:
    """Load the dataset of a benchmark task."""
    own = f"tt/{name}-v0"
    if is_local(own):
        return load_minari(own)
    match = _TASK.fullmatch(name)
    assert match is not None, "callers check is_task"
    missing = f"{name}: not collected yet (run: tt collect --recipe {name} --policies DIR)"
    try:
        parts = [load_minari(f"mujoco/{match[1]}/{kind}-v0") for kind in _PUBLIC.get(match[2] or "", ())]
    except ValueError as error:
        raise ValueError(f"{missing}, and the public dataset is not available: {error}") from error
    if not parts:
        raise ValueError(f"{missing}, and Minari has no public dataset of this task")
    episodes = tuple(episode for part in parts for episode in part)
    source = " + ".join(str(part.metadata["minari"]) for part in parts)
    first = parts[0]
    metadata = {**first.metadata, "minari": source}
    return Dataset(episodes, metadata, first.observation_dimensions, first.action_dimensions)
