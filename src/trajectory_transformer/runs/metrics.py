"""Where the metrics of a run go: JSON lines, and TensorBoard or Weights & Biases on request."""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from trajectory_transformer.files import write_atomically
from trajectory_transformer.training.train import Metrics

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.utils.tensorboard import SummaryWriter

LogName = Literal["tensorboard", "wandb"]
WANDB_ID = "wandb-id"  # file in the run folder


class MetricsWriter(Protocol):
    """Records metrics."""

    def write(self, metrics: Metrics) -> None:
        """Record one report."""

    def close(self) -> None:
        """Finish when the run ends or stops."""


class JsonLines:
    """One JSON object per line. Lines after the step that a run resumes from are dropped: they will come again."""

    def __init__(self, path: Path, step: int) -> None:
        """Append to a file after a step."""
        self._path = path
        if path.is_file():
            # A damaged file must not stop a run: lines that are no records of an earlier step are dropped.
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _is_until(line, step)]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def write(self, metrics: "DataclassInstance") -> None:
        """Append the fields of a dataclass with a `step` that have a value, as one line."""
        known = {name: value for name, value in asdict(metrics).items() if value is not None}
        with self._path.open("a") as file:
            file.write(json.dumps(known) + "\n")

    def close(self) -> None:
        """Every line is written at once."""


def last_record(path: Path) -> dict[str, Any]:
    """The last complete record of a file of metrics; {} if there is none."""
    for line in reversed(path.read_bytes().splitlines() if path.is_file() else []):
        try:
            record = json.loads(line)
            losses = record["losses"]
            numbers = [record["loss"], record["tokens_per_second"], *losses.values()]
            if all(isinstance(each, int | float) for each in numbers):
                return {"loss": numbers[0], "tokens_per_second": numbers[1], "losses": losses}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return {}


def _is_until(line: str, step: int) -> bool:
    """Whether a line belongs to this step or an earlier one; a line truncated by a kill does not count."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def require_log(name: LogName) -> None:
    """Refuse a log whose package is missing, before anything is written."""
    _summary_writer() if name == "tensorboard" else _wandb()


def open_log(name: LogName, folder: Path, step: int, settings: Mapping[str, Any]) -> MetricsWriter:
    """A log of a run folder, from a step on; `settings` describe the run."""
    return TensorBoard(folder / name, step) if name == "tensorboard" else WeightsAndBiases(folder, settings)


def scalars(metrics: Metrics) -> dict[str, float]:
    """All numbers of a report by name."""
    found = {
        "loss": metrics.loss,
        "learning_rate": metrics.learning_rate,
        "gradient_norm": metrics.gradient_norm,
        "tokens_per_second": metrics.tokens_per_second,
        **{f"loss/{kind}": value for kind, value in metrics.losses.items()},
        **{f"validation/{kind}": value for kind, value in (metrics.validation_losses or {}).items()},
        **{f"evaluation/{name}": value for name, value in (metrics.evaluation or {}).items()},
    }
    return found if metrics.validation_loss is None else {**found, "validation": metrics.validation_loss}


def _summary_writer() -> "type[SummaryWriter]":
    """TensorBoard's writer, an optional dependency."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--log tensorboard needs: pip install 'trajectory-transformer[tensorboard]'") from error
    return SummaryWriter


class TensorBoard:
    """Scalars for TensorBoard, in a folder of the run."""

    def __init__(self, folder: Path, step: int) -> None:
        """Append to a folder after a step."""
        self._writer = _summary_writer()(str(folder), purge_step=step + 1)

    def write(self, metrics: Metrics) -> None:
        """Add one point to every curve."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()

    def close(self) -> None:
        """Nothing is left to write."""
        self._writer.close()


def _wandb() -> ModuleType:
    """Weights & Biases, an optional dependency."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError("--log wandb needs: pip install 'trajectory-transformer[wandb]'") from error
    return cast(ModuleType, wandb)


class WeightsAndBiases:
    """A run of the project `trajectory-transformer` on Weights & Biases; with WANDB_MODE=offline only in the folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start a run with the name of the folder, or go on with the one that the folder started before."""
        wandb = _wandb()
        known = folder / WANDB_ID
        if not known.is_file():
            write_atomically(known, secrets.token_hex(4).encode())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "trajectory-transformer"),
                name=folder.resolve().name,
                id=known.read_text().strip(),
                resume="allow",
                dir=folder,
                config=dict(settings),
            )
        except wandb.Error as error:
            raise ValueError(
                f"Weights & Biases cannot start ({error}); log in with: wandb login, or set WANDB_MODE=offline"
            ) from error

    def write(self, metrics: Metrics) -> None:
        """Add one point to every curve; steps that a resumed run repeats are there already."""
        self._run.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        """Send or store what is left."""
        self._run.finish()
