"""What a dataset holds, dimension by dimension: as numbers, as tokens, as a picture."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.tokens.tokenizer import Tokenizer, rewards_of, slot_values

_MAX_PANELS = 40  # a picture of more dimensions than this shows the first ones
_LONGER_SIGHTS = (0.95, 0.98, 0.99, 0.995, 0.997, 0.998, 0.999)  # discounts to propose
_AGREEING, _DISAGREEING = 0.95, 0.8
_FEW = 20  # episodes that say nothing about all
_CUT_OFF = 0.1  # share of actions at their limits from which on it is worth a word


@dataclass(frozen=True)
class DimensionSummary:
    """One slot of a transition: its values, and the tokens they would become."""

    name: str
    low: float
    mean: float
    high: float
    distinct: int
    bins: int  # tokens that occur
    top_share: float  # share of the most common token
    cut_off: bool  # an action that is often at one of its limits
    note: str  # what may surprise: constant, a copy, categories, cut off


def dimensions(dataset: Dataset, config: TokenConfig) -> Iterator[DimensionSummary]:
    """Every slot in the order of the tokens: observations, actions, reward and value."""
    discretizer = Tokenizer.fit(dataset, config).discretizer
    parts = [slot_values(episode, config) for episode in dataset]
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
        cut_off = index in actions and not categories and distinct > 2 and at_limits >= _CUT_OFF
        notes += [f"{100 * at_limits:.0f} % at limits"] if cut_off else []
        seen.setdefault(content, name)
        yield DimensionSummary(
            name=name,
            low=float(column.min()),
            mean=float(column.mean()),
            high=float(column.max()),
            distinct=distinct,
            bins=int((counts > 0).sum()),
            top_share=float(counts.max() / counts.sum()),
            cut_off=cut_off,
            note=", ".join(notes),
        )


def discount_agreement(dataset: Dataset, config: TokenConfig) -> float | None:
    """How far episodes that earn more also earn more discounted from their start, by which plans are judged.

    A correlation over the episodes that the task or its time limit ended; of others nobody knows what they would have
    earned. None where those are few, or all alike.
    """
    limit = max((len(episode) for episode in dataset if not episode.terminated), default=0)
    whole = [episode for episode in dataset if episode.terminated or len(episode) == limit]
    if len(whole) < max(_FEW, len(dataset) / 2):
        return None
    earned, judged = [], []
    for episode in whole:
        rewards, after = rewards_of(episode, config)
        earned.append(episode.total_reward)
        judged.append(float(np.append(rewards, after) @ config.discount ** np.arange(len(rewards) + 1)))
    if np.ptp(earned) == 0 or np.ptp(judged) == 0:
        return None
    return float(np.corrcoef(earned, judged)[0, 1])


def discount_advice(dataset: Dataset, config: TokenConfig) -> str | None:
    """A sentence for those whose discount makes good episodes look no better than bad ones; None for all others."""
    agreement = discount_agreement(dataset, config) if dataset.has_rewards and config.rewards else None
    if agreement is None or agreement >= _DISAGREEING:
        return None
    text = f"tokens.discount {config.discount} ranks these episodes otherwise than their returns (correlation "
    text += f"{agreement:.2f}), and plans for return follow it"
    for discount in (each for each in _LONGER_SIGHTS if each > config.discount):
        longer = replace(config, discount=discount, truncated="continue")
        found = discount_agreement(dataset, longer)
        if found is not None and found >= _AGREEING:
            return f"{text}; --tokens.discount {discount} --tokens.truncated continue: {found:.2f}"
    return text


def dataset_figure(dataset: Dataset, columns: int = 4) -> Figure:
    """Histograms of returns, lengths and every dimension."""
    observation_names = [dimension.name for dimension in dataset.observation_dimensions]
    action_names = [dimension.name for dimension in dataset.action_dimensions]
    steps = {
        **dict(zip(observation_names, np.concatenate([e.observations for e in dataset]).T, strict=True)),
        **dict(zip(action_names, np.concatenate([e.actions for e in dataset]).T, strict=True)),
    }
    panels: dict[str, tuple[npt.NDArray[np.floating], str]] = {}
    if dataset.has_rewards:
        panels["return of an episode"] = (np.array([e.total_reward for e in dataset]), "tab:green")
    panels["steps of an episode"] = (np.array([float(len(e)) for e in dataset]), "tab:green")
    for name, values in list(steps.items())[:_MAX_PANELS]:
        panels[name] = (values, "tab:orange" if name in action_names else "tab:blue")
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, (values, color)) in zip(axes, panels.items(), strict=False):
        panel.hist(values, bins=60, color=color)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.set_yticks([])
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    hidden = len(steps) + 2 - len(panels) if len(steps) > _MAX_PANELS else 0
    title = f"{len(dataset)} episodes, {dataset.num_steps} steps"
    figure.suptitle(title + (f"; {hidden} more dimensions not shown" if hidden else ""), fontsize=11)
    return figure
