"""Recipes: found from any working directory, complete, and checked when they are read."""

from pathlib import Path

import pytest

from trajectory_transformer.actors import ActorSpec
from trajectory_transformer.recipes import find_recipe, read_recipe, recipe_names


def test_recipes_are_found_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hopper-medium-replay" in recipe_names()
    assert "env: Hopper-v5" in find_recipe("hopper-medium-replay").read_text(encoding="utf-8")


def test_a_path_takes_precedence_over_a_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("env: Pendulum-v1\nparts:\n  - {policy: random eps=0.5, steps: 30}\n")
    for given in (path, str(path)):
        recipe = read_recipe(given)
        assert (recipe.name, recipe.env) == ("mine", "Pendulum-v1")
        assert [(part.actor, part.steps) for part in recipe.parts] == [(ActorSpec(name="random", eps=0.5), 30)]


def test_a_recipe_is_made_smaller_in_the_same_shares(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    parts = "".join(f"  - {{policy: random eps={eps}, steps: {steps}}}\n" for eps, steps in ((0.1, 10), (0.2, 30)))
    path.write_text(f"env: Pendulum-v1\ncollect_options: {{a: 1}}\nparts:\n{parts}")
    whole = read_recipe(path)
    assert whole.steps == 40 and whole.with_steps(40) == whole
    small = whole.with_steps(7)
    assert [(part.actor.eps, part.steps) for part in small.parts] == [(0.1, 2), (0.2, 5)]
    assert (small.env, small.collect_options) == ("Pendulum-v1", {"a": 1})
    with pytest.raises(ValueError, match="too few steps for 2 policies: 1"):
        whole.with_steps(1)


def test_every_recipe_names_actors_that_exist(policies: Path) -> None:
    recipes = {name: read_recipe(name, policies) for name in recipe_names() if not name.startswith("antmaze")}
    sizes = {name: recipe.steps for name, recipe in recipes.items()}
    tasks = ("hopper", "halfcheetah", "walker2d")
    expected = {f"{task}-{kind}": 10**6 for task in tasks for kind in ("medium", "expert")}
    expected |= {f"{task}-medium-expert": 2 * 10**6 for task in tasks} | {"humanoid-expert": 10**6}
    expected |= dict(zip([f"{task}-medium-replay" for task in tasks], [400_000, 200_000, 300_000], strict=True))
    assert sizes == expected
    for name, recipe in recipes.items():
        assert recipe.env.lower() == f"{name.partition('-')[0]}-v5"


def test_every_antmaze_recipe_collects_a_million_steps_with_the_walker(ant_policies: Path) -> None:
    names = [name for name in recipe_names() if name.startswith("antmaze")]
    kinds = {"umaze": "task", "play": "play", "diverse": "random"}
    assert names == [
        f"antmaze-{each}" for each in ("large-diverse", "large-play", "medium-diverse", "medium-play", "umaze")
    ]
    for name in names:
        recipe = read_recipe(name, ant_policies)
        assert recipe.env.lower() == f"antmaze_{name.split('-')[1]}-v5"
        assert recipe.steps == 10**6
        assert [(part.actor.noise, part.actor.wander) for part in recipe.parts] == [(0.1, 0.1), (0.2, 0.2)]
        # One goal and no other target: where an ant would stay at the goal, an episode ends there.
        going_on = {} if name == "antmaze-umaze" else {"continuing": True}
        assert recipe.env_options == {}
        assert recipe.collect_options == {"cells": kinds[name.rpartition("-")[2]], **going_on}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("env: [", r"bad\.yaml: not valid YAML"),
        ("parts: []", r"bad\.yaml: a recipe needs env and parts, each with policy and steps \('env'\)"),
        ("env: A\nparts: []", r"bad\.yaml: parts must name at least one policy"),
        ("env: A\nparts: [{policy: random, steps: 0}]", r"bad\.yaml: steps must be at least 1, got 0"),
        ("env: A\nparts: [{policy: random, steps: .inf}]", r"bad\.yaml: a recipe needs env and parts"),
        (f"env: A\nparts: [{{policy: random, steps: {10**20}}}]", r"bad\.yaml: its dataset needs .* GiB of memory"),
        (f"env: A\nparts: [{{policy: random, steps: {10**400}}}]", r"bad\.yaml: its dataset needs .* GiB of memory"),
    ],
)
def test_broken_recipes_raise_an_error_that_names_the_file(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=rule):
        read_recipe(tmp_path / "bad.yaml")


def test_an_unknown_recipe_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="recipe 'nothing': not a file and not a recipe .* hopper-medium, "):
        find_recipe("nothing")
