"""The training loop of all baselines: a run is a function of data, settings and seeds.

Data, batches, noise and step count live on the device. A step is the same function everywhere: a CPU runs it, a GPU
captures several steps as one CUDA graph and replays them.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal

import numpy as np
import torch
import torch._dynamo.config
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Algorithm, BatchT
from trajectory_transformer.baselines.data import Learner, Rows
from trajectory_transformer.baselines.networks import Tensors
from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.gpu.backends import matmul_precision, why_not_compiled
from trajectory_transformer.gpu.training.captured import CapturedCalls
from trajectory_transformer.randomness import STEP, logical_shift, mix, stream_seed, uniform

Backend = Literal["auto", "eager", "captured", "compiled"]

STEPS_PER_REPLAY = 10
_BATCHES = 0xBA  # the random stream of batches and noise


@dataclass(frozen=True)
class BaselineMetrics:
    """What happened since the last report."""

    step: int
    total_steps: int
    losses: dict[str, list[float]]  # mean of each loss over the steps since the last report, for every learner
    steps_per_second: float
    seconds_left: float


class BaselineTrainer(Generic[BatchT]):
    """A run in progress: S learners, their data and the current step."""

    def __init__(
        self,
        algorithm: Algorithm[BatchT],
        rows: Rows[BatchT],
        learners: Sequence[Learner],
        *,
        device: torch.device,
        backend: Backend = "auto",
        log_every: int | None = None,
    ) -> None:
        """Prepare step 0."""
        self.algorithm = algorithm
        self.rows = rows
        self.device = device
        self.total_steps = algorithm.settings.steps
        self.step = 0
        self.backend = choose_backend(backend, device)
        self.log_every = log_every or max(self.total_steps // 100, 1)
        keys = [stream_seed(learner.seed, _BATCHES) for learner in learners]
        self._keys = torch.tensor(keys, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)  # the current step, on the device
        self._sums: Tensors = {}  # of each loss since the last report
        self._numbers: dict[str, int] = {}  # of steps that reported it
        self._reports: dict[str, tuple[str, ...]] = {}  # losses that each kind of step reports
        if self.backend == "compiled":
            algorithm.compile()
        self._stride = 1
        self._captured: CapturedCalls | None = None
        if self.backend != "eager":
            self._stride = STEPS_PER_REPLAY
            self._captured = CapturedCalls()

    def run(self, *, pause_every: int | None = None) -> Iterator[BaselineMetrics | None]:
        """Train to the end. Yields metrics, or None where the caller may stop or save.

        With `pause_every`, a multiple of that many steps is never skipped.
        """
        started, first = time.perf_counter(), self.step
        reported = started
        marks = [self.log_every, self.total_steps] + ([pause_every] if pause_every else [])
        while self.step < self.total_steps:
            number = min([self._stride, *(mark - self.step % mark for mark in marks)])
            kinds = tuple(self.algorithm.variant(self.step + offset) for offset in range(number))
            with matmul_precision(self.algorithm.settings.tf32):
                self._run(kinds)
            self._note(kinds)
            self.step += number
            if self.step % self.log_every and self.step != self.total_steps:
                yield None  # nothing so far has synchronised with the device
                continue
            losses = self._report()
            now = time.perf_counter()
            speed = (self.step - first) / (now - started)
            steps = self.step % self.log_every or self.log_every
            yield BaselineMetrics(
                step=self.step,
                total_steps=self.total_steps,
                losses=losses,
                steps_per_second=steps / (now - reported),
                seconds_left=(self.total_steps - self.step) / speed,
            )
            reported = time.perf_counter()

    def _run(self, kinds: tuple[str, ...]) -> None:
        """Take steps of these kinds, or replay them."""
        if self._captured is None:
            self._take_steps(kinds)
        elif self.backend == "compiled":
            self._captured(kinds, lambda: self._compile_and_take_steps(kinds))
        else:
            self._captured(kinds, lambda: self._take_steps(kinds))

    def _compile_and_take_steps(self, kinds: Sequence[str]) -> None:
        # Every trainer compiles its own losses. By default torch compiles a function eight times and then gives up.
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
            self._take_steps(kinds)

    def _take_steps(self, kinds: Sequence[str]) -> None:
        """Steps of these kinds, one after the other."""
        size, rows = self.algorithm.settings.batch_size, self.rows
        # The random numbers of all steps at once, because a hash is many small kernels.
        bits = draw(self._keys, self._count, len(kinds), size, 1 + self.algorithm.noise)
        index = rows.offsets[:, None] + logical_shift(bits[..., 0], 1) % rows.counts[:, None]  # [steps, S, B]
        noise = uniform(bits[..., 1:])  # [steps, S, B, noise]
        for offset, kind in enumerate(kinds):
            losses = self.algorithm.update(rows.gather(index[offset]), noise[offset], kind)
            self._reports[kind] = tuple(losses)
            for name, value in losses.items():
                if name not in self._sums:
                    self._sums[name] = torch.zeros_like(value)
                self._sums[name] += value
        self._count += len(kinds)

    def _note(self, kinds: Sequence[str]) -> None:
        """Count the steps that reported each loss: not every kind of step reports all."""
        for name in (name for kind in kinds for name in self._reports[kind]):
            self._numbers[name] = self._numbers.get(name, 0) + 1

    def _report(self) -> dict[str, list[float]]:
        """Mean losses since the last report; waits for the device."""
        means = {name: (self._sums[name] / number).tolist() for name, number in self._numbers.items()}
        for total in self._sums.values():
            total.zero_()
        self._numbers.clear()
        for name, values in means.items():
            if not np.isfinite(values).all():
                raise ValueError(f"the loss {name} is {values} at step {self.step}: lower learning_rate")
        return means

    def state(self) -> Tensors:
        """All that is needed to resume: weights, optimizer state, target networks and losses not yet reported."""
        tensors: Tensors = {}
        for name, group in self.algorithm.groups.items():
            tensors |= {f"weights.{name}.{key}": value for key, value in group.tensors.items()}
            tensors |= {f"optimizer.{name}.{key}": value for key, value in group.state().items()}
        for name, copy in self.algorithm.copies.items():
            tensors |= {f"copies.{name}.{key}": value for key, value in copy.tensors.items()}
        return tensors | {f"sums.{name}": value for name, value in self._sums.items()}

    def save(self, path: str | Path) -> None:
        """Write `state` and the step to one file."""
        metadata = {"step": str(self.step)} | {f"steps.{name}": str(count) for name, count in self._numbers.items()}
        write_tensors(path, self.state(), metadata)

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote."""
        tensors, metadata = read_tensors(path)
        try:
            self._sums = {
                name.removeprefix("sums."): value.to(self.device)
                for name, value in tensors.items()
                if name.startswith("sums.")
            }
            for name, value in self.state().items():
                if value.shape != tensors[name].shape:
                    raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(value.shape)}")
                value.copy_(tensors[name])
            step = int(metadata["step"])
            if not 0 <= step <= self.total_steps:
                raise ValueError(f"a run of {self.total_steps} steps cannot be at step {step}")
            self.step = step
        except KeyError as error:
            raise ValueError(f"{path}: the tensor or step {error} is missing") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._count.fill_(self.step)
        starts = "steps."
        self._numbers = {
            name.removeprefix(starts): int(value) for name, value in metadata.items() if name.startswith(starts)
        }


def draw(keys: Tensor, count: Tensor, steps: int, rows: int, columns: int) -> Tensor:
    """Random bits, each a function of key, step and place: keys [S], first step [] -> [steps, S, rows, columns]."""
    places = torch.arange(1, rows * columns + 1, device=keys.device).view(rows, columns)
    numbers = count + torch.arange(1, steps + 1, device=keys.device)
    return mix(mix(keys + numbers[:, None] * STEP)[:, :, None, None] + places * STEP)


def choose_backend(backend: Backend, device: torch.device) -> Literal["eager", "captured", "compiled"]:
    """The backend for a device; `auto` selects the fastest one available."""
    if backend == "auto":
        if device.type != "cuda":
            return "eager"
        return "captured" if why_not_compiled(device) else "compiled"
    reason = None
    if backend == "captured" and device.type != "cuda":
        reason = "it needs a GPU"
    elif backend == "compiled":
        reason = why_not_compiled(device)
    if reason is not None:
        raise ValueError(f"backend {backend} cannot be used here: {reason}")
    return backend
