"""Run folders: start a training run, stop it at any moment, resume it to the same weights."""

import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trajectory_transformer.config import (
    PRESETS,
    ModelConfig,
    PresetName,
    TokenConfig,
    TrainConfig,
    differences,
    require,
)
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.runs.initial import settings_of_init
from trajectory_transformer.runs.metrics import LogName, require_log
from trajectory_transformer.runs.run import LAST, METRICS, RESUME, TRAINING, Play, Run, noted_interrupts
from trajectory_transformer.runs.settings import RUN, RunSettings
from trajectory_transformer.runs.start import resume_run, start_run
from trajectory_transformer.training.train import Metrics

__all__ = [
    "LAST",
    "METRICS",
    "RESUME",
    "SMALL",
    "TRAINING",
    "Play",
    "Run",
    "noted_interrupts",
    "preset_for",
    "resume_run",
    "start_run",
    "train",
]

logger = logging.getLogger(__name__)

SMALL = (
    "training on a CPU with the preset small (2 layers of width 64, 4,500 steps: minutes); the full model takes hours: "
    "preset default"
)


def train(
    dataset: Dataset | str | Path | None = None,
    *,
    preset: PresetName | None = None,
    tokens: TokenConfig | None = None,
    model: ModelConfig | None = None,
    train: TrainConfig | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    init: str | Path | None = None,
    shards: str | Path | None = None,
    device: str = "auto",
    checkpoint_every: int = 500,
    log: LogName | None = None,
    on_metrics: Callable[[Metrics], None] | None = None,
    evaluate: Play | None = None,
    evaluate_every: int | None = None,
) -> TrajectoryModel:
    """Train a model on a dataset and return it: with held-out episodes the best one, else that of the last step.

    Args:
        dataset: episodes, or the name of a dataset that `load_dataset` reads.
        preset: defaults for the settings that are not given; None: default on a GPU, small on a CPU.
        tokens: how episodes become tokens.
        model: sizes of the model.
        train: steps, batch size, learning rate.
        seed: seed of the initial weights, the batches and dropout.
        out: run folder to write: checkpoint, metrics and what is needed to resume. None keeps nothing.
        resume: continue the run in `out` if it exists, with the settings it was started with. Others are refused,
            except more steps or epochs in `train`: they extend the run.
        init: run folder whose weights and tokenizer to start from; `tokens` and `model` are those of that run.
        shards: folder of token files to train from, for data larger than memory; made if it does not exist.
        device: auto, cpu or cuda.
        checkpoint_every: steps between checkpoints.
        log: also write the metrics for TensorBoard or Weights & Biases; needs `out` and the extra of that name.
        on_metrics: called with the metrics of the run as they come.
        evaluate: plays episodes with the model as it is and returns metrics, for example
            `lambda model: evaluate(Planner(model), episodes=10).metrics`; they are a part of the metrics of the run.
        evaluate_every: steps between two calls of `evaluate`, rounded up to the next report.

    Ctrl-C ends with a checkpoint in `out` and raises KeyboardInterrupt.
    """
    require(preset is None or preset in PRESETS, f"preset must be one of {', '.join(PRESETS)}", repr(preset))
    require(not resume or out is not None, "resume needs the run folder to resume, out", out)
    require(log is None or out is not None, "log needs a run folder, out", log)
    if log is not None:
        require_log(log)
    require(
        (evaluate is None) == (evaluate_every is None),
        "evaluate and evaluate_every belong together",
        f"evaluate_every {evaluate_every}",
    )
    require(evaluate_every is None or evaluate_every >= 1, "evaluate_every must be at least 1", evaluate_every)
    chosen = PRESETS[preset or preset_for(device)]
    folder = None if out is None else Path(out)
    if resume and folder is not None and (folder / RUN).is_file():
        stored = RunSettings.read(folder)
        if train is not None and train.steps is None and train.epochs is None:
            train = replace(train, steps=stored.train.steps, epochs=stored.train.epochs)
        longer = None if train is None else replace(stored.train, steps=train.steps, epochs=train.epochs)
        if longer == stored.train or longer != train:
            longer = None
        if tokens is not None and tokens.termination_penalty == "auto":
            tokens = replace(tokens, termination_penalty=stored.tokens.termination_penalty)
        # A seed of 0 is the default, so it cannot be told from one that was left out.
        for name, given in (("tokens", tokens), ("model", model), ("train", train), ("seed", seed or None)):
            if given is not None and given not in (getattr(stored, name), longer):
                raise ValueError(
                    f"{folder} was started with other settings ({differences(name, getattr(stored, name), given)}); "
                    f"leave out {name} to resume with its own"
                )
        run = resume_run(folder, dataset, device=find_device(device), train=longer)
    else:
        if preset is None and preset_for(device) == "small" and (train is None or (model is None and init is None)):
            logger.warning("%s", SMALL)
        if init is not None:
            tokens, model = settings_of_init(init, tokens, model)
        settings = RunSettings(
            dataset=None if isinstance(dataset, Dataset | None) else str(dataset),
            shards=None if shards is None else str(shards),
            tokens=tokens or chosen.tokens,
            model=model or chosen.model,
            train=train or chosen.train,
            init=None if init is None else str(init),
            seed=seed,
            checkpoint_every=checkpoint_every,
            command="python " + shlex.join(sys.argv),
        )
        episodes = dataset if isinstance(dataset, Dataset) else None
        run = start_run(settings, folder, find_device(device), dataset=episodes)
    run.play, run.evaluate_every = evaluate, evaluate_every
    if log is not None:
        run.add_log(log)
    for metrics in run.advance():
        if metrics is not None and on_metrics is not None:
            on_metrics(metrics)
    if not run.finished:
        raise KeyboardInterrupt
    return run.model


def preset_for(device: str) -> PresetName:
    """The preset that suits a device: on a CPU the default one takes hours."""
    return "small" if find_device(device).type == "cpu" else "default"
