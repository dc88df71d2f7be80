"""A run and an episode of a dataset that fits it, for commands that look at both."""

from typing import TYPE_CHECKING

from trajectory_transformer.cli.data import DataFlags, load_dataset
from trajectory_transformer.config import require

if TYPE_CHECKING:
    from trajectory_transformer.data.episode import Dataset
    from trajectory_transformer.model.trajectory_model import TrajectoryModel


def load_recorded(
    run: str | None, dataset: str | None, flags: DataFlags, *, episode: int, start: int, device: str
) -> "tuple[TrajectoryModel, Dataset]":
    """Load both; the dimensions, the index of the episode and the step in it must fit."""
    from trajectory_transformer.gpu.backends import find_device
    from trajectory_transformer.model.trajectory_model import TrajectoryModel
    from trajectory_transformer.pretrained import find_model

    if run is None:
        raise ValueError("name the run folder, for example: runs/train")
    model = TrajectoryModel.load(find_model(run), find_device(device))
    loaded = load_dataset(dataset, flags.reading)
    require(0 <= episode < len(loaded), f"--episode must lie in [0, {len(loaded)})", episode)
    have = (loaded.observation_dim, loaded.action_dim)
    wanted = (model.layout.observation_dim, model.layout.action_dim)
    require(have == wanted, f"the dataset must have the model's {wanted} observation and action dimensions", have)
    steps = len(loaded.episodes[episode])
    require(0 <= start < steps, f"--start must lie in [0, {steps})", start)
    return model, loaded
