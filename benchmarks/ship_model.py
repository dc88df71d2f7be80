"""Add the model of a run folder to the package: `tt evaluate NAME` then finds it by its name.

python benchmarks/ship_model.py runs/demo four-rooms --episodes 100

Writes bfloat16 weights, description, search settings, an evaluation of just these weights, and the model card to
src/trajectory_transformer/models/NAME. The search settings are those of `evaluation.json` in the run folder.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from trajectory_transformer.config import SearchConfig
from trajectory_transformer.files import write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.pretrained import CARD, EVALUATION, model_card, read_search, save_pretrained

MODELS = Path(__file__).parents[1] / "src" / "trajectory_transformer" / "models"


def ship(run: Path, name: str, *, episodes: int, models: Path, words: list[str]) -> Path:
    """Write the folder of a model; `words` are more flags of its evaluation, such as --device."""
    folder = models / name
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it to replace the model")
    with tempfile.TemporaryDirectory() as temporary:
        rounded = Path(temporary) / name
        save_pretrained(run, rounded, name=name, half=True)
        search = read_search(rounded) or SearchConfig()
        settings = Path(temporary) / "search.yaml"  # JSON is YAML
        settings.write_text(json.dumps({"search": asdict(search)}))
        result = Path(temporary) / EVALUATION
        command = [sys.executable, "-m", "trajectory_transformer", "evaluate", str(rounded), "--config", str(settings)]
        command += ["--episodes", str(episodes), "--out", str(result), *words]
        subprocess.run(command, check=True)
        found = json.loads(result.read_text())
        # The folder was a temporary one: the model is found by its name.
        found["command"] = found["command"].replace(str(rounded), name)
        training = json.loads((run / "training.json").read_text())
        save_pretrained(run, folder, name=name, search=search, half=True)
    write_atomically(folder / EVALUATION, (json.dumps(found, indent=2) + "\n").encode())
    card = model_card(TrajectoryModel.load(folder), name, found, training, half=True)
    write_atomically(folder / CARD, card.encode())
    return folder


def main() -> int:
    """Parse flags and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder with training.json and evaluation.json")
    parser.add_argument("name", help="name of the model, for example hopper-medium-expert")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of the evaluation in the card")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of all models")
    options, words = parser.parse_known_args()
    try:
        folder = ship(options.run, options.name, episodes=options.episodes, models=options.models, words=words)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"ship_model.py: error: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
