"""The prediction experiment of the paper on humanoid: TT, its Markovian variant and PETS, fully and partially observed.

    python benchmarks/humanoid.py --policies DIR --work DIR [--seeds 3]

Every job is a command that writes a file to the work folder, and the same command continues what was interrupted.
`--time_limit` stops before a limit; exit code 75 then means that there is more to do. The jobs:

- collect: the recipe humanoid-expert. The policy reads all 348 dimensions of Humanoid-v5; the dataset holds the first
  45, positions and velocities, which are the observation without `include_cinert`, `cvel`, `qfrc_actuator` and
  `cfrc_ext`. A seeded share of the episodes is held out.
- references: the same policy from fixed starts, several times each, with seeds that no other episode has.
- tune: one ensemble for each row of `TUNING`, scored on starts in the held-out episodes. The first row has the sizes of
  Chua et al. and is the reference, with a linear model and one that predicts no change, for errors of one step.
- train: the models and the ensembles, for every seed. study: `tt study` on the references.
- futures: one sampled future of TT and PETS each, for `benchmarks/humanoid_strip.py`.

Writes <out>/humanoid.json and <out>/humanoid.png. Metrics are means over training seeds, `_stderr` their standard
errors. Flags of `tt train` override its settings for all models (`--train.steps`, `--model.width`).
"""

import argparse
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.humanoid_data import (
    HIDDEN,
    NUM_BINS,
    SPLIT_SEED,
    VARIANTS,
    Places,
    collect_data,
    collect_references,
)
from benchmarks.paper.table import MORE_TO_DO, TT, Job, Queue, command
from trajectory_transformer.analysis.predictors import BEHAVIOUR, EnsemblePredictor, Past, load_predictor
from trajectory_transformer.analysis.protocol import study_dataset
from trajectory_transformer.analysis.study import StudyConfig, find_starts
from trajectory_transformer.analysis.summary import Curve, joined_curves
from trajectory_transformer.cli import main as tt
from trajectory_transformer.data.episode import Dataset, DoubleArray, FloatArray, load_npz
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.pets import EnsembleConfig, fit, fit_behaviour
from trajectory_transformer.report.prediction import Panel, likelihood_figure
from trajectory_transformer.results import summarize, write_result
from trajectory_transformer.tokens.discretizer import uniform_edges

# Networks, elites, hidden layers and width of the ensembles that are tried. The first sizes are those of Chua et al.
TUNING = (
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 200},
    {"num_networks": 7, "num_elites": 5, "num_layers": 3, "width": 200},
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 400},
    {"num_networks": 7, "num_elites": 5, "num_layers": 2, "width": 512},
    {"num_networks": 3, "num_elites": 3, "num_layers": 4, "width": 400},
    {"num_networks": 7, "num_elites": 5, "num_layers": 4, "width": 800},
)
TUNING_SEED = 1000  # of weights; scored ensembles have seeds 0, 1, ...
STEPS = 8000  # of the training of a model
WINDOWS = {"tt": None, "markov": 2}  # transitions; None: as the flags say


def tune(options: argparse.Namespace, places: Places) -> None:
    """Fit one ensemble of the table and score it on starts in the held-out episodes."""
    began = time.perf_counter()
    config = ensemble_config(options.row, options.tuning_epochs, options.pets_batch)
    train, held_out = load_npz(places.data("train")), load_npz(places.data("held_out"))
    folder = places.work / "tune" / f"run_{options.row}"
    device = str(options.device)
    ensemble = fit(train, config, out=folder, seed=TUNING_SEED, resume=True, device=device)
    behaviour = fit_behaviour(train, config, out=folder / BEHAVIOUR, seed=TUNING_SEED, resume=True, device=device)
    states = np.concatenate([episode.observations for episode in train]).astype(np.float64)
    study = study_dataset(
        {"pets": EnsemblePredictor(ensemble, behaviour)},
        held_out,
        StudyConfig(horizon=options.horizon, samples=options.samples, seed=TUNING_SEED),
        num_starts=options.tuning_starts,
        context=options.context,
        actions=("policy", "recorded"),
        edges=[uniform_edges(column, NUM_BINS) for column in states.T],
    )
    means = {
        f"mean_logp_{kind}": float(np.mean([x for x in curves["pets"]["log_prob"] if x is not None]))
        for kind, curves in study.curves.items()
    }
    errors = one_step_errors(lambda *given: ensemble.gaussians(*given)[0].mean(dim=0).cpu().numpy(), train, held_out)
    content = {
        "ensemble": asdict(config),
        "metrics": {**means, **errors, **study.metrics},
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_atomically(places.tuned(options.row), (json.dumps(content, indent=2) + "\n").encode())


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


def ensemble_config(row: int, epochs: int, batch_size: int) -> EnsembleConfig:
    """A row of the tuning table."""
    return EnsembleConfig(**TUNING[row], epochs=epochs, batch_size=batch_size)  # type: ignore[arg-type]


def tuning_table(places: Places, rows: Sequence[int]) -> list[dict[str, object]]:
    """All rows of the tuning table that are complete."""
    return [{"row": row, **json.loads(places.tuned(row).read_text())} for row in rows if places.tuned(row).exists()]


def best_row(places: Places, rows: Sequence[int]) -> int:
    """The row with the largest log-likelihood, mean over all steps, with predicted actions."""
    scores = {row: json.loads(places.tuned(row).read_text())["metrics"]["mean_logp_policy"] for row in rows}
    return max(scores, key=scores.__getitem__)


def fit_best(options: argparse.Namespace, places: Places) -> None:
    """Fit the tuned ensemble with one seed."""
    config = ensemble_config(best_row(places, options.rows), options.pets_epochs, options.pets_batch)
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
    shared = [word for name in SHARED for word in (f"--{name}", getattr(options, name))]
    rows = ("--rows", *options.rows)
    train, references = places.data("train"), places.data("references")
    found = [
        Job("collect", train, command(*script, *shared, "--part", "collect")),
        Job("collect", references, command(*script, *shared, "--part", "references"), (train,)),
    ]
    for row in options.rows:
        out = places.tuned(row)
        found.append(Job("fit", out, command(*script, *shared, "--part", "tune", "--row", row), (train,)))
    tuned = tuple(places.tuned(row) for row in options.rows)
    for seed in range(options.seeds):
        for variant, suffix in VARIANTS.items():
            data = places.data(f"train{suffix}")
            settings: list[object] = ["--tokens.discretizer", "uniform", "--tokens.rewards", "false"]
            settings += ["--tokens.num_bins", NUM_BINS + (variant == "masked"), "--checkpoint_every", 5000]
            # For likelihoods all tokens count alike; the preset, made for planning, gives actions more weight.
            settings += ["--train.steps", STEPS, "--train.action_weight", 1]
            for name, window in WINDOWS.items():
                folder = places.run(name, variant, seed)
                own = [*settings, "--seed", seed, *train_flags]
                own += [] if window is None else ["--model.window", window]
                device = ("--device", options.device)
                found.append(
                    Job(
                        "train",
                        folder / "training.json",
                        command(*TT, "train", data, "--preset", "default", "--out", folder, *device, *own),
                        (train,),
                        command(*TT, "train", data, "--resume", folder, *device),
                        folder / "run.json",
                    )
                )
            fitted = places.run("pets", variant, seed) / "training.json"
            words = ("--part", "fit", "--seed", seed, "--variant", variant, *rows)
            found.append(Job("fit", fitted, command(*script, *shared, *words), (train, *tuned)))
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
    details: dict[str, object] = {"tuning": tuning_table(places, options.rows)}
    panels = []
    for variant, suffix in VARIANTS.items():
        paths = [places.study(variant, seed) for seed in range(options.seeds)]
        if not all(path.exists() for path in paths):
            continue
        studies = [json.loads(path.read_text()) for path in paths]
        for name in studies[0]["metrics"]:
            if not name.endswith("_stderr"):
                own = summarize(name, [each["metrics"][name] for each in studies if name in each["metrics"]])
                metrics |= {name: own[name], f"{name}_stderr": own[f"{name}_stderr"]}
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
        details[variant] = {"curves": curves, "settings": studies[0]["settings"], "starts": studies[0]["starts"]}
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


def spent(places: Places, seconds: float) -> float:
    """Seconds of all commands so far, with those of this one."""
    path = places.work / "seconds.json"
    total = seconds + (json.loads(path.read_text()) if path.exists() else 0.0)
    write_atomically(path, json.dumps(total).encode())
    return float(total)


def reached(curves: dict[str, Curve]) -> dict[str, float]:
    """Share of the steps beyond 10 at which TT is above PETS, and above the Markovian variant."""

    def share(other: str) -> float:
        pairs = list(zip(curves["tt"]["log_prob"], curves[other]["log_prob"], strict=True))[10:]
        known = [own > theirs for own, theirs in pairs if own is not None and theirs is not None]
        return float(np.mean(known)) if known else float("nan")

    found = {f"steps_tt_above_{other}": share(other) for other in ("pets", "markov")}
    return {name: value for name, value in found.items() if not np.isnan(value)}


SHARED = (
    "scale", "workers", "held_out", "starts", "visits", "context", "horizon", "samples", "tuning_starts",
    "tuning_epochs", "pets_epochs", "pets_batch", "device",
)  # fmt: skip
PARTS = {
    "collect": collect_data,
    "references": collect_references,
    "tune": tune,
    "fit": fit_best,
    "futures": sample_futures,
}


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of the script, and flags for `tt train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files to collect with")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files of the jobs")
    parser.add_argument("--out", type=Path, default=Path("results/prediction"), help="folder of the result")
    parser.add_argument("--part", choices=("all", *PARTS), default="all", help="one job instead of all")
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, for a trial")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that collect")
    parser.add_argument("--held_out", type=float, default=0.05, help="share of the episodes that is held out")
    parser.add_argument("--starts", type=int, default=8, help="fixed starts of the references")
    parser.add_argument("--visits", type=int, default=32, help="episodes from each start")
    parser.add_argument("--context", type=int, default=9, help="transitions before a start")
    parser.add_argument("--horizon", type=int, default=100, help="steps to predict")
    parser.add_argument("--samples", type=int, default=1000, help="futures of each start")
    parser.add_argument(
        "--recorded_seeds", type=int, default=1, help="seeds that are studied with recorded actions too"
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=list(range(len(TUNING))), help="rows of the tuning table"
    )
    parser.add_argument("--row", type=int, default=0, help="row of the tuning table, for the part tune")
    parser.add_argument("--seed", type=int, default=0, help="training seed, for the part fit")
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="observed", help="states, for the part fit")
    parser.add_argument("--tuning_starts", type=int, default=16, help="held-out starts that score a row")
    parser.add_argument("--tuning_epochs", type=int, default=16, help="passes over the data of a row of the table")
    parser.add_argument("--pets_epochs", type=int, default=40, help="passes over the data of the chosen row, at most")
    parser.add_argument("--pets_batch", type=int, default=1024, help="transitions per step of PETS")
    parser.add_argument(
        "--trainings", type=int, default=2, help="trainings at a time: one compiles while the other trains"
    )
    parser.add_argument("--fits", type=int, default=1, help="ensembles at a time")
    parser.add_argument("--plays", type=int, default=1, help="studies at a time")
    parser.add_argument("--backend", default="cached", help="decoder of the studies")
    parser.add_argument("--max_rows", type=int, default=4096, help="sequences extended at a time")
    parser.add_argument("--time_limit", type=float, default=None, help="seconds after which this command ends")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options, passed = parser.parse_known_args(arguments)
    wrong = [name for name in passed[::2] if not name.startswith(("--tokens.", "--model.", "--train."))]
    if wrong or len(passed) % 2:
        parser.error(
            f"{(wrong or passed[-1:])[0]}: not a flag of this script, and not a --GROUP.NAME VALUE of tt train"
        )
    if max(options.rows) >= len(TUNING) or min(options.rows) < 0:
        parser.error(f"--rows must lie in [0, {len(TUNING)}), got {options.rows}")
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
    complete = Queue(slots, options.work / "logs", deadline).run(jobs(options, places, train_flags))
    write_summary(options, places, spent(places, time.monotonic() - began))
    if not complete:
        print("out of time; run the same command to continue", flush=True)
    return 0 if complete else MORE_TO_DO


if __name__ == "__main__":
    sys.exit(main())
