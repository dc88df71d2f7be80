"""A training step as one CUDA graph, and the compiled engine that uses it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from trajectory_transformer.config import TrainConfig
from trajectory_transformer.gpu.planning.captured import no_garbage_collection
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import Batch
from trajectory_transformer.training.engine import Outcome
from trajectory_transformer.training.loss import weighted_loss
from trajectory_transformer.training.optim import GRAD_CLIP, load_optimizer_state, make_optimizer, optimizer_state
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


class CompiledEngine:
    """The model's own loss by torch.compile, with bfloat16 matmuls where the GPU has them.

    A single process captures the whole step as a CUDA graph.
    """

    def __init__(self, model: TrajectoryModel, config: TrainConfig, world: World) -> None:
        """Train a model on a GPU."""
        self._model = model
        self._world = world
        self._parameters = list(model.gpt.parameters())
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

    def compute(self, batch: Batch) -> Outcome:
        """Forward, backward and update."""
        loss, by_token = self._loss(batch.tokens, batch.real, batch.maps)
        for parameter, grad in zip(self._parameters, torch.autograd.grad(loss, self._parameters), strict=True):
            parameter.grad = grad.contiguous()
        self._world.average_gradients(self._parameters)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, GRAD_CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Outcome(loss.detach(), by_token.detach(), norm)

    def state(self) -> dict[str, Tensor]:
        """State of the optimizer by name, to resume from."""
        return optimizer_state(self._model.gpt, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state`."""
        load_optimizer_state(self._model.gpt, self._optimizer, tensors)
