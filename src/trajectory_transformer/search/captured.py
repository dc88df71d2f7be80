"""A search as one CUDA graph for every shape of prompt: what is launched once is replayed without the host."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.search.beam import Plan

log = logging.getLogger(__name__)

Search = Callable[[Tensor, Tensor, Tensor | None], Plan]
"""Prompts [E, L], seeds of their noise [E] and what is added to their tokens [E, width], on the device -> plans."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    given: Tensor  # [L + 1, E], prompts and seeds on the host, whence the graph takes them
    context: Tensor | None
    plan: Plan
    done: torch.cuda.Event  # the last replay has ended


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

    def __call__(self, prompts: Tensor, seeds: Tensor, context: Tensor | None = None) -> Plan:
        """Plans for prompts [E, L] on the host. They are overwritten by the next call."""
        num_envs = len(prompts)
        extra = (1 << (num_envs - 1).bit_length()) - num_envs
        given = _padded(torch.cat([prompts, seeds[:, None]], dim=1), extra).t()  # [L + 1, E]
        context = None if context is None else _padded(context, extra)
        self._refresh()
        shape = (given.shape[0], given.shape[1])
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(given, context)
        captured = self._graphs[shape]
        if captured is None:
            plan = self._run(given.to(self._device), context)
        else:
            captured.done.synchronize()
            captured.given.copy_(given)
            if captured.context is not None and context is not None:
                captured.context.copy_(context)
            captured.graph.replay()
            captured.done.record()
            plan = captured.plan
        return Plan(plan.tokens[:num_envs], plan.scores[:num_envs])

    def _run(self, given: Tensor, context: Tensor | None) -> Plan:
        return self._search(given[:-1].t(), given[-1], context)

    def _capture(self, given: Tensor, context: Tensor | None) -> _Captured | None:
        staged = given.contiguous().pin_memory()
        context = None if context is None else context.clone()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # What is made once (compiled kernels, buffers) must be there before.
            self._run(staged.to(self._device, non_blocking=True), context)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                plan = self._run(staged.to(self._device, non_blocking=True), context)
        except RuntimeError as error:
            log.warning("planning without a CUDA graph, step by step: %s", error)
            return None
        return _Captured(graph, staged, context, plan, torch.cuda.Event())  # type: ignore[no-untyped-call]


def _padded(rows: Tensor, extra: int) -> Tensor:
    """Rows with copies of the first behind them."""
    return torch.cat([rows, rows[:1].expand(extra, *rows.shape[1:])]) if extra else rows
