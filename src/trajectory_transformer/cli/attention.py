"""`tt attention`: draw what every head of a model reads in a recorded episode."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.table import Table

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.data import DataFlags
from trajectory_transformer.cli.recorded import load_recorded
from trajectory_transformer.config import require


@dataclass(frozen=True, kw_only=True)
class Attention(DataFlags):
    """Draw the attention maps of all layers and heads over a window of a recorded episode, and score the heads."""

    positional: ClassVar[dict[str, str]] = {
        "run": "Run folder that `tt train` wrote, or the name of a model of this package."
    }
    required: ClassVar[tuple[str, ...]] = ("run", "dataset")
    examples: ClassVar[tuple[str, ...]] = (
        "tt attention runs/demo --dataset runs/demo-demonstrations.npz",
        "tt attention runs/hopper --dataset hopper.npz --start 100 --heads '[0-2, 3-3]' --out two.png",
    )

    run: str | None = None
    """Run folder that `tt train` wrote, or the name of a model of this package."""
    dataset: str | None = None
    """Dataset with the recorded episode."""
    episode: int = 0
    """Index of the episode."""
    start: int = 0
    """First step of the window, which is as long as the model allows."""
    heads: tuple[str, ...] = ()
    """Heads to draw, each as LAYER-HEAD, large and with the names of all tokens; empty: all heads."""
    out: Path = Path("attention.png")
    """Picture to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def execute(self) -> None:
        """Compute the maps, print the scores of the heads and write the picture."""
        from trajectory_transformer.analysis.attention import (
            attention_maps,
            head_scores,
            token_labels,
            uniform_attention,
            window_tokens,
        )
        from trajectory_transformer.analysis.names import slot_names
        from trajectory_transformer.report.attention import attention_figure
        from trajectory_transformer.report.plots import save_figure

        claim(self.out, overwrite=self.overwrite)
        model, dataset = load_recorded(
            self.run, self.dataset, self, episode=self.episode, start=self.start, device=self.device
        )
        layout, episode = model.layout, dataset.episodes[self.episode]
        tokens = window_tokens(model, episode, self.start)
        maps = attention_maps(model, tokens, episode.map)
        labels = token_labels(layout, slot_names(model, dataset), len(tokens), first_step=self.start)
        titles = {f"{layer}-{head}": f"layer {layer}, head {head}" for layer, head in np.ndindex(maps.shape[:2])}
        unknown = sorted(set(self.heads) - set(titles))
        require(not unknown, f"--heads must be among {', '.join(titles)}", ", ".join(unknown))
        if len(tokens) > layout.goal_dim + 2 * layout.size:
            table = Table("head", "Markov", "striation")
            weights = dict(zip(titles, maps.reshape(-1, *maps.shape[2:]), strict=True))
            for name, head in {**weights, "uniform": uniform_attention(model, len(tokens))}.items():
                own = head_scores(head, layout)
                table.add_row(name, f"{own.markov:.3f}", f"{own.striation:.3f}")
                if name in titles:
                    titles[name] += f"\nMarkov {own.markov:.2f}, striation {own.striation:.2f}"
            console.print(table)
            console.print(
                f"Markov: share of the last {layout.size} tokens, one transition, in all that is read. Striation: "
                "share of the one slot that is read most further back. Means over tokens with two transitions before "
                "them; uniform: a head that reads all alike."
            )
        else:
            console.print("the window has fewer than three transitions, so the heads have no scores")
        shown = self.heads or tuple(titles)
        figure = attention_figure(
            {titles[name]: maps[tuple(map(int, name.split("-")))] for name in shown},
            layout,
            labels,
            columns=len(self.heads) or maps.shape[1],
            name_tokens=bool(self.heads),
        )
        save_figure(figure, self.out)
        console.print(f"wrote {self.out}")
