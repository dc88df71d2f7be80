"""What a user should know about data before a model is trained on it."""

from collections.abc import Iterator

import numpy as np

from trajectory_transformer.data.episode import Dataset, Dimension, DoubleArray
from trajectory_transformer.tokens.tokenizer import Tokenizer, slot_values

_MANY = 100  # values; with fewer, one other value is no sign of bad bins
_FAR = 1e6  # values this many times further from the median than usual are reported


def dataset_warnings(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    """Sentences about unused goals, replaced rewards, values far from all others, and dimensions in a single bin."""
    config = tokenizer.config
    if dataset.episodes[0].goal is not None and not config.goal_dims:
        yield (
            "the episodes have goals, but tokens.goal_dims is empty, so the model does not see them; name the "
            "observation dimensions that a goal refers to, for example --tokens.goal_dims '[0, 1]'"
        )
    terminated = sum(episode.terminated for episode in dataset)
    if config.rewards and terminated and config.termination_penalty is not None:
        yield (
            f"in {terminated} of {len(dataset)} episodes the reward of the last step counts as "
            f"{config.termination_penalty:.4g}, because it ended the task (--tokens.termination_penalty null keeps it)"
        )
    parts = [slot_values(episode, config) for episode in dataset]
    slots = [column for part in zip(*parts, strict=True) for column in np.concatenate(part).T]
    described = [*dataset.observation_dimensions, *dataset.action_dimensions]
    described += [Dimension("reward"), Dimension("return to go")]
    for index, (dimension, column) in enumerate(zip(described, slots, strict=False)):
        if dimension.categories or column.min() == column.max():
            continue
        extreme = _far_value(column)
        if extreme is not None:
            yield (
                f"{dimension.name} has the value {extreme:.3g}, more than a million times further from the median than "
                "usual; check the recording"
            )
        counts = np.bincount(tokenizer.discretizer.encode(column[:, None], slice(index, index + 1)).ravel())
        if np.count_nonzero(counts) == 1 or counts.max() == len(column) - 1 > _MANY:
            yield (
                f"{dimension.name}: {counts.max()} of {len(column)} values fall into one bin, so the model cannot tell "
                f"them apart; use --tokens.discretizer quantile, or more than {config.num_bins} bins"
            )


def _far_value(column: DoubleArray) -> float | None:
    """The value furthest from the median, if that is further by far than others: column [N]."""
    distance = np.abs(column - np.median(column))
    usual = float(np.median(distance[distance > 0]))
    furthest = int(np.argmax(distance))
    return float(column[furthest]) if distance[furthest] > _FAR * usual else None
