"""Settings in the JSON files of a run: values of a wrong type are refused by file and field."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from trajectory_transformer.baselines import train_baseline
from trajectory_transformer.baselines.runs import BaselineRunSettings
from trajectory_transformer.cli import main
from trajectory_transformer.config import (
    EnsembleConfig,
    ModelConfig,
    Sampler,
    SearchConfig,
    TokenConfig,
    TrainConfig,
)
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.files import settings_from
from trajectory_transformer.runs import train
from trajectory_transformer.runs.settings import RunSettings

VALUES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True, False),
    "number": (3,),
    "fraction": (2.5,),
    "insane": (float("nan"), float("inf"), 10**30, -(10**400)),
    "text": ("x", ""),
    "list": ([], ["x"], [[1]], [2.5], [None]),
    "mapping": ({}, {"x": 1}),
}
CLASSES = (EnsembleConfig, ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig, RunSettings)


def allowed(annotation: str) -> set[str]:
    """Kinds of JSON that may stand for an annotation."""
    kinds = {
        "int": {"number"},
        "float": {"number", "fraction"},
        "bool": {"boolean"},
        "str": {"text"},
        "None": {"null"},
        "tuple[int, ...]": {"list"},
        "dict[str, object]": {"mapping"},
    }
    found = set()
    for part in re.sub(r"typing\.Literal\[.*?\]", "literal", annotation).split(" | "):
        # The texts above are no names of choices, and mappings may name fields that a group does not have.
        found |= kinds.get(part, {"mapping"} if part[0].isupper() or "." in part else set())
    return found


def wrong_values(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Every field with values of all kinds of JSON that it cannot hold."""
    for field in fields(kind):
        options = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        names = [each.__name__ if type(each) is type else str(each) for each in options]
        text = " | ".join("None" if name == "NoneType" else name for name in names)
        for name, values in VALUES.items():
            if name not in allowed(text):
                yield from ((field.name, value) for value in values)
    yield from (("unknown_field", value) for values in VALUES.values() for value in values)


@pytest.mark.parametrize("kind", [*CLASSES, BaselineRunSettings])
def test_every_field_refuses_every_kind_of_json_that_it_cannot_hold(kind: type[Any]) -> None:
    count = 0
    for name, value in wrong_values(kind):
        count += 1
        with pytest.raises(ValueError, match=rf"(^| )(group\.)?{name}\b"):
            settings_from(kind, {name: value}, "group")
    assert count > 13 * len(fields(kind))


def test_values_of_json_become_the_types_of_the_annotations() -> None:
    stored = {"goal_dims": [0, 1], "discount": 0, "termination_penalty": None, "rewards": False}
    assert settings_from(TokenConfig, stored) == TokenConfig(goal_dims=(0, 1), discount=0.0, rewards=False)
    assert type(settings_from(TokenConfig, stored).discount) is float
    for penalty in ("auto", -3.0):
        assert settings_from(TokenConfig, {"termination_penalty": penalty}).termination_penalty == penalty
    search = {"beam_width": 2, "action": {"top_k": 3, "nucleus": 0.5}, "first_action": None}
    assert settings_from(SearchConfig, search) == SearchConfig(
        beam_width=2, action=Sampler(top_k=3, nucleus=0.5), first_action=None
    )
    with pytest.raises(ValueError, match=r"search\.action\.top_k must be a whole number, got \"3\""):
        settings_from(SearchConfig, {"action": {"top_k": "3"}}, "search")
    with pytest.raises(ValueError, match=r"tokens\.goal_dims\[1\] must be a whole number, got true"):
        settings_from(TokenConfig, {"goal_dims": [0, True]}, "tokens")
    with pytest.raises(ValueError, match=r"train\.optimizer must be one of adamw, adam, got \"sgd\""):
        settings_from(TrainConfig, {"optimizer": "sgd"}, "train")


@pytest.fixture
def runs(tmp_path: Path, tiny_dataset: Dataset) -> Path:
    folder = tmp_path / "runs"
    save_npz(tiny_dataset, folder / "data.npz")
    model = ModelConfig(window=2, num_layers=1, num_heads=1, width=8)
    train(folder / "data.npz", out=folder / "run", train=TrainConfig(steps=1, batch_size=2), device="cpu", model=model)
    settings = {"hidden": (4,), "steps": 1, "batch_size": 2}
    train_baseline(folder / "data.npz", algorithm="bc", settings=settings, out=folder / "bc", device="cpu")
    return folder


def test_every_setting_of_run_json_is_checked_when_it_is_read(runs: Path) -> None:
    path = runs / "run" / "run.json"
    whole = path.read_text()
    groups: dict[str, type[Any]] = {"tokens": TokenConfig, "model": ModelConfig, "train": TrainConfig, "": RunSettings}
    for group, kind in groups.items():
        for name, value in wrong_values(kind):
            changed = json.loads(whole)
            (changed[group] if group else changed)[name] = value
            path.write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=rf"run\.json: .*\b{name}\b"):
                RunSettings.read(runs / "run")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("run", "run.json", "tokens", "authors_conventions"), [1]),
        (("run", "run.json", "tokens", "discretizer"), True),
        (("run", "run.json", "train", "steps"), "many"),
        (("run", "run.json", "train", "learning_rate"), {"x": 1}),
        (("run", "run.json", "seed"), None),
        (("run", "run.json", "dataset"), 3),
        (("bc", "run.json", "seeds"), ["x"]),
        (("bc", "run.json", "settings"), []),
        (("bc", "run.json", "settings", "steps"), "many"),
        (("bc", "run.json", "dataset"), True),
    ],
)
def test_a_wrong_type_is_reported_by_file_and_field(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: tuple[str, ...], value: object
) -> None:
    run = tmp_path / place[0]
    shutil.copytree(runs / place[0], run)
    stored = json.loads((run / place[1]).read_text())
    part = stored
    for key in place[2:-1]:
        part = part[key]
    part[place[-1]] = value
    (run / place[1]).write_text(json.dumps(stored))
    assert main(["train" if place[0] == "run" else "baseline", "--resume", str(run), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{run / place[1]}: " in error
    assert place[-1] in error


@pytest.mark.parametrize("width", [10**13, 10**20, 10**400])
def test_a_baseline_that_no_memory_holds_is_refused(runs: Path, capsys: pytest.CaptureFixture[str], width: int) -> None:
    path = runs / "bc" / "run.json"
    stored = json.loads(path.read_text())
    stored["settings"]["hidden"] = [4, width]
    path.write_text(json.dumps(stored))
    described = path.with_name("checkpoint.json")
    checkpoint = json.loads(described.read_text())
    checkpoint["algorithm"]["settings"]["hidden"] = [4, width]
    described.write_text(json.dumps(checkpoint))
    assert main(["baseline", "--resume", str(path.parent), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert f"{path.parent}: cannot be resumed (bc with hidden layers of 4, {width} needs " in error


@pytest.mark.parametrize("change", [{"steps": 10**20}, {"learning_rate": 0.5}, None])
def test_a_baseline_is_resumed_only_with_its_own_settings(
    runs: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any] | None
) -> None:
    path = runs / "bc" / "run.json"
    stored = json.loads(path.read_text())
    if change is None:
        del stored["settings"]["steps"]  # the preset trains for much longer
    else:
        stored["settings"].update(change)
    path.write_text(json.dumps(stored))
    assert main(["baseline", "--resume", str(path.parent), "--device", "cpu"]) == 2
    assert f"{path}: {next(iter(change or ['steps']))} is " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "bc"])
def test_a_dataset_that_cannot_be_read_names_the_run(runs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = runs / name / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dataset": "no such thing"}))
    assert main(["train" if name == "run" else "baseline", "--resume", str(path.parent), "--device", "cpu"]) == 2
    assert f"{path.parent}: cannot be resumed (no such thing: not a dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metadata": "x"}, "metadata must be a mapping"),
        ({"metadata": {"env": "x"}}, "x cannot be played"),
        ({"dims": {"observation": 3, "goal": 0, "action": -1}}, "weights and description do not match"),
    ],
)
def test_a_baseline_with_a_wrong_description_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    path = runs / "bc" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["evaluate", str(path.parent), "--device", "cpu", "--episodes", "1", "--num_envs", "1"]) == 2
    error = capsys.readouterr().err
    assert f"{path.parent}: " in error and reason in error


def test_a_recipe_whose_environment_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    for text in (
        "env: Nowhere-v1\nparts:\n  - policy: random\n    steps: 3\n",
        "env: CartPole-v1\nparts:\n  - policy: x\n    steps: 3\n",
    ):
        path.write_text(text)
        assert main(["collect", "--recipe", str(path), "--out", str(tmp_path / "x.npz"), "--workers", "1"]) == 2
        assert f"{path}: cannot be collected (" in capsys.readouterr().err
