"""Add the model of a run folder to the package: `tt evaluate NAME` then finds it by its name.

    python benchmarks/ship_model.py runs/demo four-rooms --episodes 100
    python benchmarks/ship_model.py RUN hopper-medium-expert --evaluation RESULT --facts data/hopper-medium-expert.json

Writes bfloat16 weights, description, search settings, an evaluation of just these weights, and the model card to
src/trajectory_transformer/models/NAME. An earlier evaluation is kept if the weights were bfloat16 numbers already. The
run folder needs a checkpoint; the card also tells what run.json and training.json say, as far as they are there, and
the facts that locomotion_data.py wrote about the data. The search settings are those of an earlier evaluation, if there
is one, and of flags of `tt evaluate` that are given here.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trajectory_transformer.checkpoint import load_checkpoint
from trajectory_transformer.cli import main as tt
from trajectory_transformer.pretrained import EVALUATION, Details, read_details, read_facts, write_model

MODELS = Path(__file__).parents[1] / "src" / "trajectory_transformer" / "models"


def ship(
    run: Path,
    name: str,
    *,
    episodes: int,
    models: Path,
    evaluation: Path | None = None,
    facts: Path | None = None,
    words: list[str],
) -> Path:
    """Write the folder of a model; `words` are more flags of its evaluation, such as --device."""
    folder = models / name
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it to replace the model")
    for path in (evaluation, facts):
        if path is not None and not path.is_file():
            raise ValueError(f"{path}: no such file")
    with tempfile.TemporaryDirectory() as temporary:
        rounded, settings, result = (Path(temporary) / part for part in (name, "search.yaml", EVALUATION))
        write_model(run, rounded, Details(), half=True)
        earlier = read_facts(evaluation or run / EVALUATION)
        if earlier and same_weights(run, rounded) and not any(word.startswith("--search") for word in words):
            found = earlier
        else:
            command = ["evaluate", str(rounded)]
            if earlier:
                settings.write_text(json.dumps({"search": earlier["settings"]["search"]}))  # JSON is YAML
                command += ["--config", str(settings)]
            command += ["--episodes", str(episodes), "--out", str(result), *words]
            if tt(command):
                raise ValueError(f"{run} could not be evaluated")
            found = read_facts(result)
    typed = shlex.split(found["command"])
    found["command"] = shlex.join([*typed[:2], name, *typed[3:]])  # tt evaluate NAME: the folder was of this machine
    known = read_details(run)
    training, started = portable(known.training), portable(known.settings)
    if training:
        found["training"] = {key: training[key] for key in ("command", "commit", "device", "seconds", "metrics")}
    details = Details(found, training, started, {} if facts is None else read_facts(facts))
    write_model(run, folder, details, name=name, half=True)
    return folder


def same_weights(first: Path, second: Path) -> bool:
    """Whether two checkpoints have equal numbers."""
    weights = [load_checkpoint(folder)[0] for folder in (first, second)]
    return all(torch.equal(value.double(), weights[1][key].double()) for key, value in weights[0].items())


def portable(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details whose command keeps the last two parts of absolute paths: the others are of the machine it ran on."""
    words = shlex.split(details.get("command", ""))
    words = ["/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word for word in words]
    return {**details, **({"command": shlex.join(words)} if words else {})}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse flags and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, or any folder with a checkpoint")
    parser.add_argument("name", help="name of the model, for example hopper-medium-expert")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of the evaluation in the card")
    parser.add_argument("--evaluation", type=Path, help="result of tt evaluate; default: evaluation.json in the run")
    parser.add_argument("--facts", type=Path, help="JSON file of locomotion_data.py about the data, for the card")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of all models")
    options, words = parser.parse_known_args(arguments)
    try:
        folder = ship(**vars(options), words=words)
    except (ValueError, OSError) as error:
        print(f"ship_model.py: error: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
