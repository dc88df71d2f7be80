"""Replay a function without arguments as a CUDA graph."""

from collections.abc import Callable

import torch

from trajectory_transformer.gpu.planning.captured import no_garbage_collection


class ReplayedStep:
    """A step as one CUDA graph: the first calls run eagerly, the next captures, later calls replay.

    The function reads and writes tensors on the device that outlive it, always the same ones. It must not synchronise.
    """

    WARM_UP = 3  # eager steps before the capture, for workspaces and optimizer state

    def __init__(self, function: Callable[[], None]) -> None:
        """Wrap a function."""
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run or replay one step."""
        if self._calls < self.WARM_UP:
            self._calls += 1
            side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side.wait_stream(here)
            with torch.cuda.stream(side):
                self._function()
            here.wait_stream(side)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with no_garbage_collection(), torch.cuda.graph(self._graph):
                self._function()
        self._graph.replay()
