"""Where the metrics of a run go: JSON lines, and TensorBoard on request."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
            # A damaged file must not stop a run: lines that are no records of an earlier step are dropped.
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _is_until(line, step)]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def write(self, metrics: "DataclassInstance") -> None:
        """Append the fields of a dataclass with a `step` as one line."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")


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
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()
