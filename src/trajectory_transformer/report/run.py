"""What a run folder holds, read for its report page: settings, losses, evaluations, played episodes, pictures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.files import file_sha256, read_json
from trajectory_transformer.results import EPISODES
from trajectory_transformer.runs import METRICS, TRAINING
from trajectory_transformer.runs.settings import RUN

CHECKPOINT = "checkpoint.json"
DRAWN = ("routes.png", "loss.png")  # pictures of `tt demo` that the page draws itself
_MEDIA = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4"}
_MAX_MEDIA = 20 * 2**20  # bytes of a picture or video that is embedded


@dataclass(frozen=True)
class LossRecord:
    """One report of training."""

    step: int
    losses: dict[str, float]  # by kind of token, or by name for baselines
    validation: dict[str, float] = field(default_factory=dict)  # on held-out episodes; empty between validations
    validation_loss: float = inf
    evaluation: dict[str, float] = field(default_factory=dict)  # of played episodes; empty between evaluations


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder."""

    folder: Path
    description: Mapping[str, Any] = field(default_factory=dict)  # checkpoint.json
    settings: Mapping[str, Any] = field(default_factory=dict)  # run.json
    losses: Sequence[LossRecord] = ()
    total_steps: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)  # training.json
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # result files by name
    played: Dataset | None = None  # episodes of the first evaluation
    media: Sequence[Path] = ()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def best(self) -> LossRecord | None:
        """The report with the smallest validation loss; None without held-out episodes."""
        found = min(self.losses, key=lambda record: record.validation_loss, default=None)
        return found if found is not None and found.validation else None

    @property
    def env(self) -> str | None:
        """The environment it was evaluated in, or that its data came from."""
        for result in self.evaluations.values():
            return str(result.get("settings", {}).get("env"))
        env = self.description.get("metadata", {}).get("env")
        return None if env is None else str(env)


def is_run(folder: str | Path) -> bool:
    """Whether a folder holds a run: a checkpoint or the settings of training."""
    return any((Path(folder) / name).is_file() for name in (CHECKPOINT, RUN))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder; parts that do not exist are left empty."""
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder}: not a run folder; it has neither {CHECKPOINT} nor {RUN}")
    losses, total = _read_losses(folder / METRICS)
    evaluations = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name != "evaluation.json", path.name)):
        content = _read_json(path) if path.name not in (CHECKPOINT, RUN, TRAINING) else {}
        if str(content.get("name", "")).startswith("evaluate"):
            evaluations[path.stem] = _checked(path, content)
    played = None
    for name in evaluations:
        if (folder / f"{name}.npz").is_file():
            played = _played(folder / f"{name}.npz", evaluations[name])
            break
    return RunRecord(
        folder=folder,
        description=_read_json(folder / CHECKPOINT),
        settings=_read_json(folder / RUN),
        losses=losses,
        total_steps=total,
        training=_read_json(folder / TRAINING),
        evaluations=evaluations,
        played=played,
        media=[path for path in sorted(folder.iterdir()) if path.suffix in _MEDIA and path.name not in DRAWN],
    )


def _checked(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Refuse a result that cannot be shown."""
    metrics, settings = result.get("metrics"), result.get("settings", {})
    is_flat = isinstance(metrics, dict) and all(isinstance(value, int | float) for value in metrics.values())
    returns = result.get("returns", [])
    are_numbers = isinstance(returns, list) and all(isinstance(value, int | float) for value in returns)
    if not is_flat or not isinstance(settings, dict) or not are_numbers:
        raise ValueError(f"{path}: not a result of tt evaluate; metrics and returns must be numbers")
    if not isinstance(result.get("seconds", 0), int | float):
        raise ValueError(f"{path}: not a result of tt evaluate: seconds must be a number")
    return result


def _played(path: Path, result: Mapping[str, Any]) -> Dataset:
    """The episodes of an evaluation; refuses those that are damaged or of another one."""
    if EPISODES in result and result[EPISODES] != file_sha256(path):
        raise ValueError(
            f"{path}: the file is damaged or belongs to another evaluation: its SHA-256 is not the one in "
            f"{path.with_suffix('.json').name}; play the episodes again with tt evaluate --overwrite true"
        )
    return load_npz(path)


def media_type(path: Path) -> str | None:
    """MIME type of a picture or video; None if it is too large to embed."""
    return _MEDIA[path.suffix] if path.stat().st_size <= _MAX_MEDIA else None


def interval(metrics: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """95 % interval of a mean: the stored one, Wilson's for a success rate, else two standard errors."""
    if f"{name}_low" in metrics and f"{name}_high" in metrics:
        return metrics[f"{name}_low"], metrics[f"{name}_high"]
    count, spread = metrics.get(f"{name}_n"), metrics.get(f"{name}_stderr")
    if not count or name not in metrics:
        return None
    if name == "success_rate":
        return wilson(metrics[name], count)
    if spread is None or count < 2:
        return None
    return metrics[name] - 1.96 * spread, metrics[name] + 1.96 * spread


def wilson(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` trials."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _read_losses(path: Path) -> tuple[list[LossRecord], int | None]:
    """Losses by step; a line truncated by a kill does not count."""
    records, total = [], None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            stored = json.loads(line)
            # A baseline has one number per training seed.
            losses = {str(kind): float(np.mean(value)) for kind, value in stored["losses"].items()}
            record = LossRecord(
                int(stored["step"]),
                losses,
                {str(kind): float(value) for kind, value in stored.get("validation_losses", {}).items()},
                float(stored.get("validation_loss", inf)),
                {str(name): float(value) for name, value in stored.get("evaluation", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            continue
        total = stored.get("total_steps") if isinstance(stored.get("total_steps"), int) else total
        if all(isfinite(loss) for loss in losses.values()):
            records.append(record)
    return records, total


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file does not exist."""
    if not path.is_file():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}
