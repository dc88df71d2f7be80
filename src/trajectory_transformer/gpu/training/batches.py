"""Make batches for a GPU: gather on the device if the dataset is there, else on the host with asynchronous copies."""

from collections.abc import Callable

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.gpu.training.captured import Captured
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch, TokenizedDataset
from trajectory_transformer.training.train import MakeBatch, batch_maker


def device_batch_maker(
    model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig, *, compiled: bool
) -> MakeBatch:
    """Make batches on the model's device; `compiled` gathers and augments with one CUDA graph of few kernels.

    The next batch may overwrite the last one.
    """
    make_batch: Callable[..., Batch] = batch_maker(model, data, config)
    if data.rows.device == model.device:
        assert len(data.end_window) == len(data.num_steps)  # computes the cached property before torch.compile
        run = Captured(torch.compile(make_batch, dynamic=False)) if compiled else make_batch

        def on_device(index: Tensor, uniform: Tensor | None) -> Batch:
            return run(_send(index, model.device), None if uniform is None else _send(uniform, model.device))

        return on_device

    def from_host(index: Tensor, uniform: Tensor | None) -> Batch:
        batch = make_batch(index, uniform)
        maps = None if batch.maps is None else _send(batch.maps, model.device)
        return Batch(_send(batch.tokens, model.device), _send(batch.real, model.device), maps)

    return from_host


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from host to device asynchronously."""
    return tensor.pin_memory().to(device, non_blocking=True)
