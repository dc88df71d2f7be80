"""Figure of attention maps."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.tokens.layout import TokenLayout

_SIDE, _SIDE_OF_TOKEN, _TITLE = 3.2, 0.06, 0.5  # inches of a panel, of a token that is named, and of a title


def attention_figure(
    maps: Mapping[str, npt.NDArray[np.float32]],
    layout: TokenLayout,
    labels: Sequence[str],
    *,
    columns: int,
    name_tokens: bool = False,
) -> Figure:
    """Attention maps [L, L] by title, `columns` of them in a row; labels [L] are the names of the tokens.

    Row i of a panel is token i, dark columns are what it reads, lines part the transitions. Beside the panels stand
    the names of the tokens if they fit, else the steps, with s, a and r where states, actions and rewards begin. With
    `name_tokens` the panels are as large as the names of all tokens need.
    """
    length, rows = len(labels), -(-len(maps) // columns)
    needed = _SIDE_OF_TOKEN * length
    name_tokens = name_tokens or needed <= _SIDE
    side = max(_SIDE, needed) if name_tokens else _SIDE
    font = 4 * min(max(_SIDE / needed, 1.0), 1.6)  # points; larger if there is room
    ticks = dict(enumerate(labels)) if name_tokens else _kinds(layout, labels)
    beside = 0.4 + max(map(len, ticks.values())) * 0.6 * font / 72  # inches of the names
    figure = Figure(figsize=(side * columns + beside, (side + _TITLE) * rows + beside), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    edges = range(layout.goal_dim, length, layout.size)
    for index, (title, weights) in enumerate(maps.items()):
        row, column = divmod(index, columns)
        panel = panels[row, column]
        # The square root shows small weights beside large ones.
        panel.imshow(np.sqrt(weights), cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
        for edge in edges[1:]:
            panel.axhline(edge - 0.5, color="0.85", linewidth=0.4)
            panel.axvline(edge - 0.5, color="0.85", linewidth=0.4)
        panel.set_title(title, fontsize="small")
        lowest = index + columns >= len(maps)
        panel.set_xticks(list(ticks), ticks.values() if lowest else [""] * len(ticks), rotation=90, fontsize=font)
        panel.set_yticks(list(ticks), ticks.values() if column == 0 else [""] * len(ticks), fontsize=font)
        panel.tick_params(length=1.5)
    for panel in panels.ravel()[len(maps) :]:
        panel.set_axis_off()
    figure.supxlabel("token that is read", fontsize="small")
    figure.supylabel("token that reads", fontsize="small")
    return figure


def _kinds(layout: TokenLayout, labels: Sequence[str]) -> dict[int, str]:
    """Positions where states, actions and rewards begin, with their letters; a state has the step as well."""
    letters = {0: "s", layout.observation_dim: "a", **({layout.reward: "r"} if layout.rewards else {})}
    found = {0: "goal"} if layout.goal_dim else {}
    for position in range(layout.goal_dim, len(labels)):
        letter = letters.get(layout.slot(position))
        if letter is not None:
            step = labels[position].rpartition(", ")[2]
            found[position] = f"{step}, s" if letter == "s" else letter
    return found
