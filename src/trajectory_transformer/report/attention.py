"""Figure of attention maps."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trajectory_transformer.tokens.layout import TokenLayout

_SIDE, _SIDE_OF_TOKEN = 3.2, 0.06  # inches of a panel, and of a token that is named


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
    the steps, with s, a and r where states, actions and rewards begin; with `name_tokens` every token has its name,
    and the panels are large enough for it.
    """
    length, rows = len(labels), -(-len(maps) // columns)
    side, margin = (max(_SIDE, _SIDE_OF_TOKEN * length), 1.8) if name_tokens else (_SIDE, 1.0)
    figure = Figure(figsize=(side * columns + margin, side * rows + margin), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    edges = range(layout.goal_dim, length, layout.size)
    ticks = dict(enumerate(labels)) if name_tokens else _kinds(layout, labels)
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
        panel.set_xticks(list(ticks), ticks.values() if lowest else [""] * len(ticks), rotation=90, fontsize=4)
        panel.set_yticks(list(ticks), ticks.values() if column == 0 else [""] * len(ticks), fontsize=4)
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
