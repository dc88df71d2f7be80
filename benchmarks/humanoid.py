"""The prediction experiment of the paper on humanoid: TT, its Markovian variant and PETS, fully and partially observed.

    python benchmarks/humanoid.py --policies DIR --work DIR [--seeds 3]

Every job is a command that writes a file to the work folder, and the same command continues what was interrupted.
`--time_limit` stops before a limit; exit code 75 then means that there is more to do. The jobs:

- collect: the recipe humanoid-expert. The policy reads all 348 dimensions of Humanoid-v5; the dataset holds the first
  45, positions and velocities, which are the observation without `include_cinert`, `cvel`, `qfrc_actuator` and
  `cfrc_ext`. A seeded share of the episodes is held out.
- references: the same policy from fixed starts, several times each, with seeds that no other episode has.
- train, fit: the models and the ensembles, for every seed. study: `tt study` on the references.
- futures: one sampled future of TT and PETS each, for `benchmarks/humanoid_strip.py`.

Writes <out>/humanoid.json and <out>/humanoid.png. Metrics are means over training seeds, `_stderr` their standard
errors if there are several. Settings were chosen by `humanoid_tuning.py`, on other episodes. Flags of `tt train`
change the settings of all models (`--train.steps`, `--model.width`).
"""

import argparse
import io
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.humanoid_data import HIDDEN, SPLIT_SEED, collect_data, collect_references
from benchmarks.humanoid_jobs import (
    NUM_BINS,
    VARIANTS,
    Places,
    model_flags,
    options_parser,
    reference_options,
    run_timed,
    training_job,
    words_of,
)
from benchmarks.paper.table import MORE_TO_DO, TT, Job, Queue, command
from trajectory_transformer.analysis.predictors import Past, load_predictor
from trajectory_transformer.analysis.study import find_starts
from trajectory_transformer.analysis.summary import Curve, joined_curves
from trajectory_transformer.cli import main as tt
from trajectory_transformer.data.episode import load_npz
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.pets import EnsembleConfig
from trajectory_transformer.report.prediction import Panel, likelihood_figure
from trajectory_transformer.results import mean_and_error, write_result

ENSEMBLE = {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 800}
# Optimizer, batch and rate by `humanoid_tuning.py`; wider models predict better, but take more than 25 minutes.
MODEL = {"train.optimizer": "adam", "train.batch_size": 64, "train.learning_rate": 2e-3, "train.steps": 16_000}
STUDIED = ("settings", "starts", "ranges", "num_bins")  # of a study, the same for all seeds
WINDOWS = {"tt": None, "markov": 2}  # transitions; None: as the flags say


def fit_ensemble(options: argparse.Namespace, places: Places) -> None:
    """Fit the ensemble with one seed."""
    config = EnsembleConfig(**ENSEMBLE, epochs=options.pets_epochs, batch_size=options.pets_batch)  # type: ignore[arg-type]
    masked = options.variant == "masked"
    words = [
        "pets",
        places.data("train"),
        "--out",
        places.run("pets", options.variant, options.seed),
        "--resume",
        "true",
    ]
    words += ["--seed", options.seed, "--device", options.device, "--hidden", HIDDEN if masked else 0.0]
    words += ["--mask_seed", SPLIT_SEED]
    for name, value in asdict(config).items():
        words += [f"--ensemble.{name}", json.dumps(value)]
    if tt([str(word) for word in words]):
        raise SystemExit(2)


def sample_futures(options: argparse.Namespace, places: Places) -> None:
    """Sample one future of TT and PETS, with seed 0 of all, from the first start of the references."""
    episodes = load_npz(places.data("references")).episodes
    start = find_starts(episodes, count=1, horizon=options.horizon, context=options.context, seed=0)[0]
    past = Past(start.past_states[None], start.past_actions[None])
    found = {"reality": np.concatenate([start.state[None], start.visited[0]])}
    for name in ("tt", "pets"):
        predictor = load_predictor(places.run(name, "observed", 0), find_device(options.device))
        states = predictor.predict(start.state[None], past, None, options.horizon, 1, seed=0).states[0, 0]
        found[name] = np.concatenate([start.state[None], states])
    buffer = io.BytesIO()
    np.savez(buffer, reality=found["reality"], tt=found["tt"], pets=found["pets"])
    write_atomically(places.futures, buffer.getvalue())


def jobs(options: argparse.Namespace, places: Places, train_flags: Sequence[str]) -> list[Job]:
    """All jobs, those that others wait for first."""
    script = (sys.executable, Path(__file__), "--policies", options.policies, "--work", options.work)
    shared = words_of(options, SHARED)
    train, references = places.data("train"), places.data("references")
    found = [
        Job("collect", train, command(*script, *shared, "--part", "collect")),
        Job("collect", references, command(*script, *shared, "--part", "references"), (train,)),
    ]
    for variant, suffix in VARIANTS.items():
        for seed in range(options.seeds):
            data = places.data(f"train{suffix}")
            settings = model_flags(MODEL, NUM_BINS + (variant == "masked"))
            for name, window in WINDOWS.items():
                folder = places.run(name, variant, seed)
                own = [*settings, "--seed", seed, *train_flags]
                own += [] if window is None else ["--model.window", window]
                found.append(training_job(data, folder, options.device, own, (train,)))
            fitted = places.run("pets", variant, seed) / "training.json"
            words = ("--part", "fit", "--seed", seed, "--variant", variant)
            found.append(Job("fit", fitted, command(*script, *shared, *words), (train,)))
            found.append(study_job(options, places, variant, seed))
    needs = (references, *(places.run(name, "observed", 0) / "training.json" for name in ("tt", "pets")))
    found.append(Job("play", places.futures, command(*script, *shared, "--part", "futures"), needs))
    return found


def study_job(options: argparse.Namespace, places: Places, variant: str, seed: int) -> Job:
    """Study the predictors of one seed."""
    folders = {name: places.run(name, variant, seed) for name in (*WINDOWS, "pets")}
    out = places.study(variant, seed)
    actions = ["policy", "recorded"] if seed < options.recorded_seeds else ["policy"]
    words = ["--predictors", json.dumps({name: str(folder) for name, folder in folders.items()}), "--out", out]
    # Futures of masked models hide entries too: with more of them, as many values make each histogram.
    hidden = HIDDEN if variant == "masked" else 0.0
    samples = round(options.samples / (1.0 - hidden))
    words += ["--horizon", options.horizon, "--samples", samples, "--starts", options.starts]
    words += ["--context", options.context, "--actions", json.dumps(actions), "--device", options.device]
    words += ["--backend", options.backend, "--max_rows", options.max_rows]
    words += ["--hidden", hidden]
    needs = (places.data("references"), *(folder / "training.json" for folder in folders.values()))
    return Job("play", out, command(*TT, "study", places.data("references"), *words), needs)


def write_summary(options: argparse.Namespace, places: Places, seconds: float) -> None:
    """Write the result file and the figure from all studies that are complete; `seconds` of all commands together."""
    metrics: dict[str, float] = {"seconds_total": seconds}
    details: dict[str, object] = {"ensemble": ENSEMBLE, "model": MODEL}
    panels = []
    for variant, suffix in VARIANTS.items():
        paths = [places.study(variant, seed) for seed in range(options.seeds)]
        if not all(path.exists() for path in paths):
            continue
        studies = [json.loads(path.read_text()) for path in paths]
        for name in studies[0]["metrics"]:
            if not name.endswith("_stderr"):
                values = [each["metrics"][name] for each in studies if name in each["metrics"]]
                metrics |= mean_and_error(name, values)
        curves = {
            kind: {
                name: joined_curves([each["curves"][kind][name] for each in studies if kind in each["curves"]])
                for name in studies[0]["curves"][kind]
            }
            for kind in studies[0]["curves"]
        }
        metrics |= {f"{name}{suffix}": value for name, value in reached(curves["policy"]).items()}
        oracle = metrics[f"oracle_logp{suffix}"]
        last = f"tt_logp_{options.horizon}{suffix}"
        metrics[f"tt_below_oracle_{options.horizon}{suffix}"] = oracle - metrics[last]
        details[variant] = {"curves": curves, **{key: studies[0][key] for key in STUDIED}}
        panels.append(Panel(f"{'partially' if suffix else 'fully'} observed", curves["policy"], oracle))
    if not panels:
        return
    path = options.out / "humanoid.json"
    write_result(
        path,
        name="prediction humanoid",
        command="python " + shlex.join(sys.argv),
        device=find_device(options.device),
        seeds=list(range(options.seeds)),
        seconds=seconds,
        metrics=metrics,
        details=details,
    )
    likelihood_figure(*panels).savefig(path.with_suffix(".png"), dpi=150)
    print(f"wrote {path}", flush=True)


def reached(curves: dict[str, Curve]) -> dict[str, float]:
    """Share of the steps beyond 10 at which TT is above PETS, and above the Markovian variant."""

    def share(other: str) -> float:
        pairs = list(zip(curves["tt"]["log_prob"], curves[other]["log_prob"], strict=True))[10:]
        known = [own > theirs for own, theirs in pairs if own is not None and theirs is not None]
        return float(np.mean(known)) if known else float("nan")

    found = {f"steps_tt_above_{other}": share(other) for other in ("pets", "markov")}
    return {name: value for name, value in found.items() if not np.isnan(value)}


SHARED = (
    "scale", "workers", "held_out", "starts", "visits", "reference_seed", "context", "horizon", "samples",
    "pets_epochs", "pets_batch", "device",
)  # fmt: skip
PARTS = {
    "collect": collect_data,
    "references": collect_references,
    "fit": fit_ensemble,
    "futures": sample_futures,
}


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of the script, and flags for `tt train`."""
    parser = options_parser(__doc__, PARTS)
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds")
    reference_options(parser)
    parser.add_argument(
        "--recorded_seeds", type=int, default=1, help="seeds that are studied with recorded actions too"
    )
    parser.add_argument("--seed", type=int, default=0, help="training seed, for the part fit")
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="observed", help="states, for the part fit")
    parser.add_argument("--pets_epochs", type=int, default=40, help="passes over the data of PETS, at most")
    parser.add_argument(
        "--trainings", type=int, default=2, help="trainings at a time: one compiles while the other trains"
    )
    parser.add_argument("--fits", type=int, default=1, help="ensembles at a time")
    parser.add_argument("--plays", type=int, default=1, help="studies at a time")
    options, passed = parser.parse_known_args(arguments)
    wrong = [name for name in passed[::2] if not name.startswith(("--tokens.", "--model.", "--train."))]
    if wrong or len(passed) % 2:
        parser.error(
            f"{(wrong or passed[-1:])[0]}: not a flag of this script, and not a --GROUP.NAME VALUE of tt train"
        )
    return options, passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the remaining work; returns 0 when all results are written."""
    began = time.monotonic()
    options, train_flags = parse(arguments)
    places = Places(options.work)
    if options.part != "all":
        PARTS[options.part](options, places)
        return 0
    slots = {"collect": 1, "train": options.trainings, "fit": options.fits, "play": options.plays}
    deadline = began + (options.time_limit or float("inf"))
    queue = Queue(slots, options.work / "logs", deadline)
    complete, seconds = run_timed(queue, jobs(options, places, train_flags), places.work / "seconds.json")
    write_summary(options, places, seconds)
    if not complete:
        print("out of time; run the same command to continue", flush=True)
    return 0 if complete else MORE_TO_DO


if __name__ == "__main__":
    sys.exit(main())
