"""The training loop: a run is a function of data, settings and seed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.config import TrainConfig, require
from trajectory_transformer.files import naming
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.tokens.windows import Batch, TokenizedDataset, batch_indices, gather_windows
from trajectory_transformer.training.augment import grid_augment
from trajectory_transformer.training.engine import EagerEngine, Engine
from trajectory_transformer.training.loss import losses_by_kind
from trajectory_transformer.training.optim import RECIPES, learning_rate, total_steps, warmup_steps
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.validation import Validation

MakeBatch = Callable[[Tensor, Tensor | None], Batch]
"""Window indices [B], random numbers [B, 4] for augmentation -> a batch on the model's device."""


@dataclass(frozen=True)
class Metrics:
    """What happened since the last report."""

    step: int
    total_steps: int
    loss: float  # mean over the steps since the last report
    losses: dict[str, float]  # cross-entropy of the last batch by kind of token, unweighted
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    validation_loss: float | None = None  # on held-out episodes, weighted as `loss`; None between validations
    validation_losses: dict[str, float] | None = None  # by kind of token, as `losses`
    evaluation: dict[str, float] | None = None  # metrics of episodes that were played at this step


def batch_maker(model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig) -> MakeBatch:
    """Gather windows from the data, and augment them if the settings say so."""
    augment = grid_augment(model) if config.augment == "grid" else None

    def make_batch(index: Tensor, uniform: Tensor | None) -> Batch:
        batch = gather_windows(data, index, model.gpt.config.window, model.tokenizer)
        return batch if augment is None or uniform is None else augment(batch, uniform)

    return make_batch


class Trainer:
    """A run in progress: model, engine and current step."""

    def __init__(
        self,
        model: TrajectoryModel,
        data: TokenizedDataset,
        config: TrainConfig,
        *,
        seed: int = 0,
        engine: Engine | None = None,
        make_batch: MakeBatch | None = None,
        world: World | None = None,
        log_every: int | None = None,
        held_out: TokenizedDataset | None = None,
    ) -> None:
        """Prepare step 0 of a run, in one process or as one of several. The engine is eager by default.

        The loss on `held_out` windows is measured as the run goes on, and the best weights are kept.
        """
        self.model = model
        self.data = data
        self.config = config
        self.seed = seed
        self.world = world or World()
        self.engine = engine or EagerEngine(model, config, self.world)
        self.step = 0
        require(
            config.batch_size % self.world.size == 0,
            f"train.batch_size must be a multiple of the {self.world.size} processes",
            config.batch_size,
        )
        require(data.num_windows >= 1, "training needs at least one window of two recorded states", data.num_windows)
        self.total_steps = total_steps(config, data.num_windows)
        self.log_every = log_every or min(max(self.total_steps // 100, 1), 20)
        self._warmup = warmup_steps(config, data.num_windows)
        self._make_batch = make_batch or batch_maker(model, data, config)
        self.validation = None if held_out is None else Validation(model, held_out, config, self.world)
        self._validate_every = self.validation.interval(self.total_steps, self.log_every) if self.validation else None

    @property
    def finished(self) -> bool:
        """Whether the last step was taken, or the validation loss has not fallen for long enough."""
        return self.step >= self.total_steps or (self.validation is not None and self.validation.has_stalled)

    def run(self) -> Iterator[Metrics | None]:
        """Train to the end. Yields after every step, so that the caller can stop or save: metrics or None."""
        self.model.gpt.train()
        try:
            yield from self._steps()
        finally:
            self.model.gpt.eval()

    def _steps(self) -> Iterator[Metrics | None]:
        losses: list[Tensor] = []
        started = time.perf_counter()
        while not self.finished:
            rate = self._learning_rate()
            self._seed_dropout()
            batch = self._make_batch(*self.draw())
            outcome = self.engine.step(batch, rate)
            self.step += 1
            losses.append(outcome.loss.clone())
            if self.step % self.log_every and self.step != self.total_steps:
                yield None  # nothing so far has synchronised with the device
                continue
            mean = float(self.world.add_up(torch.stack(losses).mean())) / self.world.size
            if not np.isfinite(mean):
                raise ValueError(f"the loss is {mean} at step {self.step}: lower train.learning_rate")
            tokens = len(losses) * batch.tokens.numel() * self.world.size
            metrics = Metrics(
                step=self.step,
                total_steps=self.total_steps,
                loss=mean,
                losses=losses_by_kind(outcome.by_token, batch, self.model.layout, self.world.add_up),
                learning_rate=rate,
                gradient_norm=float(outcome.norm),
                tokens_per_second=tokens / (time.perf_counter() - started),
            )
            yield self._validated(metrics)
            losses.clear()
            started = time.perf_counter()

    def _validated(self, metrics: Metrics) -> Metrics:
        """The same metrics, with the validation losses if they are due."""
        if self.validation is None or self._validate_every is None:
            return metrics
        if self.step % self._validate_every and self.step != self.total_steps:
            return metrics
        loss, losses = self.validation.measure(self.step)
        return replace(metrics, validation_loss=loss, validation_losses=losses)

    def draw(self) -> tuple[Tensor, Tensor | None]:
        """This process's share of the windows of the current step, and random numbers for augmentation."""
        size = self.config.batch_size
        index = self.world.share(batch_indices(self.data.num_windows, size, seed=self.seed, step=self.step))
        if self.config.augment == "none":
            return index, None
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.step))
        return index, self.world.share(torch.rand(size, 4, generator=generator))

    def _learning_rate(self) -> float:
        return learning_rate(
            self.step,
            peak=self.config.learning_rate,
            warmup=self._warmup,
            total=self.total_steps,
            final_share=RECIPES[self.config.optimizer].final_share,
        )

    def _seed_dropout(self) -> None:
        """Make dropout a function of seed and step alone."""
        # Dropout draws from torch's global generator, the one place where randomness cannot be an argument. Each
        # process draws its own numbers; the first draws what a single process would.
        key = [self.seed, self.step] + [self.world.rank] * (self.world.rank > 0)
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))

    def save(self, path: str | Path) -> None:
        """Write all that is needed to resume: weights, optimizer state, step and best weights, in one file."""
        tensors = {f"weights.{name}": value for name, value in self.model.gpt.state_dict().items()}
        best, validated = ({}, {}) if self.validation is None else self.validation.state()
        write_tensors(Path(path), tensors | self.engine.state() | best, {"step": str(self.step), **validated})

    def load(self, path: str | Path) -> None:
        """Resume from a file of `save`."""
        tensors, metadata = read_tensors(Path(path))
        # Before version 0.1 the map encoder was called context_encoder.
        tensors = {name.replace("context_encoder.", "map_encoder."): value for name, value in tensors.items()}
        weights = {
            name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")
        }
        try:
            self.model.gpt.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: not the state of this model ({str(error).splitlines()[-1].strip()})") from error
        with naming(path, "not the state of this run", KeyError, RuntimeError, TypeError):
            self.engine.load_state(tensors)
            if self.validation is not None:
                self.validation.load_state(tensors, metadata)
            step = int(metadata["step"])
            require(0 <= step <= self.total_steps, f"a run of {self.total_steps} steps cannot be at step", step)
        self.step = step
