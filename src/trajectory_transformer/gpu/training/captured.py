"""Capture a training step as a CUDA graph, and the compiled engine that uses it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext

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


class CapturedStep:
    """A training step as one CUDA graph: the first calls run eagerly, the next captures, later calls replay.

    Batches are copied to the graph's static input buffers; weights and the learning rate are updated in place. A replay
    advances torch's random generator like an eager step, so both give bit-identical results.
    """

    WARM_UP = 2  # eager steps before the capture, for compilation, workspaces and optimizer state

    def __init__(self, compute: Compute) -> None:
        """Wrap a function of a batch on the device; the shapes must not change."""
        self._compute = compute
        self._calls = 0
        self._batch: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome: Outcome | None = None

    def __call__(self, batch: Batch) -> Outcome:
        """Run or replay one step."""
        own = self._copy(batch)
        if self._calls < self.WARM_UP:
            self._calls += 1
            with side_stream():
                return self._compute(own)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with no_garbage_collection(), torch.cuda.graph(self._graph):
                self._outcome = self._compute(own)
        self._graph.replay()
        assert self._outcome is not None
        return self._outcome

    def _copy(self, batch: Batch) -> Batch:
        """Copy a batch to the graph's static input buffers."""
        if self._batch is None:
            maps = None if batch.maps is None else torch.empty_like(batch.maps)
            self._batch = Batch(torch.empty_like(batch.tokens), torch.empty_like(batch.real), maps)
        own = self._batch
        own.tokens.copy_(batch.tokens)
        own.real.copy_(batch.real)
        if own.maps is not None and batch.maps is not None:
            own.maps.copy_(batch.maps)
        return own


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

    The functions read and write tensors that stay where they are, and draw no numbers from torch's generators.
    """

    WARM_UP = 2  # calls before the capture, for compilation and workspaces

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


class CompiledEngine(EagerEngine):
    """The eager engine with a loss compiled by torch.compile, and bfloat16 autocast if the GPU supports it.

    A single process captures the whole step as a CUDA graph.
    """

    def __init__(self, model: TrajectoryModel, config: TrainConfig, world: World) -> None:
        """Train a model on a GPU."""
        super().__init__(model, config, world)
        self._optimizer = make_optimizer(model.gpt, config, capturable=True)
        bf16 = torch.cuda.is_bf16_supported()

        def loss(tokens: Tensor, real: Tensor, maps: Tensor | None) -> tuple[Tensor, Tensor]:
            # Weights, gradients and cross-entropy stay float32; autocast applies to the matmuls only.
            with torch.autocast(model.device.type, torch.bfloat16) if bf16 else nullcontext():
                return weighted_loss(model, Batch(tokens, real, maps), config.action_weight)

        self._loss: Callable[..., tuple[Tensor, Tensor]] = torch.compile(loss)
        self._take_step: Compute = CapturedStep(self.compute) if world.size == 1 else self.compute

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Take one optimizer step on a batch."""
        for group in self._optimizer.param_groups:
            group["lr"].fill_(learning_rate)
        return self._take_step(batch)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the cross-entropy of each prediction [B, L']."""
        return self._loss(batch.tokens, batch.real, batch.maps)
