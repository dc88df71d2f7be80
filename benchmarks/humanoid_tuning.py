"""Settings of the predictors of the humanoid experiment (`humanoid.py`), compared on starts in held-out episodes.

    python benchmarks/humanoid_tuning.py --policies DIR --work DIR

Every job is a command that writes a file to the work folder, and the same command continues what was interrupted. The
data is that of `humanoid.py`; reference episodes, which the experiment is scored with, play no part. The jobs:

- fit: one ensemble for each row of `ENSEMBLES`. The first row has the sizes of Chua et al. and is the reference, with a
  linear model and one that predicts no change, for errors of one step.
- train, study: one Trajectory Transformer for each row of `MODELS`, all trained for about the same time: 135 seconds on
  an H200, as many steps as each takes in that time.

A row is scored by its log-likelihood with predicted actions, mean over all steps. Writes <out>/humanoid_tuning.json.
`humanoid.py` has the best ensemble; the best model takes more time than it has.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.humanoid_data import collect_data
from benchmarks.humanoid_jobs import NUM_BINS, Places, model_flags, options_parser, run_timed, training_job, words_of
from benchmarks.paper.table import MORE_TO_DO, TT, Job, Queue, command
from trajectory_transformer.analysis.predictors import BEHAVIOUR, EnsemblePredictor
from trajectory_transformer.analysis.protocol import study_dataset
from trajectory_transformer.analysis.study import StudyConfig
from trajectory_transformer.analysis.summary import Curve
from trajectory_transformer.data.episode import Dataset, DoubleArray, FloatArray, load_npz
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.pets import EnsembleConfig, fit, fit_behaviour
from trajectory_transformer.results import write_result
from trajectory_transformer.tokens.discretizer import uniform_edges

# Networks, elites, hidden layers and width of the ensembles. The first sizes are those of Chua et al.
ENSEMBLES = (
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 200},
    {"num_networks": 7, "num_elites": 5, "num_layers": 3, "width": 200},
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 400},
    {"num_networks": 7, "num_elites": 5, "num_layers": 2, "width": 512},
    {"num_networks": 3, "num_elites": 3, "num_layers": 4, "width": 400},
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 800},
)
# Settings of `tt train`. The first row has the width, batch, rate and optimizer of the preset.
_NAMES = ("model.width", "train.batch_size", "train.learning_rate", "train.optimizer", "train.steps")
_ROWS = (
    (128, 256, 4e-3, "adamw", 16_523),
    (128, 64, 3e-3, "adamw", 44_402),
    (128, 64, 2e-3, "adam", 44_402),
    (256, 64, 1.5e-3, "adamw", 24_305),
    (256, 64, 1e-3, "adam", 24_305),
)
MODELS: tuple[dict[str, object], ...] = tuple(dict(zip(_NAMES, row, strict=True)) for row in _ROWS)
SEED = 1000  # of weights and starts; scored predictors have seeds 0, 1, ...


def ensemble_row(work: Path, row: int) -> Path:
    """The score of an ensemble."""
    return work / "tuning" / f"ensemble_{row}.json"


def model_row(work: Path, row: int) -> Path:
    """The study of a model."""
    return work / "tuning" / f"model_{row}.json"


def tune_ensemble(options: argparse.Namespace, places: Places) -> None:
    """Fit one ensemble of the table and score it."""
    began = time.perf_counter()
    config = EnsembleConfig(**ENSEMBLES[options.row], epochs=options.pets_epochs, batch_size=options.pets_batch)  # type: ignore[arg-type]
    train, held_out = load_npz(places.data("train")), load_npz(places.data("held_out"))
    folder = places.work / "tuning" / f"pets_{options.row}"
    device = str(options.device)
    ensemble = fit(train, config, out=folder, seed=SEED, resume=True, device=device)
    behaviour = fit_behaviour(train, config, out=folder / BEHAVIOUR, seed=SEED, resume=True, device=device)
    states = np.concatenate([episode.observations for episode in train]).astype(np.float64)
    study = study_dataset(
        {"pets": EnsemblePredictor(ensemble, behaviour)},
        held_out,
        StudyConfig(horizon=options.horizon, samples=options.samples, seed=SEED),
        num_starts=options.starts,
        context=options.context,
        actions=("policy", "recorded"),
        edges=[uniform_edges(column, NUM_BINS) for column in states.T],
    )
    means = {f"mean_logp_{kind}": mean_log_prob(curves["pets"]) for kind, curves in study.curves.items()}
    errors = one_step_errors(lambda *given: ensemble.gaussians(*given)[0].mean(dim=0).cpu().numpy(), train, held_out)
    content = {
        "ensemble": asdict(config),
        "metrics": {**means, **errors, **study.metrics},
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_atomically(ensemble_row(places.work, options.row), (json.dumps(content, indent=2) + "\n").encode())


def mean_log_prob(curve: Curve) -> float:
    """Mean over all steps that some visit reaches."""
    return float(np.mean([value for value in curve["log_prob"] if value is not None]))


def one_step_errors(predict: Callable[..., FloatArray], train: Dataset, held_out: Dataset) -> dict[str, float]:
    """Squared errors of predicted next states, in variances of the data: of PETS, a linear model and no change."""

    def rows(dataset: Dataset) -> tuple[DoubleArray, DoubleArray, DoubleArray]:
        states = np.concatenate([episode.observations[:-1] for episode in dataset]).astype(np.float64)
        actions = np.concatenate([episode.actions for episode in dataset]).astype(np.float64)
        return states, actions, np.concatenate([episode.observations[1:] for episode in dataset]).astype(np.float64)

    def features(states: DoubleArray, actions: DoubleArray) -> DoubleArray:
        return np.concatenate([states, actions, np.ones((len(states), 1))], axis=1)

    states, actions, following = rows(train)
    variance = np.maximum(states.var(axis=0), 1e-12)
    inputs = features(states, actions)
    linear = np.linalg.lstsq(inputs.T @ inputs, inputs.T @ following, rcond=None)[0]
    states, actions, following = rows(held_out)
    own = predict(states.astype(np.float32), actions.astype(np.float32))
    found = {"": own, "_linear": features(states, actions) @ linear, "_no_change": states}
    return {f"one_step_mse{name}": float(((each - following) ** 2 / variance).mean()) for name, each in found.items()}


def jobs(options: argparse.Namespace, places: Places) -> list[Job]:
    """All jobs, those that others wait for first."""
    script = (sys.executable, Path(__file__), "--policies", options.policies, "--work", options.work)
    shared = words_of(options, SHARED)
    train = places.data("train")
    found = [Job("collect", train, command(*script, *shared, "--part", "collect"))]
    for row in options.ensembles:
        part = command(*script, *shared, "--part", "ensemble", "--row", row)
        found.append(Job("fit", ensemble_row(options.work, row), part, (train,)))
    for row in options.models:
        folder = options.work / "tuning" / f"tt_{row}"
        flags = ["--seed", SEED, *model_flags(MODELS[row])]
        found.append(training_job(train, folder, options.device, flags, (train,)))
        words: list[object] = ["--predictors", json.dumps({"tt": str(folder)}), "--out", model_row(options.work, row)]
        words += ["--horizon", options.horizon, "--samples", options.model_samples, "--starts", options.starts]
        words += ["--context", options.context, "--seed", SEED, "--device", options.device]
        words += ["--backend", options.backend, "--max_rows", options.max_rows]
        study = command(*TT, "study", places.data("held_out"), *words)
        found.append(Job("study", model_row(options.work, row), study, (folder / "training.json",)))
    return found


def write_table(options: argparse.Namespace, seconds: float) -> None:
    """Write all rows that are complete."""
    ensembles, models = [], []
    for row in options.ensembles:
        if ensemble_row(options.work, row).exists():
            ensembles.append({"row": row, **json.loads(ensemble_row(options.work, row).read_text())})
    for row in options.models:
        if model_row(options.work, row).exists():
            study = json.loads(model_row(options.work, row).read_text())
            curve = study["curves"]["policy"]["tt"]
            metrics = {"mean_logp_policy": mean_log_prob(curve), **study["metrics"]}
            training = json.loads((options.work / "tuning" / f"tt_{row}" / "training.json").read_text())
            models.append({"row": row, "model": MODELS[row], "metrics": metrics, "loss": training["metrics"]["loss"]})
    metrics = {
        f"{kind}_{each['row']}_mean_logp": each["metrics"]["mean_logp_policy"]
        for kind, rows in (("ensemble", ensembles), ("model", models))
        for each in rows
    }
    path = options.out / "humanoid_tuning.json"
    write_result(
        path,
        name="prediction humanoid tuning",
        command="python " + shlex.join(sys.argv),
        device=find_device(options.device),
        seeds=[SEED],
        seconds=seconds,
        metrics=metrics,
        details={"ensembles": ensembles, "models": models},
    )
    print(f"wrote {path}", flush=True)


SHARED = (
    "scale", "workers", "held_out", "starts", "context", "horizon", "samples", "pets_epochs", "pets_batch", "device",
)  # fmt: skip
PARTS = {"collect": collect_data, "ensemble": tune_ensemble}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the script."""
    parser = options_parser(__doc__, PARTS)
    parser.add_argument("--row", type=int, default=0, help="row of the ensembles, for the part ensemble")
    all_rows = {"ensembles": len(ENSEMBLES), "models": len(MODELS)}
    for name, count in all_rows.items():
        parser.add_argument(f"--{name}", nargs="*", type=int, default=list(range(count)), help=f"rows of the {name}")
    parser.add_argument("--starts", type=int, default=16, help="starts in held-out episodes that score a row")
    parser.add_argument("--model_samples", type=int, default=250, help="the same as --samples, for a model")
    parser.add_argument("--pets_epochs", type=int, default=16, help="passes over the data of an ensemble")
    options = parser.parse_args(arguments)
    for name, count in all_rows.items():
        wrong = [row for row in getattr(options, name) if not 0 <= row < count]
        if wrong:
            parser.error(f"--{name} must lie in [0, {count}), got {wrong[0]}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when all rows are written."""
    began = time.monotonic()
    options = parse(arguments)
    places = Places(options.work)
    if options.part != "all":
        PARTS[options.part](options, places)
        return 0
    deadline = began + (options.time_limit or float("inf"))
    slots = {"collect": 1, "train": 1, "fit": 1, "study": 1}
    queue = Queue(slots, options.work / "logs", deadline)
    complete, seconds = run_timed(queue, jobs(options, places), options.work / "tuning" / "seconds.json")
    write_table(options, seconds)
    if not complete:
        print("out of time; run the same command to continue", flush=True)
    return 0 if complete else MORE_TO_DO


if __name__ == "__main__":
    sys.exit(main())
