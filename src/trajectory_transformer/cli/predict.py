"""`tt predict`: hold the model's forecast of a recorded episode against what happened."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from trajectory_transformer.cli.console import claim, console, device_of
from trajectory_transformer.cli.data import load_dataset
from trajectory_transformer.config import require
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.report.plots import prediction_figure
from trajectory_transformer.search.predict import predict, recorded


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Roll a model forward from a recorded state, many times, and plot it against the recording."""

    positional: ClassVar[dict[str, str]] = {"run": "The run folder that `tt train` wrote."}

    run: str | None = None
    """The run folder that `tt train` wrote."""
    dataset: str | None = None
    """Dataset with the recorded episode."""
    episode: int = 0
    """Number of the episode."""
    start: int = 0
    """Step to predict from."""
    horizon: int = 50
    """Steps to predict; cut to what was recorded."""
    context: int = 4
    """Recorded transitions before it that the model may see."""
    samples: int = 64
    """Futures to sample."""
    actions: bool = True
    """Take the recorded actions; false lets the model choose its own."""
    dims: tuple[int, ...] = ()
    """Observation dimensions to plot; empty for the first six."""
    temperature: float = 1.0
    """Sharpens (below 1) or flattens (above 1) the distributions sampled from."""
    seed: int = 0
    """Of the samples."""
    out: Path = Path("prediction.png")
    """The picture to write; must not exist."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def execute(self) -> None:
        """Predict, print the error and write the picture."""
        if self.run is None:
            raise ValueError("name the run folder to predict with, for example: runs/train")
        model = TrajectoryModel.load(Path(self.run), device_of(self.device))
        dataset = load_dataset(self.dataset)
        require(0 <= self.episode < len(dataset), f"--episode must lie in [0, {len(dataset)})", self.episode)
        have = (dataset.observation_dim, dataset.action_dim)
        wanted = (model.layout.observation_dim, model.layout.action_dim)
        require(have == wanted, f"the dataset must have {wanted} observation and action dimensions as the model", have)
        dims = self.dims or tuple(range(min(6, dataset.observation_dim)))
        require(max(dims) < dataset.observation_dim, f"--dims must lie below {dataset.observation_dim}", dims)
        episode = dataset.episodes[self.episode]
        require(0 <= self.start < len(episode), f"--start must lie in [0, {len(episode)})", self.start)
        claim(self.out)
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
        self.out.parent.mkdir(parents=True, exist_ok=True)
        prediction_figure(prediction, episode, start=self.start, dims=dims).savefig(self.out, dpi=150)
        console.print(
            f"median forecast of episode {self.episode} from step {self.start}: off by {error[0].mean():.3g} standard "
            f"deviations of the data after 1 step, {error[-1].mean():.3g} after {horizon}"
        )
        console.print(f"futures that see the episode end: {100 * ended:.0f} %")
        console.print(f"wrote {self.out}")
