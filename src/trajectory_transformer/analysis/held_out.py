"""Loss of a trained model on data that it was not trained on, by kind of token."""

import torch
from torch import Tensor

from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import gather_windows, tokenize
from trajectory_transformer.training.loss import losses_by_kind, weighted_loss


@torch.inference_mode()
def held_out_losses(
    model: TrajectoryModel, dataset: Dataset, *, max_windows: int = 512, batch_size: int = 64
) -> dict[str, float]:
    """Mean cross-entropy by kind of token over evenly spaced windows of a dataset, at most `max_windows`."""
    layout = model.layout
    have = (dataset.observation_dim, dataset.action_dim, dataset.has_rewards or not layout.rewards)
    if have != (layout.observation_dim, layout.action_dim, True):
        raise ValueError(
            f"the model was trained on {layout.observation_dim} observation and {layout.action_dim} action dimensions "
            f"{'with' if layout.rewards else 'without'} rewards, the dataset has {have[0]} and {have[1]}"
            f"{'' if dataset.has_rewards else ' without rewards'}"
        )
    data = tokenize(dataset, model.tokenizer).to(model.device)
    count = min(max_windows, data.num_windows)
    chosen = torch.arange(count, device=model.device) * data.num_windows // count
    totals: list[Tensor] = []  # [2, kinds] of every batch

    def add_up(part: Tensor) -> Tensor:
        totals.append(part)
        return torch.stack(totals).sum(dim=0)

    losses: dict[str, float] = {}
    for first in range(0, count, batch_size):
        batch = gather_windows(data, chosen[first : first + batch_size], model.gpt.config.window, model.tokenizer)
        _, by_token = weighted_loss(model, batch, 1.0)
        losses = losses_by_kind(by_token, batch, layout, add_up)
    return losses
