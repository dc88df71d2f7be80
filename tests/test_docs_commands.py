"""The shell blocks of the documentation run as they stand, but for flags that make them small (`make docs`).

A block that cannot run here has a comment in the line before it that says why: `<!-- not run: needs a GPU -->`. Lines
that install or set up are not run: their targets and extras must exist.
"""

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from trajectory_transformer import collect, save_dataset
from trajectory_transformer.baselines.model import KIND as BASELINE
from trajectory_transformer.checkpoint import checkpoint_kind
from trajectory_transformer.cli import COMMANDS, main
from trajectory_transformer.data.episode import save_npz
from trajectory_transformer.recipes import find_recipe

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

# Flags that make a command small. They come last, so they win. `--x?` only replaces what the block gives.
MODEL = "--model.num_layers 1 --model.num_heads 2 --model.width 16 --train.steps 2 --train.batch_size 4"
SMALL = {
    "collect": "--episodes? 6 --steps? 60 --workers 1",
    "train": f"{MODEL} --device cpu",
    "baseline": "--steps 3 --seeds [0] --device cpu",
    "pets": "--ensemble.epochs 1 --ensemble.width 8 --ensemble.num_networks 2 --ensemble.num_elites 1 --device cpu",
    "study": "--horizon 2 --samples 2 --starts 2 --device cpu",
    "evaluate": '--episodes 1 --env_options {"max_episode_steps":5} --search.beam_width 2 --search.horizon 1',
}


def blocks(page: str) -> Iterator[tuple[str, str | None]]:
    """The shell blocks of a page, each with the reason why it is not run, if there is one."""
    text = (ROOT / page).read_text()
    for found in re.finditer(r"(?:<!-- not run: (.*?) -->\n)?```bash\n(.*?)```", text, flags=re.DOTALL):
        yield found.group(2), found.group(1)


def lines(block: str) -> list[list[str]]:
    """The commands of a block, in words."""
    split = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in split if words]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_hold_commands_that_can_be_run_or_say_why_not(page: str) -> None:
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert targets is not None
    for block, reason in blocks(page):
        assert reason is None or len(reason) > 10
        for words in lines(block):
            if words[0] == "make":
                assert words[1] in targets.group(1).split(), words
            elif words[:2] == ["pip", "install"]:
                named = re.search(r"\[(.*)\]", words[2])
                assert set(named.group(1).split(",") if named else ()) <= set(extras), words
            elif words[0] != "source" and reason is None:
                assert words[0] == "tt", f"{page}: {shlex.join(words)}: run it in this test, or say why not"


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if any(reason is None for _, reason in blocks(page))])
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # examples.race
    prepare(page)
    for block, reason in blocks(page):
        for words in lines(block) if reason is None else []:
            if words[0] == "tt":
                tt(*words[1:])


def tt(*words: str) -> None:
    """Run a command with the flags that make it small."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    given = ["data.npz" if word in ("DATASET", "OTHER") else word for word in words]
    fixed = "--resume" in words or "--init" in words  # the sizes are those of the run
    if "--recipe" in given:
        position = given.index("--recipe") + 1
        given[position] = small_recipe(given[position])
    small = SMALL.get(name, "").split()
    is_baseline = name == "evaluate" and Path(words[1]).is_dir() and checkpoint_kind(words[1]) == BASELINE
    for flag, value in zip(small[::2], small[1::2], strict=True):
        if is_baseline and flag.startswith("--search."):
            continue
        if fixed and not (flag == "--train.steps" and flag in words):
            continue
        if not flag.endswith("?") or flag[:-1] in words:
            given += [flag.rstrip("?"), "4" if "--resume" in words else value]  # a longer run than before
    if "--resume" not in words and "overwrite" in COMMANDS[name].__dataclass_fields__:
        given += ["--overwrite", "true"]
    assert main(given) == 0, shlex.join(["tt", *given])


def small_recipe(name: str) -> str:
    """A recipe of the same name and environment, with 60 random steps."""
    content = yaml.safe_load(find_recipe(name).read_text())
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump({**content, "parts": [{"policy": "random", "steps": 60}]}))
    return str(path)


def prepare(page: str) -> None:
    """Write what the commands of a page read."""
    pendulum = collect("Pendulum-v1", "random", episodes=6, env_options={"max_episode_steps": 20})
    if page == "docs/antmaze.md":
        Path("POLICIES").mkdir()  # empty: small recipes play randomly
    if page == "docs/baselines.md":
        tt("collect", "--recipe", "hopper-medium")
    if page == "docs/data.md":
        save_dataset(pendulum, "log.csv")
        write_policies(Path("POLICIES"))
    if page in ("docs/prediction.md", "docs/training.md"):
        save_npz(pendulum, "data.npz")
    if page == "docs/training.md":
        tt("train", "data.npz", "--out", "RUN")
    if page == "docs/grids.md":
        (text,) = re.findall(r"```yaml\n# grid.yaml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
        grid = yaml.safe_load(text)
        grid["axes"] = {name: values[:1] for name, values in grid["axes"].items()}
        small = {name: shlex.join(flags.split()).replace("{", "{{").replace("}", "}}") for name, flags in SMALL.items()}
        grid["commands"] = [f"{each} {small[each.split()[1]]}" for each in grid["commands"]]
        Path("grid.yaml").write_text(yaml.safe_dump({**grid, "gpus": 0}))
        save_npz(pendulum, f"data/{grid['axes']['task'][0]}.npz")
    if page == "docs/viewer.md":
        save_npz(pendulum, "data.npz")
        tt("train", "data.npz", "--out", "runs/demo")
        tt("evaluate", "runs/demo")
        for name in ("a", "b"):
            shutil.copytree("runs/demo", f"runs/{name}")
        save_npz(pendulum, "data/other.npz")


def write_policies(folder: Path) -> None:
    """Policies that the page on data names: actor files, a Stable-Baselines3 zip, a function."""
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    folder.mkdir()
    zeros = {"layer0.weight": np.zeros((3, 11), np.float32), "layer0.bias": np.zeros(3, np.float32)}
    limits = {"action_low": -np.ones(3, np.float32), "action_high": np.ones(3, np.float32)}
    envs = '[{"id": "Hopper-v5", "kwargs": {}, "obs_index": null}]'
    settings = {"envs": envs, "n_layers": "1", "activation": "none", "clip_obs": "inf", "squash": "clip"}
    for name in ("hopper-medium-sac", "hopper-expert-berkeley"):
        tensors = {**zeros, **limits, "log_std": np.zeros(3, np.float32)}
        save_file(tensors, folder / f"{name}.safetensors", settings)
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", device="cpu").save("ppo_cartpole")
    Path("my_module.py").write_text("def swing_up(observation, goal, rng):\n    return rng.uniform(-2, 2, 1)\n")
