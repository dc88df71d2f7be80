"""`tt predict`: compare the model's predictions with a recorded episode."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.data import DataFlags
from trajectory_transformer.cli.recorded import load_recorded
from trajectory_transformer.config import require


@dataclass(frozen=True, kw_only=True)
class Predict(DataFlags):
    """Sample futures of a recorded episode and plot them against what was recorded."""

    positional: ClassVar[dict[str, str]] = {
        "run": "Run folder that `tt train` wrote, or the name of a model of this package."
    }
    required: ClassVar[tuple[str, ...]] = ("run", "dataset")
    examples: ClassVar[tuple[str, ...]] = (
        "tt predict runs/demo --dataset runs/demo-demonstrations.npz",
        "tt predict runs/log --dataset log.csv --episode 3 --horizon 20 --out third.png",
    )

    run: str | None = None
    """Run folder that `tt train` wrote, or the name of a model of this package."""
    dataset: str | None = None
    """Dataset with the recorded episode."""
    episode: int = 0
    """Index of the episode."""
    start: int = 0
    """Step to predict from."""
    horizon: int = 50
    """Steps to predict, at most as many as were recorded."""
    context: int = 4
    """Recorded transitions before that step in the prompt."""
    samples: int = 64
    """Futures to sample."""
    actions: bool = True
    """Use the recorded actions; false samples actions from the model."""
    dims: tuple[int, ...] = ()
    """Observation dimensions to plot; empty: the first six."""
    temperature: float = 1.0
    """Sampling temperature: below 1 sharpens the distributions, above 1 flattens them."""
    seed: int = 0
    """Seed of the samples."""
    out: Path = Path("prediction.png")
    """Picture to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def execute(self) -> None:
        """Predict, print the error and write the picture."""
        from trajectory_transformer.report.plots import prediction_figure, save_figure
        from trajectory_transformer.search.predict import predict, recorded

        claim(self.out, overwrite=self.overwrite)
        model, dataset = load_recorded(
            self.run, self.dataset, self, episode=self.episode, start=self.start, device=self.device
        )
        dims = self.dims or tuple(range(min(6, dataset.observation_dim)))
        fit = min(dims) >= 0 and max(dims) < dataset.observation_dim
        require(fit, f"--dims must lie in [0, {dataset.observation_dim})", dims)
        require(self.context >= 0, "--context must not be negative", self.context)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        episode = dataset.episodes[self.episode]
        horizon = min(self.horizon, len(episode) - self.start)
        prediction = predict(
            model,
            episode,
            start=self.start,
            horizon=horizon,
            num_samples=self.samples,
            seed=self.seed,
            context=self.context,
            given_actions=self.actions,
            temperature=self.temperature,
        )
        truth = recorded(episode, self.start, horizon)
        ended = np.isnan(prediction.observations).any(axis=(1, 2)).mean()
        spread = np.concatenate([episode.observations for episode in dataset]).std(axis=0) + 1e-8
        error = np.abs(np.nanmedian(prediction.observations, axis=0) - truth) / spread  # [H, O]
        names = [dimension.name for dimension in dataset.observation_dimensions]
        figure = prediction_figure(prediction, episode, start=self.start, dims=dims, names=names)
        save_figure(figure, self.out)
        console.print(
            f"median prediction of episode {self.episode} from step {self.start}: error of {error[0].mean():.3g} "
            f"standard deviations of the data after 1 step, {error[-1].mean():.3g} after {horizon}"
        )
        for dim in dims:
            console.print(f"  {names[dim]}: {error[0, dim]:.3g} and {error[-1, dim]:.3g}", markup=False)
        console.print(f"futures that predict the end of the episode: {100 * ended:.0f} %")
        console.print(f"wrote {self.out}")
