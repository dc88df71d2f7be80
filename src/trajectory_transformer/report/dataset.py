"""What a dataset holds, dimension by dimension: as numbers, as tokens, as a picture."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.tokens.windows import episode_columns, fit_discretizer

_MAX_PANELS = 40  # a picture of more dimensions than this shows the first ones


@dataclass(frozen=True)
class Dimension:
    """One slot of a transition: its values, and the tokens they would become."""

    name: str
    low: float
    mean: float
    high: float
    distinct: int
    bins: int  # tokens that occur
    top_share: float  # share of the most common token
    note: str  # what may surprise: constant, a copy of another dimension, categories


def dimensions(dataset: Dataset, config: TokenConfig) -> Iterator[Dimension]:
    """Every slot in the order of the tokens: observations, actions, reward and value."""
    discretizer = fit_discretizer(dataset, config)
    parts = [episode_columns(episode, config) for episode in dataset]
    slots = [column for part in zip(*parts, strict=True) for column in np.concatenate(part).T]
    names = [*dataset.observation_names, *dataset.action_names, "reward", "return to go"]
    categories = [*dataset.observation_categories, *dataset.action_categories, 0, 0]
    seen: dict[bytes, str] = {}
    for index, (name, column) in enumerate(zip(names, slots, strict=False)):
        counts = np.bincount(discretizer.encode(column[:, None], slice(index, index + 1)).ravel())
        distinct = len(np.unique(column))
        content = np.ascontiguousarray(column).tobytes()
        notes = ["constant"] if distinct == 1 else [f"same as {seen[content]}"] if content in seen else []
        notes += [f"{categories[index]} categories"] if categories[index] else []
        seen.setdefault(content, name)
        yield Dimension(
            name=name,
            low=float(column.min()),
            mean=float(column.mean()),
            high=float(column.max()),
            distinct=distinct,
            bins=int((counts > 0).sum()),
            top_share=float(counts.max() / counts.sum()),
            note=", ".join(notes),
        )


def dataset_figure(dataset: Dataset, columns: int = 4) -> Figure:
    """Histograms of returns, lengths and every dimension."""
    steps = {
        **dict(zip(dataset.observation_names, np.concatenate([e.observations for e in dataset]).T, strict=True)),
        **dict(zip(dataset.action_names, np.concatenate([e.actions for e in dataset]).T, strict=True)),
    }
    panels: dict[str, tuple[npt.NDArray[np.floating], str]] = {}
    if dataset.has_rewards:
        panels["return of an episode"] = (np.array([e.total_reward for e in dataset]), "tab:green")
    panels["steps of an episode"] = (np.array([float(len(e)) for e in dataset]), "tab:green")
    for name, values in list(steps.items())[:_MAX_PANELS]:
        panels[name] = (values, "tab:orange" if name in dataset.action_names else "tab:blue")
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
