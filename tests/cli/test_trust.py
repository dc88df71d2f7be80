"""Nothing that a file names is imported or unpickled, unless the user typed it or trusts the file."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.evaluate import evaluate
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]

SMALL = ("--episodes", "1", "--num_envs", "1", "--search.beam_width", "1", "--search.horizon", "1", "--device", "cpu")


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A module in the working directory that registers an environment; the file appears when it is imported."""
    mark = tmp_path / "imported"
    name = f"hostile_{time.time_ns()}"
    (tmp_path / f"{name}.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "import gymnasium\n"
        "gymnasium.registry.pop('Hostile-v0', None)\n"
        "gymnasium.register('Hostile-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=3)\n"
        "def act(observation, goal, rng): return rng.integers(2)\n"
        "class Settings: pass\n"
    )
    (tmp_path / "name").write_text(name)
    return mark


def dataset(env: str) -> Dataset:
    rng = np.random.default_rng(0)
    episode = Episode(
        rng.normal(size=(9, 4)).astype(np.float32), np.zeros((8, 1), np.float32), np.ones(8, np.float32), True
    )
    return Dataset((episode,), {"env": env})


def test_the_environment_of_a_checkpoint_is_not_imported_unasked(
    tt: Run, refused: Refused, imported: Path, tmp_path: Path
) -> None:
    env = f"{(tmp_path / 'name').read_text()}:Hostile-v0"
    data = replace(dataset(env), action_dimensions=())
    model = TrajectoryModel.create(data, TokenConfig(num_bins=4), ModelConfig(window=2, num_layers=1, width=8), seed=0)
    model.save("run")
    refused(f"{env}.*--trust", "evaluate", "run", *SMALL)
    with pytest.raises(ValueError, match="trust"):
        evaluate(Planner(model), episodes=1)
    code, text = tt("view", "run", "--browser", "false", "--port", "99999")
    assert code == 2 and not imported.exists(), text
    # With the model's own data the viewer would start; its content is what it loads.
    from trajectory_transformer.viewer.content import load_content

    save_npz(data, "data.npz")
    assert env in load_content("run", dataset="data.npz").missing["Control"]
    assert not imported.exists()
    # Typed or trusted, it is made: the refusal is then another one, because its action is discrete.
    tt("evaluate", "run", "--env", env, *SMALL)
    assert imported.exists()
    imported.unlink()


def test_trust_allows_the_environment_of_a_checkpoint(tt: Run, imported: Path, tmp_path: Path) -> None:
    env = f"{(tmp_path / 'name').read_text()}:Hostile-v0"
    model = TrajectoryModel.create(
        dataset(env), TokenConfig(num_bins=4), ModelConfig(window=2, num_layers=1, width=8), seed=0
    )
    model.save("run")
    tt("evaluate", "run", "--trust", "true", *SMALL)
    assert imported.exists()


def test_writing_a_minari_dataset_does_not_import_its_environment(
    tt: Run, imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    save_npz(dataset(f"{(tmp_path / 'name').read_text()}:Hostile-v0"), "data.npz")
    code, text = tt("data", "convert", "data.npz", "--out", "stranger/data-v0")
    assert code == 0 and not imported.exists(), text


def recipe(policy: str, env: str = "CartPole-v1") -> str:
    return f"env: {env}\nparts:\n  - policy: {policy}\n    steps: 5\n"


def test_recipes_name_no_code_unless_they_are_trusted(
    tt: Run, refused: Refused, imported: Path, tmp_path: Path
) -> None:
    name = (tmp_path / "name").read_text()
    Path("policy.zip").write_bytes(b"a pickle")
    recipes = {
        "function": recipe(f"{name}:act"),
        "env": recipe("random", f"{name}:Hostile-v0"),
        "zip": recipe("policy.zip"),
    }
    named = {"function": f"{name}:act", "env": f"{name}:Hostile-v0", "zip": "policy.zip"}
    for kind, content in recipes.items():
        Path(f"{kind}.yaml").write_text(content)
        refused(f"{kind}.yaml: .*{named[kind]}.*--trust", "collect", "--recipe", f"{kind}.yaml", "--out", "x.npz")
        assert not imported.exists()
    code, text = tt("collect", "--recipe", "function.yaml", "--out", "x.npz", "--trust", "true", "--workers", "1")
    assert code == 0 and imported.exists(), text


def test_settings_files_name_no_code_unless_they_are_trusted(
    tt: Run, refused: Refused, imported: Path, tmp_path: Path
) -> None:
    name = (tmp_path / "name").read_text()
    common = "episodes: 1\nworkers: 1\nout: x.npz\n"
    files = {
        "policy": f"policy: {name}:act\nenv: CartPole-v1\n{common}",
        "policies": f"policy: ['{name}:act', random]\nenv: CartPole-v1\n{common}",
        "env": f"policy: random\nenv: {name}:Hostile-v0\n{common}",
    }
    for kind, content in files.items():
        Path(f"{kind}.yaml").write_text(content)
        refused(f"{kind}.yaml: .*{name}:.*--trust", "collect", "--config", f"{kind}.yaml")
        Path(f"{kind}.yaml").write_text(content + "trust: true\n")
        refused(f"{kind}.yaml: .*trust", "collect", f"--config={kind}.yaml")
        assert not imported.exists()
    Path("policy.yaml").write_text(files["policy"])
    code, text = tt("collect", "--config", "policy.yaml", "--policy", "random")
    assert code == 0 and not imported.exists(), text  # what was typed replaces what the file names
    code, text = tt("collect", "--config", "policy.yaml", "--out", "y.npz", "--trust", "true")
    assert code == 0 and imported.exists(), text


@pytest.mark.parametrize("words", [("--config",), ("--search",), ("--search.action",)])
def test_settings_files_name_no_classes(
    refused: Refused, imported: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    group = f"class_path: {(tmp_path / 'name').read_text()}.Settings\n"
    for number, content in enumerate((group, f"search:\n  {group}", f"search:\n  action:\n    {group}")):
        Path(f"{number}.yaml").write_text(content)
        refused("class_path", "evaluate", "run", *words, f"{number}.yaml")
    assert not imported.exists()


def test_yaml_aliases_are_refused_at_once(refused: Refused, tmp_path: Path) -> None:
    rows = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    rows += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    bomb = "\n".join(rows)
    started = time.perf_counter()
    for words, content in (
        (("collect", "--recipe", "bomb.yaml"), f"env: CartPole-v1\nparts:\n{bomb}".replace("\na", "\n  a")),
        (("collect", "--config", "bomb.yaml"), bomb),
        (("evaluate", "run", "--search", "bomb.yaml"), bomb),
        (("data", "show", "x.csv"), bomb),
    ):
        Path("x.csv").write_text("a,b\n1,2\n")
        Path("bomb.yaml").write_text(bomb)
        Path("x.csv.columns.yaml").write_text(content if words[0] == "data" else "observations: [a]\nactions: [b]\n")
        refused("YAML aliases|aliases .* not supported", *words)
    assert time.perf_counter() - started < 10.0


def test_a_settings_file_names_no_other_settings_file(refused: Refused, tmp_path: Path) -> None:
    Path("inner.yaml").write_text("policy: hostile:act\n")
    Path("outer.yaml").write_text("config: inner.yaml\n")
    refused("config", "collect", "--config", "outer.yaml")
    shutil.rmtree(tmp_path / "minari", ignore_errors=True)


def test_null_for_a_number_is_refused_in_one_sentence(refused: Refused) -> None:
    Path("x.yaml").write_text("seed: null\n")
    refused(r"--seed: expected a value, got null \(settings of x.yaml\)", "collect", "--config", "x.yaml")
    refused("--seed: expected int, got None", "collect", "--seed", "null")
