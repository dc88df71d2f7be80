"""What the scripts of the humanoid experiment have in common: options, places of files, flags and jobs of training."""

import argparse
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.table import TT, Job, Queue, command
from trajectory_transformer.files import write_atomically

NUM_BINS = 100
VARIANTS = {"observed": "", "masked": "_masked"}


@dataclass(frozen=True)
class Places:
    """Where the files lie."""

    work: Path

    def data(self, name: str) -> Path:
        """A dataset: train, train_masked, held_out or references."""
        return self.work / "data" / f"{name}.npz"

    def run(self, name: str, variant: str, seed: int) -> Path:
        """The folder of a model or ensemble."""
        return self.work / "runs" / f"{name}{VARIANTS[variant]}_{seed}"

    @property
    def futures(self) -> Path:
        """One future of each predictor, and what happened."""
        return self.work / "futures.npz"

    def study(self, variant: str, seed: int) -> Path:
        """The result of a study."""
        return self.work / "studies" / f"{variant}_{seed}.json"


def basic_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files to collect with")
    parser.add_argument("--out", type=Path, default=Path("results/prediction"), help="folder of the result")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that collect")
    parser.add_argument("--context", type=int, default=9, help="transitions before a start")
    parser.add_argument("--horizon", type=int, default=100, help="steps to predict")
    parser.add_argument("--samples", type=int, default=1000, help="futures of each start")
    return parser


def options_parser(description: str | None, parts: Collection[str]) -> argparse.ArgumentParser:
    """A parser with the options of scripts that train."""
    parser = basic_parser(description)
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the jobs")
    parser.add_argument("--part", choices=("all", *parts), default="all", help="one job instead of all")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, for a trial")
    parser.add_argument("--held_out", type=float, default=0.05, help="share of the episodes that is held out")
    parser.add_argument("--pets_batch", type=int, default=1024, help="transitions per step of PETS")
    parser.add_argument("--backend", default="auto", help="decoder of the studies")
    parser.add_argument("--max_rows", type=int, default=4096, help="sequences extended at a time")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this command ends")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser


def reference_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of reference episodes."""
    parser.add_argument("--starts", type=int, default=4, help="fixed starts of the references")
    parser.add_argument("--visits", type=int, default=32, help="episodes from each start")
    parser.add_argument("--reference_seed", type=int, default=8_000_000, help="other seeds give other starts")


def words_of(options: argparse.Namespace, names: Sequence[str]) -> list[object]:
    """The flags of a script that give these options again."""
    return [word for name in names for word in (f"--{name}", getattr(options, name))]


def model_flags(settings: Mapping[str, object], num_bins: int = NUM_BINS) -> list[object]:
    """Flags of `tt train` for a model of states and actions with uniform bins, by the names of its settings."""
    # For likelihoods all tokens count alike; the preset, made for planning, gives actions more weight.
    common = {"tokens.discretizer": "uniform", "tokens.rewards": "false", "tokens.num_bins": num_bins}
    common |= {"train.action_weight": 1, "checkpoint_every": 5000, "preset": "default"}
    return [word for name, value in {**common, **settings}.items() for word in (f"--{name}", value)]


def training_job(data: Path, folder: Path, device: str, flags: Sequence[object], needs: tuple[Path, ...]) -> Job:
    """Train a model, or continue its training."""
    return Job(
        "train",
        folder / "training.json",
        command(*TT, "train", data, "--out", folder, "--device", device, *flags),
        needs,
        command(*TT, "train", data, "--resume", folder, "--device", device),
        folder / "run.json",
    )


def run_timed(queue: Queue, jobs: Sequence[Job], path: Path) -> tuple[bool, float]:
    """Run jobs; whether nothing is missing then, and the seconds of all commands so far, also of those that failed."""
    began = time.monotonic()
    try:
        complete = queue.run(jobs)
    finally:
        seconds = spent(path, time.monotonic() - began)
    return complete, seconds


def spent(path: Path, seconds: float) -> float:
    """Seconds of all commands so far, with those of this one; the file keeps them."""
    total = seconds + (json.loads(path.read_text()) if path.exists() else 0.0)
    write_atomically(path, json.dumps(total).encode())
    return float(total)
