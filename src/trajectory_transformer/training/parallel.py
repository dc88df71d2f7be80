"""One run in several processes, each with its share of every batch.

`torchrun` starts the processes and gives each its rank. Gradients are averaged with one all-reduce per step: the models
are small (a few MB), so overlapping communication with the backward pass would gain nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class World:
    """The processes of a run, and the rank of this one; a single process by default."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def share(self, index: Tensor) -> Tensor:
        """This process's part of a batch: index [B] -> [B / size]."""
        return index.chunk(self.size)[self.rank]

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes: the gradient of the whole batch."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        everything = self.add_up(torch.cat([gradient.flatten() for gradient in gradients])) / self.size
        means = torch.split(everything, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def add_up(self, values: Tensor) -> Tensor:
        """Sum over all processes, with the same bits in each."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any process; synchronises if there are several."""
        return flag if self.size == 1 else bool(self.add_up(torch.tensor(float(flag), device=device)) > 0)

    @contextmanager
    def first_alone(self, device: torch.device) -> Iterator[None]:
        """Run a block in the first process, then in the others. If the first fails, the others exit silently."""
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
