"""Figures of routes, training losses and predictions."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from trajectory_transformer.data.episode import Episode
from trajectory_transformer.envs.rooms import WALLS
from trajectory_transformer.files import parse_json, replacing
from trajectory_transformer.search.predict import Prediction

TIME_COLORS = "viridis"


def save_figure(figure: Figure, path: str | Path, dpi: int = 150) -> None:
    """Write a figure in the format that the suffix of the file names; it appears complete or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=Path(path).suffix.removeprefix(".") or "png")


def routes_figure(episodes: Sequence[Episode], columns: int = 4) -> Figure:
    """Routes of episodes, one panel each, coloured by time, on the map of the episode or in the four rooms."""
    on_maps = episodes[0].map is not None
    figure = _panels(episodes, columns, _draw_map if on_maps else _draw_rooms)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _panels(episodes: Sequence[Episode], columns: int, draw: Callable[[Axes, Episode], None]) -> Figure:
    """One panel per episode: the map or rooms, and the route."""
    rows = -(-len(episodes) // columns)
    figure = Figure(figsize=(2.4 * columns, 2.5 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for panel, episode in zip(panels, episodes, strict=False):
        draw(panel, episode)
        _draw_route(panel, episode)
    for panel in panels[len(episodes) :]:
        panel.set_axis_off()
    return figure


def _draw_rooms(panel: Axes, episode: Episode) -> None:
    """Draw the four rooms."""
    del episode
    panel.add_collection(LineCollection(list(WALLS), colors="black", linewidths=2.0, capstyle="round"))
    panel.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))


def _draw_map(panel: Axes, episode: Episode) -> None:
    """Draw the map of an episode: channel 0 holds walls, channel 1 doors."""
    assert episode.map is not None
    walls, doors = episode.map[0] > 0, episode.map[1] > 0
    panel.imshow(walls, cmap="Greys", vmin=0, vmax=1.4, interpolation="nearest")
    rows, columns = np.nonzero(doors)
    panel.plot(
        columns, rows, marker="s", markersize=5, color="orange", markeredgecolor="black", linestyle="none", label="door"
    )
    # Rooms fill only a part of the map: crop to a square around them.
    rows, columns = np.nonzero(walls)
    half = max(np.ptp(rows), np.ptp(columns)) / 2 + 1
    middle_x, middle_y = (columns.min() + columns.max()) / 2, (rows.min() + rows.max()) / 2
    panel.set(xlim=(middle_x - half, middle_x + half), ylim=(middle_y + half, middle_y - half))


def _draw_route(panel: Axes, episode: Episode) -> None:
    path = episode.observations[:, :2]
    segments = np.stack([path[:-1], path[1:]], axis=1)
    panel.add_collection(
        LineCollection(list(segments), array=np.linspace(0, 1, len(segments)), cmap=TIME_COLORS, linewidths=2.5)
    )
    panel.plot(
        *path[0], marker="o", markersize=7, color="white", markeredgecolor="black", linestyle="none", label="start"
    )
    if episode.goal is not None:
        panel.plot(
            *episode.goal,
            marker="*",
            markersize=12,
            color="crimson",
            markeredgecolor="black",
            linestyle="none",
            label="goal",
        )
    panel.set(aspect="equal", xticks=[], yticks=[])
    reached = episode.outcome.get("success")
    if reached is not None:
        panel.set_title(f"{len(episode)} steps" if reached else "not reached", fontsize=9)
    for side in panel.spines.values():
        side.set_visible(False)


def plain_label(name: str) -> str:
    """A name from a file as text of a figure: a dollar sign begins no formula, other characters than text are `?`."""
    return "".join(each if each.isprintable() else "?" for each in name).replace("$", r"\$")


def loss_figure(metrics: str | Path) -> Figure:
    """Training loss by kind of token, from the JSONL file of a run."""
    records = [parse_json(line, str(metrics)) for line in Path(metrics).read_text().splitlines()]
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    panel = figure.subplots()
    steps = [record["step"] for record in records]
    for kind in records[0]["losses"]:
        panel.plot(steps, [record["losses"][kind] for record in records], label=f"{kind} tokens")
    panel.set(xlabel="step", ylabel="cross-entropy (nats)", title="Training")
    panel.legend(frameon=False)
    panel.grid(alpha=0.3)
    return figure


def prediction_figure(
    prediction: Prediction, episode: Episode, *, start: int, dims: Sequence[int], names: Sequence[str] = ()
) -> Figure:
    """Recorded observations and sampled predictions: the median and the central 50 % and 90 % of the samples.

    `names` has the name of every observation dimension.
    """
    figure = Figure(figsize=(8, 1.8 * len(dims) + 0.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(dims), 1, sharex=True))
    horizon = prediction.observations.shape[1]
    steps = np.arange(start + 1, start + 1 + horizon)
    first = max(start - horizon // 4, 0)
    past = np.arange(first, min(start + horizon + 1, len(episode.observations)))
    for panel, dim in zip(panels, dims, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps at which every sample has ended have no quantiles
            low, lower, middle, upper, high = np.nanquantile(
                prediction.observations[..., dim], [0.05, 0.25, 0.5, 0.75, 0.95], axis=0
            )
        panel.fill_between(steps, low, high, color="tab:blue", alpha=0.15, linewidth=0, label="90 % of samples")
        panel.fill_between(steps, lower, upper, color="tab:blue", alpha=0.3, linewidth=0, label="50 %")
        panel.plot(steps, middle, color="tab:blue", label="median")
        panel.plot(past, episode.observations[past, dim], color="black", linewidth=1.2, label="recorded")
        panel.axvline(start, color="gray", linestyle=":")
        panel.set_ylabel(plain_label(names[dim]) if names else f"observation {dim}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    panels[-1].set_xlabel("step of the episode")
    return figure
