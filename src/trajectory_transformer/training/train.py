"""Teacher forcing: predict every token from those before it. A run is a function of data, config and seed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.config import TrainConfig, require
from trajectory_transformer.gpu.training.captured import RecordedStep
from trajectory_transformer.gpu.training.fused import FastEngine, fits
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.sampling import stream_seed
from trajectory_transformer.tokens.windows import Batch, TokenizedDataset, batch_indices, gather_windows
from trajectory_transformer.training.augment import grid_augment
from trajectory_transformer.training.engine import Engine, Outcome, PlainEngine
from trajectory_transformer.training.loss import losses_by_kind, uses_bf16, uses_compile
from trajectory_transformer.training.optim import learning_rate, make_optimizer, total_steps, warmup_steps
from trajectory_transformer.training.parallel import World


@dataclass(frozen=True)
class Metrics:
    """What happened since the last report."""

    step: int
    total_steps: int
    loss: float  # mean over the steps reported
    losses: dict[str, float]  # cross-entropy of the last batch by kind of token, unweighted
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float


class Trainer:
    """A run under way: model, optimiser and the step they stand at."""

    def __init__(
        self, model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig, world: World | None = None
    ) -> None:
        """Prepare step 0 of a run, alone or as one of several processes.

        The data stays where it is: on the model's device, or in (mapped) memory, from where every batch travels.
        """
        self.model = model
        self.config = config
        self.step = 0
        self.data = data
        self.world = world or World()
        require(
            config.batch_size % self.world.size == 0,
            f"train.batch_size must be a multiple of the {self.world.size} processes",
            config.batch_size,
        )
        self.total_steps = total_steps(config, data.num_windows)
        self._warmup = warmup_steps(config, data.num_windows)
        self._augment = grid_augment(model) if config.augment == "grid" else None
        alone = self.world.size == 1
        on_gpu = model.device.type == "cuda" and data.rows.device == model.device
        recorded = config.graph and alone and on_gpu
        self._optimizer = make_optimizer(model.gpt, config, recorded=recorded)
        self._engine: Engine
        low, compiled = uses_bf16(config, model.device), uses_compile(config, model.device)
        if low and compiled and alone and fits(model):
            self._engine = FastEngine(model, self._optimizer, config)
        else:
            self._engine = PlainEngine(model, self._optimizer, config, self.world)
        self._gather: Callable[[Tensor], Batch] = self._windows
        if recorded and compiled:
            assert len(data.end_window) == len(data.num_steps)  # known before anything is compiled
            self._gather = torch.compile(self._windows, dynamic=False)
            self._augment = self._augment and torch.compile(self._augment, dynamic=False)
        self._take_step = RecordedStep(self.compute) if recorded else self.compute

    def run(self) -> Iterator[Metrics | None]:
        """Train to the end; yields after every step, so that the caller may stop or save: metrics now and then."""
        self.model.gpt.train()
        try:
            with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # it may add up in any order
                yield from self._steps()
        finally:
            self.model.gpt.eval()

    def _steps(self) -> Iterator[Metrics | None]:
        config = self.config
        losses: list[Tensor] = []
        started = time.perf_counter()
        while self.step < self.total_steps:
            rate = self._prepare_step()
            outcome = self._take_step(*self.draw())
            self.step += 1
            losses.append(outcome.loss.clone())
            if self.step % config.log_every and self.step != self.total_steps:
                yield None  # nothing so far has waited for the device
                continue
            mean = float(self.world.add_up(torch.stack(losses).mean())) / self.world.size
            if not np.isfinite(mean):
                raise ValueError(f"the loss is {mean} at step {self.step}: lower train.learning_rate")
            tokens = len(losses) * outcome.batch.tokens.numel() * self.world.size
            yield Metrics(
                step=self.step,
                total_steps=self.total_steps,
                loss=mean,
                losses=losses_by_kind(outcome.by_token, outcome.batch, self.model.layout, self.world.add_up),
                learning_rate=rate,
                gradient_norm=float(outcome.norm),
                tokens_per_second=tokens / (time.perf_counter() - started),
            )
            losses.clear()
            started = time.perf_counter()

    def draw(self) -> tuple[Tensor, ...]:
        """What the batch of this step is made from, this process's share of it: see `batch`."""
        config = self.config
        index = batch_indices(self.data.num_windows, config.batch_size, seed=config.seed, step=self.step)
        drawn = (_send(self.world.share(index), self.data.rows.device),)
        if self._augment is None:
            return drawn
        generator = torch.Generator().manual_seed(stream_seed(config.seed, self.step))
        uniform = self.world.share(torch.rand(config.batch_size, 4, generator=generator))
        return *drawn, _send(uniform, self.model.device)

    def compute(self, *drawn: Tensor) -> Outcome:
        """One step on the batch of these numbers."""
        batch = self.batch(*drawn)
        loss, by_token = self.forward(batch)
        self.backward(loss)
        return Outcome(batch, loss.detach(), by_token.detach(), self.update())

    def batch(self, index: Tensor, uniform: Tensor | None = None) -> Batch:
        """The windows of these numbers [B], on the model's device; `uniform` [B, 4] decides how they are seen."""
        batch = self._gather(index)
        maps = None if batch.maps is None else _send(batch.maps, self.model.device)
        batch = Batch(_send(batch.tokens, self.model.device), _send(batch.real, self.model.device), maps)
        return batch if self._augment is None or uniform is None else self._augment(batch, uniform)

    def _windows(self, index: Tensor) -> Batch:
        return gather_windows(self.data, index, self.model.gpt.config.window, self.model.layout, self.model.tokens)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and each prediction's own."""
        return self._engine.loss(batch)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the whole batch's loss."""
        self._engine.backward(loss)

    def update(self) -> Tensor:
        """One step of the optimiser; returns the norm that the gradients had."""
        return self._engine.update()

    def _prepare_step(self) -> float:
        """Set the rate and the dropout of this step, each a function of seed and step alone."""
        rate = learning_rate(
            self.step,
            peak=self.config.learning_rate,
            warmup=self._warmup,
            total=self.total_steps,
            final_share=self.config.final_lr_share,
        )
        self._engine.set_rate(rate)
        # Dropout draws from torch's global generator, the one place where randomness cannot be an argument.
        # Each process drops other activations of its share; the first draws what a process alone would.
        key = [self.config.seed, self.step] + [self.world.rank] * (self.world.rank > 0)
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        return rate

    def save(self, path: Path) -> None:
        """Write all that is needed to go on: weights, moments and step, in one file."""
        tensors = {f"weights.{name}": value for name, value in self.model.gpt.state_dict().items()}
        for name, parameter in self.model.gpt.named_parameters():
            for moment, value in self._optimizer.state[parameter].items():
                tensors[f"{moment}.{name}"] = value
        write_tensors(path, tensors, {"step": str(self.step)})

    def load(self, path: Path) -> None:
        """Go on from a file of `save`."""
        tensors, metadata = read_tensors(path)
        weights = {
            name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")
        }
        try:
            self.model.gpt.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: not the state of this model ({str(error).splitlines()[-1].strip()})") from error
        for name, parameter in self.model.gpt.named_parameters():
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                if f"{moment}.{name}" not in tensors:
                    continue
                stored, state = tensors[f"{moment}.{name}"], self._optimizer.state[parameter]
                if moment in state:
                    state[moment].copy_(stored)  # it may be a view of all of them
                else:
                    state[moment] = stored.to(parameter.device)
        self._engine.refresh()
        self.step = int(metadata["step"])


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on another device, without waiting for it."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
