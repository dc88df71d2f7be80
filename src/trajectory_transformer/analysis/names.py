"""Names of the tokens of a model."""

from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel


def slot_names(model: TrajectoryModel, dataset: Dataset | None = None) -> list[str]:
    """Names of the goal tokens and of the slots of a transition [G + D]; a dataset gives its own names."""
    layout = model.layout
    observations = [f"observation {index}" for index in range(layout.observation_dim)]
    actions = [f"action {index}" for index in range(layout.action_dim)]
    if dataset is not None and (dataset.observation_dim, dataset.action_dim) == (len(observations), len(actions)):
        observations = [dimension.name for dimension in dataset.observation_dimensions]
        actions = [dimension.name for dimension in dataset.action_dimensions]
    goals = [f"goal {observations[dim]}" for dim in model.tokenizer.config.goal_dims]
    return [*goals, *observations, *actions, *(["reward", "return to go"] if layout.rewards else [])]
