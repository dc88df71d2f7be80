"""A training step as one CUDA graph, and the compiled engine that uses it."""

from collections.abc import Callable
from contextlib import nullcontext

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
    """A whole step as one CUDA graph: run eagerly at first, then captured, then replayed.

    Batches are copied to the memory that the graph reads; it finds weights and the learning rate in place. A replayed
    step advances torch's generator like an eager one, so both give the same bits.
    """

    WARM_UP = 2  # eager steps before the capture: compilation, workspaces, optimizer state

    def __init__(self, compute: Compute) -> None:
        """Capture a function of a batch on the device whose shapes never change."""
        self._compute = compute
        self._calls = 0
        self._batch: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome: Outcome | None = None

    def __call__(self, batch: Batch) -> Outcome:
        """Take the step."""
        own = self._copy(batch)
        if self._calls < self.WARM_UP:
            self._calls += 1
            return self._run_on_side_stream(own)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with no_garbage_collection(), torch.cuda.graph(self._graph):
                self._outcome = self._compute(own)
        self._graph.replay()
        assert self._outcome is not None
        return self._outcome

    def _copy(self, batch: Batch) -> Batch:
        """Copy a batch to the memory that the graph reads."""
        if self._batch is None:
            maps = None if batch.maps is None else torch.empty_like(batch.maps)
            self._batch = Batch(torch.empty_like(batch.tokens), torch.empty_like(batch.real), maps)
        own = self._batch
        own.tokens.copy_(batch.tokens)
        own.real.copy_(batch.real)
        if own.maps is not None and batch.maps is not None:
            own.maps.copy_(batch.maps)
        return own

    def _run_on_side_stream(self, batch: Batch) -> Outcome:
        """Run the step on another stream, as a capture does."""
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            outcome = self._compute(batch)
        here.wait_stream(side)
        return outcome


class CompiledEngine(EagerEngine):
    """The eager engine with a loss by torch.compile, and bfloat16 matmuls where the GPU has them.

    A single process captures the whole step as a CUDA graph.
    """

    def __init__(self, model: TrajectoryModel, config: TrainConfig, world: World) -> None:
        """Train a model on a GPU."""
        super().__init__(model, config, world)
        self._optimizer = make_optimizer(model.gpt, config, capturable=True)
        bf16 = torch.cuda.is_bf16_supported()

        def loss(tokens: Tensor, real: Tensor, maps: Tensor | None) -> tuple[Tensor, Tensor]:
            # Weights, gradients and cross-entropy stay float32; autocast rounds the matmuls only.
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
        """The loss, and the cross-entropy of each prediction [B, L']."""
        return self._loss(batch.tokens, batch.real, batch.maps)
