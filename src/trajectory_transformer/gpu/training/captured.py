"""A training step recorded as one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from trajectory_transformer.training.engine import Outcome


class RecordedStep:
    """A whole step as one CUDA graph: run as it stands at first, then recorded, then only replayed.

    Its inputs are copied to where the graph reads them; seeds, rates and weights it finds in place. A replayed step
    draws from torch's generator as if it were run, so both give the same bits.
    """

    WARM_UP = 2  # steps run before one is recorded: compilation, workspaces, the optimiser's state

    def __init__(self, step: Callable[..., Outcome]) -> None:
        """Record a function of tensors on the device, whose shapes stay."""
        self._step = step
        self._calls = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome: Outcome | None = None

    def __call__(self, *inputs: Tensor) -> Outcome:
        """Take the step."""
        self._inputs = self._inputs or tuple(torch.empty_like(each) for each in inputs)
        for own, each in zip(self._inputs, inputs, strict=True):
            own.copy_(each)
        if self._calls < self.WARM_UP:
            self._calls += 1
            return self._run_aside()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outcome = self._step(*self._inputs)
        self._graph.replay()
        assert self._outcome is not None
        return self._outcome

    def _run_aside(self) -> Outcome:
        """Run the step on another stream, as recording does."""
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            outcome = self._step(*self._inputs)
        here.wait_stream(aside)
        return outcome
