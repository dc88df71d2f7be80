"""Where the metrics of a run go: JSON lines, and TensorBoard on request."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trajectory_transformer.files import write_atomically
from trajectory_transformer.training.train import Metrics

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.utils.tensorboard import SummaryWriter


class MetricsWriter(Protocol):
    """Records metrics."""

    def write(self, metrics: Metrics) -> None:
        """Record one report."""


class JsonLines:
    """One JSON object per line. Lines after the step that a run resumes from are dropped: they will come again."""

    def __init__(self, path: Path, step: int) -> None:
        """Append to a file after a step."""
        self._path = path
        if path.is_file():
            kept = [line for line in path.read_text().splitlines() if _is_until(line, step)]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def write(self, metrics: "DataclassInstance") -> None:
        """Append the fields of a dataclass with a `step` that have a value, as one line."""
        known = {name: value for name, value in asdict(metrics).items() if value is not None}
        with self._path.open("a") as file:
            file.write(json.dumps(known) + "\n")


def _is_until(line: str, step: int) -> bool:
    """Whether a line belongs to this step or an earlier one; a line truncated by a kill does not count."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


def summary_writer() -> "type[SummaryWriter]":
    """TensorBoard's writer, an optional dependency."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs: pip install 'trajectory-transformer[tensorboard]'") from error
    return SummaryWriter


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        """Append to a folder after a step."""
        self._writer = summary_writer()(str(folder), purge_step=step)

    def write(self, metrics: Metrics) -> None:
        """Add one point to every curve."""
        scalars = {
            "loss": metrics.loss,
            "learning_rate": metrics.learning_rate,
            "gradient_norm": metrics.gradient_norm,
            "tokens_per_second": metrics.tokens_per_second,
            **{f"loss/{kind}": value for kind, value in metrics.losses.items()},
            **{f"validation/{kind}": value for kind, value in (metrics.validation_losses or {}).items()},
            **{f"evaluation/{name}": value for name, value in (metrics.evaluation or {}).items()},
        }
        if metrics.validation_loss is not None:
            scalars["validation"] = metrics.validation_loss
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()
