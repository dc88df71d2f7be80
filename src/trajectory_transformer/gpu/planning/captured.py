"""Capture a whole search as a CUDA graph, one per prompt shape, and replay it."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.search.beam import Plan

log = logging.getLogger(__name__)

Search = Callable[[Tensor, Tensor, Tensor | None], Plan]
"""Prompts [E, L], noise seeds [E] and map embeddings [E, width] -> plans."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Run the garbage collector first and disable it in the block: freeing an old CUDA graph would break a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    staged: Tensor  # [L + 1, E] prompts and seeds in pinned host memory, from where the graph copies them
    map_embedding: Tensor | None
    plan: Plan
    winner: Tensor  # [E, n] in pinned host memory, to where the graph copies it
    done: torch.cuda.Event  # recorded after the graph


class CapturedSearch:
    """Replays a captured search; the first call with a new prompt shape captures it.

    The number of environments is rounded up to a power of two, so that a few graphs serve any number of them.
    """

    def __init__(self, search: Search, device: torch.device, *, refresh: Callable[[], None]) -> None:
        """Wrap `search`, which must not synchronise with the device; `refresh` is called before every replay."""
        self._search = search
        self._device = device
        self._refresh = refresh
        self._graphs: dict[tuple[int, int], _Captured | None] = {}

    def __call__(self, prompts: Tensor, seeds: Tensor, map_embedding: Tensor | None = None) -> Plan:
        """Plan for prompts [E, L] and seeds [E] on the host.

        The next call overwrites `tokens` and `scores` of the result, but not `best`.
        """
        num_envs, length = prompts.shape
        shape = (1 << (num_envs - 1).bit_length(), length)
        if map_embedding is not None:  # pad with the first embedding, like the prompts below
            map_embedding = torch.cat([map_embedding, map_embedding[:1].expand(shape[0] - num_envs, -1)])
        self._refresh()
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, map_embedding)
        captured = self._graphs[shape]
        if captured is None:
            embedding = None if map_embedding is None else map_embedding[:num_envs]
            return self._search(prompts.to(self._device), seeds.to(self._device), embedding)
        staged = captured.staged.numpy()
        staged[:-1, :num_envs], staged[-1, :num_envs] = prompts.numpy().T, seeds.numpy()
        staged[:, num_envs:] = staged[:, :1]
        if captured.map_embedding is not None and map_embedding is not None:
            captured.map_embedding.copy_(map_embedding)
        captured.graph.replay()
        captured.done.record()
        plan = captured.plan
        tokens, scores = plan.tokens[:num_envs], plan.scores[:num_envs]  # overlaps with the replay
        captured.done.synchronize()
        return Plan(tokens, scores, captured.winner[:num_envs].clone())

    def _capture(self, shape: tuple[int, int], map_embedding: Tensor | None) -> _Captured | None:
        staged = torch.zeros(shape[1] + 1, shape[0], dtype=torch.long, pin_memory=True)
        given = staged.to(self._device)
        map_embedding = None if map_embedding is None else map_embedding.clone()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Warm up: compile kernels and allocate persistent buffers before the capture.
            warm = self._search(given[:-1].t(), given[-1], map_embedding)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        winner = torch.empty(warm.best.shape, dtype=torch.long, pin_memory=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_garbage_collection(), torch.cuda.graph(graph):
                given.copy_(staged, non_blocking=True)
                plan = self._search(given[:-1].t(), given[-1], map_embedding)
                winner.copy_(plan.best, non_blocking=True)
        except RuntimeError as error:
            log.warning("planning without a CUDA graph: %s", error)
            return None
        return _Captured(graph, staged, map_embedding, plan, winner, torch.cuda.Event())  # type: ignore[no-untyped-call]
