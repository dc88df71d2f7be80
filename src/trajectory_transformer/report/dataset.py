"""Summaries of a dataset: statistics and tokens of every dimension, advice on the discount, histograms."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.report.plots import plain_label
from trajectory_transformer.results import counted
from trajectory_transformer.tokens.tokenizer import Tokenizer, rewards_of, slot_values, with_penalty

_MAX_PANELS = 40  # a figure shows at most this many dimensions
_DISCOUNTS = (0.95, 0.98, 0.99, 0.995, 0.997, 0.998, 0.999)  # candidates to suggest
_GOOD_CORRELATION, _POOR_CORRELATION = 0.95, 0.8
_MIN_EPISODES = 20  # a correlation over fewer episodes means little
_MANY_AT_LIMITS = 0.1  # share of actions at their limits that is reported


@dataclass(frozen=True)
class DimensionSummary:
    """Statistics of one slot of a transition: its values and their tokens."""

    name: str
    low: float
    mean: float
    high: float
    distinct: int  # number of distinct values
    bins: int  # number of tokens that occur
    top_share: float  # share of the most frequent token
    clipped: bool  # an action that is often at its minimum or maximum
    note: str  # constant, copy of another dimension, categories, share at limits


def summarize_dimensions(dataset: Dataset, config: TokenConfig) -> Iterator[DimensionSummary]:
    """Summarise every slot in the order of the tokens: observations, actions, reward and return to go."""
    tokenizer = Tokenizer.fit(dataset, config)
    discretizer = tokenizer.discretizer
    parts = [slot_values(episode, tokenizer.config) for episode in dataset]
    slots = [column for part in zip(*parts, strict=True) for column in np.concatenate(part).T]
    described = [*dataset.observation_dimensions, *dataset.action_dimensions]
    described += [Dimension("reward"), Dimension("return to go")]
    actions = range(dataset.observation_dim, len(described) - 2)
    seen: dict[bytes, str] = {}
    for index, (dimension, column) in enumerate(zip(described, slots, strict=False)):
        name, categories = dimension.name, dimension.categories
        counts = np.bincount(discretizer.encode(column[:, None], slice(index, index + 1)).ravel())
        distinct = len(np.unique(column))
        content = np.ascontiguousarray(column).tobytes()
        notes = ["constant"] if distinct == 1 else [f"same as {seen[content]}"] if content in seen else []
        notes += [f"{categories} categories"] if categories else []
        at_limits = float(np.mean((column == column.min()) | (column == column.max())))
        clipped = index in actions and not categories and distinct > 2 and at_limits >= _MANY_AT_LIMITS
        notes += [f"{100 * at_limits:.0f} % at limits"] if clipped else []
        seen.setdefault(content, name)
        yield DimensionSummary(
            name=name,
            low=float(column.min()),
            mean=float(column.mean()),
            high=float(column.max()),
            distinct=distinct,
            bins=int((counts > 0).sum()),
            top_share=float(counts.max() / counts.sum()),
            clipped=clipped,
            note=", ".join(notes),
        )


def discount_agreement(dataset: Dataset, config: TokenConfig) -> float | None:
    """Correlation over episodes between the return and the discounted return from the start.

    Planning by return ranks candidates by discounted returns, so a low correlation means that it prefers the wrong
    episodes. Only episodes that ended by termination or at the time limit count, because the return of the others is
    incomplete. None if these are too few or all have the same return.
    """
    limit = max((len(episode) for episode in dataset if not episode.terminated), default=0)
    complete = [episode for episode in dataset if episode.terminated or len(episode) == limit]
    if len(complete) < max(_MIN_EPISODES, len(dataset) / 2):
        return None
    returns, discounted = [], []
    config = with_penalty(config, dataset)
    for episode in complete:
        rewards, after = rewards_of(episode, config)
        returns.append(episode.total_reward)
        discounted.append(float(np.append(rewards, after) @ config.discount ** np.arange(len(rewards) + 1)))
    if np.ptp(returns) == 0 or np.ptp(discounted) == 0:
        return None
    return float(np.corrcoef(returns, discounted)[0, 1])


def discount_advice(dataset: Dataset, config: TokenConfig) -> str | None:
    """A warning if discounted returns rank the episodes differently from their returns; None otherwise."""
    agreement = discount_agreement(dataset, config) if dataset.has_rewards and config.rewards else None
    if agreement is None or agreement >= _POOR_CORRELATION:
        return None
    text = f"with tokens.discount {config.discount}, discounted returns rank these episodes differently from their "
    text += f"returns (correlation {agreement:.2f}), and planning by return follows the discounted returns"
    for discount in (each for each in _DISCOUNTS if each > config.discount):
        changed = replace(config, discount=discount, truncated="continue")
        found = discount_agreement(dataset, changed)
        if found is not None and found >= _GOOD_CORRELATION:
            return f"{text}; use --tokens.discount {discount} --tokens.truncated continue (correlation {found:.2f})"
    return text


def dataset_figure(dataset: Dataset, columns: int = 4) -> Figure:
    """Histograms of returns, episode lengths and every dimension."""
    # A list: an observation and an action may have the same name.
    steps = [
        (dimension.name, values, color)
        for dimensions, rows, color in (
            (dataset.observation_dimensions, [e.observations for e in dataset], "tab:blue"),
            (dataset.action_dimensions, [e.actions for e in dataset], "tab:orange"),
        )
        for dimension, values in zip(dimensions, np.concatenate(rows).T, strict=True)
    ]
    panels: list[tuple[str, npt.NDArray[np.floating], str]] = []
    if dataset.has_rewards:
        panels.append(("return per episode", np.array([e.total_reward for e in dataset]), "tab:green"))
    panels.append(("steps per episode", np.array([float(len(e)) for e in dataset]), "tab:green"))
    panels += steps[:_MAX_PANELS]
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, values, color) in zip(axes, panels, strict=False):
        panel.hist(values, bins=60, color=color)
        panel.set_title(plain_label(name), fontsize=9)
        panel.tick_params(labelsize=7)
        panel.set_yticks([])
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    hidden = max(len(steps) - _MAX_PANELS, 0)
    title = f"{counted(len(dataset), 'episode')}, {dataset.num_steps} steps"
    figure.suptitle(title + (f"; {hidden} more dimensions not shown" if hidden else ""), fontsize=11)
    return figure
