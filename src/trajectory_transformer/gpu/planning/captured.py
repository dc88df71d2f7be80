"""A search as one CUDA graph for every shape of prompt: what is launched once is replayed without the host."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.search.beam import Plan

log = logging.getLogger(__name__)

TokenArray = npt.NDArray[np.int64]

Search = Callable[[Tensor, Tensor, Tensor | None], Plan]
"""Prompts [E, L], seeds of their noise [E] and what is added to their tokens [E, width], on the device -> plans."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    given: Tensor  # [L + 1, E], prompts and seeds, on the device
    staged: Tensor  # the same on the host, where copies go by themselves
    written: TokenArray  # the same memory
    map_embedding: Tensor | None
    plan: Plan
    best: Tensor  # [E, n], the winners on the host
    done: torch.cuda.Event  # the winners are there


class CapturedSearch:
    """Replays a search; the first call with a new shape of prompts captures it.

    The number of environments is rounded up to a power of two, so that a few graphs serve any number of them.
    """

    def __init__(self, search: Search, device: torch.device, *, refresh: Callable[[], None]) -> None:
        """Capture `search`, which must not wait for the device; `refresh` is called before every replay."""
        self._search = search
        self._device = device
        self._refresh = refresh
        self._graphs: dict[tuple[int, int], _Captured | None] = {}
        self._running: _Captured | None = None  # what nobody has waited for yet
        self._winners: Callable[[], TokenArray] = lambda: np.empty((0, 0), np.int64)

    def __call__(self, prompts: TokenArray, seeds: TokenArray, map_embedding: Tensor | None = None) -> Plan:
        """Plans for prompts [E, L], with seeds [E]. They are overwritten by the next call."""
        num_envs, length = prompts.shape
        shape = (1 << (num_envs - 1).bit_length(), length)
        if map_embedding is not None:  # the first one's for those that nobody asked for, as below
            map_embedding = torch.cat([map_embedding, map_embedding[:1].expand(shape[0] - num_envs, -1)])
        self._refresh()
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, map_embedding)
        captured = self._graphs[shape]
        if captured is None:
            given = torch.from_numpy(prompts).to(self._device), torch.from_numpy(seeds).to(self._device)
            plan = self._search(*given, None if map_embedding is None else map_embedding[:num_envs])
            self._winners = lambda: plan.best.cpu().numpy()
            return plan
        # Before the graph runs, every operation counts; those after it cost nothing, as the device is busy.
        self._wait()
        written = captured.written
        written[:-1, :num_envs], written[-1, :num_envs] = prompts.T, seeds
        written[:, num_envs:] = written[:, :1]
        captured.given.copy_(captured.staged, non_blocking=True)
        if captured.map_embedding is not None and map_embedding is not None:
            captured.map_embedding.copy_(map_embedding)
        captured.graph.replay()
        captured.best.copy_(captured.plan.best, non_blocking=True)
        captured.done.record()
        self._running = captured
        best = captured.best.numpy()
        self._winners = lambda: best[:num_envs].copy()
        return Plan(captured.plan.tokens[:num_envs], captured.plan.scores[:num_envs])

    def winners(self) -> TokenArray:
        """The best plans of the last call [E, n] on the host, as soon as they are there."""
        self._wait()
        return self._winners()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.done.synchronize()
            self._running = None

    def _capture(self, shape: tuple[int, int], map_embedding: Tensor | None) -> _Captured | None:
        staged = torch.zeros(shape[1] + 1, shape[0], dtype=torch.long, pin_memory=True)
        given = staged.to(self._device)
        map_embedding = None if map_embedding is None else map_embedding.clone()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # What is made once (compiled kernels, buffers) must be there before.
            self._search(given[:-1].t(), given[-1], map_embedding)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                plan = self._search(given[:-1].t(), given[-1], map_embedding)
        except RuntimeError as error:
            log.warning("planning without a CUDA graph, step by step: %s", error)
            return None
        best = torch.empty(plan.best.shape, dtype=torch.long, pin_memory=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return _Captured(graph, given, staged, staged.numpy(), map_embedding, plan, best, done)
