"""`tt pets`: fit a probabilistic ensemble and the policy that acts in its predictions."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.data import SOURCES, DataFlags, load_dataset
from trajectory_transformer.cli.parser import command_line
from trajectory_transformer.config import EnsembleConfig
from trajectory_transformer.results import write_result

if TYPE_CHECKING:
    from trajectory_transformer.pets import EnsembleMetrics

TRAINING = "training.json"


@dataclass(frozen=True, kw_only=True)
class FitPets(DataFlags):
    """Fit a probabilistic ensemble (PETS) and clone the policy of a dataset, for `tt study`."""

    positional: ClassVar[dict[str, str]] = {"dataset": SOURCES}
    required: ClassVar[tuple[str, ...]] = ("dataset",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt pets data/split/train.npz --out runs/pets",
        "tt pets data/split/train.npz --out runs/pets --ensemble.num_networks 5 --ensemble.width 256",
    )

    dataset: str | None = None
    """Dataset to fit."""
    out: Path = Path("runs/pets")
    """Folder to write; must not exist, unless it is resumed."""
    overwrite: bool = False
    """Replace what exists there."""
    resume: bool = False
    """Continue the fit in the folder with the same data, settings and seed."""
    hidden: float = 0.0
    """Probability with which each entry of every state is hidden; the networks read 0 and the mask."""
    mask_seed: int = 0
    """Seed of the masks, as in `tt data split`."""
    seed: int = 0
    """Seed of the weights, the bootstrap samples and the batches."""
    device: str = "auto"
    """auto, cpu or cuda."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)

    def execute(self) -> None:
        """Fit both and write their folder."""
        from trajectory_transformer.analysis.masking import observation_masks
        from trajectory_transformer.analysis.predictors import BEHAVIOUR
        from trajectory_transformer.gpu.backends import find_device
        from trajectory_transformer.pets import fit, fit_behaviour

        if not self.resume:
            claim(self.out, overwrite=self.overwrite)
        dataset = load_dataset(self.dataset, self.reading)
        masks = observation_masks(dataset.episodes, self.hidden, self.mask_seed) if self.hidden else None
        began, losses = time.perf_counter(), dict[str, list[float]](ensemble=[], behaviour=[])

        def record(kind: str, metrics: "EnsembleMetrics") -> None:
            value = float(np.mean(metrics.held_out)) if metrics.held_out else metrics.loss
            losses[kind].append(value)
            console.print(f"{kind}, pass {metrics.epoch}: held-out loss {value:.4f}")

        fit(
            dataset,
            self.ensemble,
            masks=masks,
            seed=self.seed,
            out=self.out,
            resume=self.resume,
            device=self.device,
            on_metrics=lambda metrics: record("ensemble", metrics),
        )
        fit_behaviour(
            dataset,
            self.ensemble,
            masks=masks,
            seed=self.seed,
            out=self.out / BEHAVIOUR,
            resume=self.resume,
            device=self.device,
            on_metrics=lambda metrics: record("behaviour", metrics),
        )
        metrics = {f"{kind}_held_out_loss": min(values) for kind, values in losses.items() if values}
        metrics |= {f"{kind}_passes": float(len(values)) for kind, values in losses.items()}
        write_result(
            self.out / TRAINING,
            name="probabilistic ensemble",
            command=command_line("pets", self, leave_out=("resume", "device", "overwrite")),
            device=find_device(self.device),
            seeds=[self.seed],
            seconds=time.perf_counter() - began,
            metrics=metrics,
            details={"ensemble": asdict(self.ensemble), "losses": losses},
        )
        console.print(f"wrote {self.out}")
