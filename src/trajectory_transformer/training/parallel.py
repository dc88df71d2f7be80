"""One run over several processes, each with its share of every batch: who this one is, and what they agree on.

`torchrun` starts the processes and tells each its number. Gradients are averaged in one exchange a step: the models are
small (a few MB), so there is nothing to gain from exchanging them piece by piece while others are still computed.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class World:
    """The processes of a run, and which of them this is; alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def share(self, index: Tensor) -> Tensor:
        """This process's part of a batch: index [B] -> [B / size]."""
        return index.chunk(self.size)[self.rank]

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes: that of the whole batch."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        everything = self.add_up(torch.cat([gradient.flatten() for gradient in gradients])) / self.size
        means = torch.split(everything, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of what every process gives, the same bits on all of them."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says yes; several wait for their devices."""
        return flag if self.size == 1 else bool(self.add_up(torch.tensor(float(flag), device=device)) > 0)

    @contextmanager
    def first_alone(self, device: torch.device) -> Iterator[None]:
        """Let the first process do something, then the others; where it fails it says why, and they end in silence."""
        if not self.leads and self.any(False, device):
            raise SystemExit(2)
        try:
            yield
        except BaseException:
            if self.leads:
                self.any(True, device)
            raise
        if self.leads:
            self.any(False, device)


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[World, torch.device]]:
    """Join the processes that `torchrun` started, if it did: the world, and the device of this process in it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started more processes than the {torch.cuda.device_count()} GPUs here; "
                "lower --nproc-per-node or use --device cpu"
            )
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(distributed.get_rank(), size), device
    finally:
        distributed.destroy_process_group()
