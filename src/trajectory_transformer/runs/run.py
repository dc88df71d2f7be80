"""A training run and the folder that it writes."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from trajectory_transformer.files import lock_folder
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import write_result
from trajectory_transformer.runs.metrics import JsonLines, LogName, MetricsWriter, last_record, open_log
from trajectory_transformer.runs.settings import RUN, RunSettings
from trajectory_transformer.training.train import Metrics, Trainer

RESUME, METRICS, TRAINING = "resume.safetensors", "metrics.jsonl", "training.json"
LAST = "last"  # folder of the last step's checkpoint, where the run folder holds the best one

Play = Callable[[TrajectoryModel], Mapping[str, float]]
"""Plays episodes with a model and returns metrics by name."""


class Run:
    """A training run and the folder it writes; without a folder it keeps nothing."""

    def __init__(self, settings: RunSettings, folder: Path | None, trainer: Trainer) -> None:
        """Bind a trainer to a folder that exists."""
        self.settings = settings
        self.folder = folder
        self.trainer = trainer
        # Released when training ends, or with the process.
        self.lock = lock_folder(folder) if folder is not None and trainer.world.leads else None
        self.writers: list[MetricsWriter] = []
        if folder is not None and trainer.world.leads:
            self.writers.append(JsonLines(folder / METRICS, trainer.step))
        self.play: Play | None = None
        self.evaluate_every: int | None = None
        self.best: Metrics | None = None  # of this process, by training loss
        self.last: Metrics | None = None

    @property
    def finished(self) -> bool:
        """Whether the last step was taken, or training stopped early."""
        return self.trainer.finished

    @property
    def model(self) -> TrajectoryModel:
        """The model to use: with held-out episodes the one with the smallest validation loss, else the last one."""
        best = None if self.trainer.validation is None else self.trainer.validation.best_model()
        if best is None:
            return self.trainer.model
        best.gpt.to(self.trainer.model.device)
        return best

    @property
    def has_diverged(self) -> bool:
        """Whether the loss has risen since its minimum by more than batches differ."""
        return self.best is not None and self.last is not None and self.last.loss > 1.2 * self.best.loss + 0.1

    def advance(self) -> Iterator[Metrics | None]:
        """Train to the end or to Ctrl-C. Either way the folder then holds the last step. Yields after every step."""
        trainer, world = self.trainer, self.trainer.world
        first, started = trainer.step, time.perf_counter()
        stopping = False
        with noted_interrupts() as interrupts, ExitStack() as opened:
            for writer in self.writers:
                opened.callback(writer.close)
            for metrics in trainer.run():
                if metrics is not None:
                    metrics = self._evaluated(metrics)
                    self.last = metrics
                    self.best = metrics if self.best is None or metrics.loss < self.best.loss else self.best
                    for writer in self.writers:
                        writer.write(metrics)
                # Several processes must stop at the same step. They agree when they report, because asking at every
                # step would synchronise with the device each time.
                if world.size == 1 or metrics is not None:
                    stopping = world.any(bool(interrupts), trainer.model.device)
                if stopping or self.finished or trainer.step % self.settings.checkpoint_every == 0:
                    self.save()
                yield metrics
                if stopping and not self.finished:
                    self._release()
                    return
        if self.finished and (self.last is not None or not self._has_result):
            self._write_result(time.perf_counter() - started, trainer.step - first, self.last)
        self._release()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    @property
    def _has_result(self) -> bool:
        return self.folder is None or (self.folder / TRAINING).is_file()

    def add_log(self, name: LogName) -> None:
        """Also write the metrics for TensorBoard or Weights & Biases."""
        if self.folder is not None and self.trainer.world.leads:
            self.writers.append(open_log(name, self.folder, self.trainer.step, asdict(self.settings)))

    def save(self) -> None:
        """Write the state to resume from, then the checkpoint to use."""
        if self.folder is not None and self.trainer.world.leads:
            self.trainer.save(self.folder / RESUME)
            self.save_models()

    def save_models(self) -> None:
        """Write the checkpoint to use and, with held-out episodes, that of the last step beside it."""
        if self.folder is None or not self.trainer.world.leads:
            return
        self.model.save(self.folder)
        if self.trainer.validation is not None:
            self.trainer.model.save(self.folder / LAST)

    def _evaluated(self, metrics: Metrics) -> Metrics:
        """The same metrics, with those of played episodes if they are due."""
        every, trainer = self.evaluate_every, self.trainer
        if self.play is None or every is None or not trainer.world.leads:
            return metrics
        before = (metrics.step - 1) // trainer.log_every * trainer.log_every  # step of the last report
        if metrics.step // every == before // every and not self.finished:
            return metrics
        trainer.model.gpt.eval()
        found = self.play(trainer.model)
        trainer.model.gpt.train()
        return replace(metrics, evaluation=dict(found))

    def _write_result(self, seconds: float, steps: int, last: Metrics | None) -> None:
        """Write time and losses as a result file; those of a resumed run are of its last part.

        Without metrics of this process, because the kill came after the last step, they are those in the folder.
        """
        if self.folder is None or not self.trainer.world.leads:
            return
        known = last_record(self.folder / METRICS) if last is None else asdict(last)
        write_result(
            self.folder / TRAINING,
            name="train",
            command=self.settings.command or f"tt train --resume {self.folder}",
            device=self.trainer.model.device,
            seeds=[self.settings.seed],
            seconds=seconds,
            metrics={
                "steps": steps,
                **{name: known[name] for name in ("loss",) if name in known},
                **{f"loss_{kind}": value for kind, value in known.get("losses", {}).items()},
                **self._validated(),
                **{name: known[name] for name in ("tokens_per_second",) if name in known},
            },
        )

    def _validated(self) -> dict[str, float]:
        """The smallest validation loss and its step."""
        validation = self.trainer.validation
        if validation is None:
            return {}
        return {"validation_loss": validation.best_loss, "best_step": validation.best_step}


def check_resumable(folder: Path) -> None:
    """Refuse to resume in a folder that lacks the files of a run."""
    for name in (RUN, RESUME):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: the file is missing; a run to resume has it")


@contextmanager
def noted_interrupts() -> Iterator[Sequence[int]]:
    """Record Ctrl-C and SIGTERM instead of raising, so that a step is never cut in half; a second one raises."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # only the main thread may handle signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
