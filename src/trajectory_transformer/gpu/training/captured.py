"""Capture functions as CUDA graphs, and the compiled training engine that uses it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.gpu.planning.captured import no_garbage_collection
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch
from trajectory_transformer.training.engine import EagerEngine, Outcome
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import make_optimizer
from trajectory_transformer.training.parallel import World

Compute = Callable[[Batch], Outcome]
Result = TypeVar("Result")


@contextmanager
def side_stream() -> Iterator[None]:
    """Run a block on a side stream, as a capture does."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


class CapturedCalls:
    """Functions without arguments as CUDA graphs: the first calls with a key run, the next captures, later ones replay.

    The functions read and write tensors that stay where they are. A replay advances torch's random generator like a
    call, so both give bit-identical results.
    """

    WARM_UP = 2  # calls before the capture, for compilation, workspaces and optimizer state

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __call__(self, key: Hashable, function: Callable[[], object]) -> None:
        """Run the function, or replay what a call with the same key did."""
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= self.WARM_UP:
            with side_stream():
                function()
            return
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with no_garbage_collection(), torch.cuda.graph(graph):
                function()
            self._graphs[key] = graph
        self._graphs[key].replay()


class Captured(Generic[Result]):
    """A function of tensors as one CUDA graph.

    Arguments are copied to the graph's static input buffers; the next call overwrites the result.
    """

    def __init__(self, compute: Callable[..., Result]) -> None:
        """Wrap a function of tensors on the device, some of which may be None; shapes must not change."""
        self._compute = compute
        self._calls = CapturedCalls()
        self._inputs: list[Tensor | None] = []
        self._result: Result | None = None

    def __call__(self, *inputs: Tensor | None) -> Result:
        """Run or replay the function."""
        if not self._inputs:
            self._inputs = [None if each is None else torch.empty_like(each) for each in inputs]
        for own, given in zip(self._inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        self._calls(None, self._run)
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        self._result = self._compute(*self._inputs)


def supports_bf16() -> bool:
    """Whether the GPU computes in bfloat16."""
    return bool(torch.cuda.is_bf16_supported())


def captured_step(compute: Compute) -> Compute:
    """A training step as one CUDA graph; weights and the learning rate are updated in place."""
    step = Captured(lambda tokens, real, maps: compute(Batch(tokens, real, maps)))
    return lambda batch: step(batch.tokens, batch.real, batch.maps)


class CompiledEngine(EagerEngine):
    """The eager engine with a loss compiled by torch.compile, and bfloat16 autocast if the GPU supports it.

    A single process captures the whole step as a CUDA graph.
    """

    def __init__(self, model: TrajectoryModel, config: TrainConfig, world: World) -> None:
        """Train a model on a GPU."""
        super().__init__(model, config, world)
        self._optimizer = make_optimizer(model.gpt, config, capturable=True)
        bf16 = supports_bf16()

        def loss(tokens: Tensor, real: Tensor, maps: Tensor | None) -> tuple[Tensor, Tensor]:
            # Weights, gradients and cross-entropy stay float32; autocast applies to the matmuls only.
            with torch.autocast(model.device.type, torch.bfloat16) if bf16 else nullcontext():
                return weighted_loss(model, Batch(tokens, real, maps), config.action_weight)

        self._loss: Callable[..., tuple[Tensor, Tensor]] = torch.compile(loss)
        self._take_step: Compute = captured_step(self.compute) if world.size == 1 else self.compute

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Take one optimizer step on a batch."""
        for group in self._optimizer.param_groups:
            group["lr"].fill_(learning_rate)
        return self._take_step(batch)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the cross-entropy of each prediction [B, L']."""
        return self._loss(batch.tokens, batch.real, batch.maps)
