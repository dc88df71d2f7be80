"""Recipes: YAML files that say how a named dataset is collected."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.collect import Part

FOLDER = Path("benchmarks/datasets")


@dataclass(frozen=True)
class Recipe:
    """One dataset: its name, its environment, and how many steps of which policy it holds."""

    name: str
    env: str
    parts: tuple[Part, ...]


def read_recipe(name: str, policies: Path | None) -> Recipe:
    """A recipe by name or by path; `policies` is the folder with its actor files."""
    path = find_recipe(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        env, entries = str(content["env"]), [(str(each["policy"]), int(each["steps"])) for each in content["parts"]]
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: a recipe needs env and parts, each with policy and steps ({reason})") from error
    parts = []
    for words, steps in entries:
        if steps < 1:
            raise ValueError(f"{path}: steps must be at least 1, got {steps}")
        parts.append(Part(parse_actor(words, policies), steps=steps))
    return Recipe(path.stem, env, tuple(parts))


def find_recipe(name: str) -> Path:
    """The recipe's file: a path as it stands, or a name in the folder of recipes, here or in the source tree."""
    folders = [FOLDER, Path(__file__).resolve().parents[3] / FOLDER]
    places = [Path(name), *(folder / f"{name}.yaml" for folder in folders)]
    for place in places:
        if place.is_file():
            return place
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise ValueError(f"--recipe {name}: no such recipe; known are {', '.join(known) or 'none'}")
