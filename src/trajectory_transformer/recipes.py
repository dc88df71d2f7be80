"""Recipes: YAML files that say how a named dataset is collected. The package ships those of the benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Any

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.collect import Part, split_count
from trajectory_transformer.files import read_yaml
from trajectory_transformer.limits import check_memory

_STEP_BYTES = 12  # that a step takes at least: an observation, an action and a reward


@dataclass(frozen=True)
class Recipe:
    """How to collect one dataset: its name, the environment, and the number of steps of each policy.

    `env_options` are arguments of the environment's constructor. `collect_options` are more of them, for collecting
    only: an evaluation in the environment of the dataset does without them (AntMaze: other starts than the task's).
    """

    name: str
    env: str
    parts: tuple[Part, ...]
    env_options: Mapping[str, Any] = field(default_factory=dict)
    collect_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of all policies together."""
        return sum(part.steps or 0 for part in self.parts)

    def with_steps(self, steps: int) -> "Recipe":
        """The same policies, each with its share of another number of steps: its first episodes, if there are fewer."""
        counts = split_count(steps, [(part.steps or 0) / self.steps for part in self.parts], "steps")
        parts = tuple(replace(part, steps=count) for part, count in zip(self.parts, counts, strict=True))
        return replace(self, parts=parts)


def read_recipe(name: str | Path, policies: str | Path | None = None, *, trust: bool = False) -> Recipe:
    """Read a recipe by name or path; `policies` is the folder with the actor files that the recipe names.

    A recipe from a file may name policies and environments that run code only with `trust`.
    """
    source = find_recipe(name)
    content = read_yaml(source)
    try:
        env, entries = str(content["env"]), [(str(each["policy"]), int(each["steps"])) for each in content["parts"]]
        options = [dict(content.get(key, {})) for key in ("env_options", "collect_options")]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source}: a recipe needs env and parts, each with policy and steps ({reason})") from error
    if not entries:
        raise ValueError(f"{source}: parts must name at least one policy")
    needs_trust = isinstance(source, Path) and not trust
    if needs_trust and ":" in env:
        raise ValueError(_untrusted(source, "environment", env))
    check_memory(_STEP_BYTES * sum(steps for _, steps in entries), f"{source}: its dataset")
    parts = []
    for policy, steps in entries:
        if steps < 1:
            raise ValueError(f"{source}: steps must be at least 1, got {steps}")
        actor = parse_actor(policy, policies)
        if needs_trust and actor.runs_code:
            raise ValueError(_untrusted(source, "policy", policy))
        parts.append(Part(actor, steps=steps))
    return Recipe(PurePath(source.name).stem, env, tuple(parts), *options)


def _untrusted(source: Traversable, what: str, name: str) -> str:
    return f"{source}: the {what} {name!r} would run code; pass --trust true if you trust where the recipe came from"


def find_recipe(name: str | Path) -> Traversable:
    """The file of a recipe: an existing path, or the name of a recipe of this package."""
    if Path(name).is_file():
        return Path(name)
    packaged = _folder() / f"{name}.yaml"
    if str(name) not in recipe_names():
        raise ValueError(
            f"recipe {str(name)!r}: not a file and not a recipe of this package, which has {', '.join(recipe_names())}"
        )
    return packaged


def recipe_names() -> list[str]:
    """Names of the recipes in this package."""
    return sorted(PurePath(each.name).stem for each in _folder().iterdir() if each.name.endswith(".yaml"))


def _folder() -> Traversable:
    return files("trajectory_transformer") / "data" / "recipes"
