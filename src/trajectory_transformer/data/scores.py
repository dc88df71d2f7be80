"""Normalised scores: returns on a scale from 0 (a random policy) to 100 (an expert)."""

import re
from dataclasses import dataclass

from trajectory_transformer.data.episode import Metadata


@dataclass(frozen=True)
class References:
    """Mean returns of a random policy and of an expert policy."""

    random: float
    expert: float

    def __post_init__(self) -> None:
        """Check the order."""
        if not self.expert > self.random:
            raise ValueError(
                f"the return of the expert must exceed that of the random policy, {self.random}, got {self.expert}"
            )


# Reference returns of D4RL.
TASKS = {
    "hopper": References(random=-20.272305, expert=3234.3),
    "halfcheetah": References(random=-280.178953, expert=12135.0),
    "walker2d": References(random=1.629008, expert=4592.3),
    "ant": References(random=-325.6, expert=3879.7),
}


def references_of(env_id: str, metadata: Metadata | None = None) -> References | None:
    """References from a dataset's metadata (`ref_min_score`, `ref_max_score`), else of the task; None if unknown."""
    low, high = ((metadata or {}).get(key) for key in ("ref_min_score", "ref_max_score"))
    if isinstance(low, int | float) and isinstance(high, int | float):
        return References(float(low), float(high))
    return TASKS.get(re.sub(r"-v\d+$", "", env_id.rpartition("/")[2]).lower())


def normalized_score(total_reward: float, references: References) -> float:
    """Normalised score of a return: 0 for the random policy, 100 for the expert."""
    return 100.0 * (total_reward - references.random) / (references.expert - references.random)
