"""`tt data` and `tt collect`: one dataset in every format, recipes, and errors."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import minari
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from trajectory_transformer.data.episode import Dataset, Dimension, Episode, save_npz
from trajectory_transformer.data.sources import load_dataset

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]
FORMATS = ["hopper.hdf5", "hopper.parquet", "hopper.csv", "tests/hopper-v0"]
TINY = ["--model.window", 3, "--model.num_layers", 1, "--model.num_heads", 2, "--model.width", 16]
SHORT = ["--tokens.num_bins", 16, "--train.batch_size", 8, "--train.steps", 3, "--seed", 5]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thousand steps of two hopper policies."""
    path = tmp_path_factory.mktemp("recipe") / "hopper-small.yaml"
    path.write_text(
        "env: Hopper-v5\nparts:\n  - {policy: hopper-medium-sac sto, steps: 1500}\n  - {policy: random, steps: 500}\n"
    )
    return path


def test_every_format_gives_the_same_episodes_and_the_same_weights(
    tt: Run, recipe: Path, policies: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mujoco")
    code, text = tt("collect", "--recipe", recipe, "--policies", policies, "--out", "hopper.npz", "--workers", 1)
    assert code == 0, text
    assert "2000 steps of Hopper-v5" in text and "cores" in text
    for name in FORMATS:
        code, text = tt("data", "convert", "hopper.npz", "--out", name)
        assert code == 0, text
    original = load_dataset("hopper.npz")
    assert original.num_steps == 2000
    weights = {}
    for number, name in enumerate(["hopper.npz", *FORMATS]):
        found = load_dataset(name)
        for a, b in zip(found, original, strict=True):
            np.testing.assert_array_equal(a.observations, b.observations)
            np.testing.assert_array_equal(a.actions, b.actions)
            np.testing.assert_array_equal(a.rewards, b.rewards)
            assert a.terminated == b.terminated
        assert found.metadata["env"] == "Hopper-v5"
        code, text = tt("train", name, "--out", f"run{number}", *TINY, *SHORT)
        assert code == 0, text
        weights[name] = load_file(tmp_path / f"run{number}/weights.safetensors")
    for name in FORMATS:
        assert all(weights[name][key].equal(weights["hopper.npz"][key]) for key in weights["hopper.npz"]), name


def test_a_smaller_collection_of_a_recipe_begins_with_the_same_episodes(
    tt: Run, refused: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "swing.yaml"
    path.write_text(
        "env: Pendulum-v1\nparts:\n  - {policy: random, steps: 600}\n  - {policy: random eps=0.5, steps: 600}\n"
    )
    assert tt("collect", "--recipe", path, "--out", "whole.npz", "--workers", 1)[0] == 0
    code, text = tt("collect", "--recipe", path, "--steps", 700, "--out", "small.npz", "--workers", 1)
    assert code == 0 and "700 steps of Pendulum-v1" in text
    whole, small = load_dataset("whole.npz"), load_dataset("small.npz")
    assert [len(episode) for episode in small] == [200, 150, 200, 150]
    assert (small.metadata["policy.0.steps"], small.metadata["policy.1.steps"]) == (350, 350)
    for one, other in zip(small, [whole.episodes[index] for index in (0, 1, 3, 4)], strict=True):
        np.testing.assert_array_equal(one.actions, other.actions[: len(one)])
    for flag, value in (("env", "CartPole-v1"), ("policy", "random"), ("episodes", 5), ("noise", 0.2), ("wander", 0)):
        rule = rf"--recipe sets the environment and the policies; leave out --{flag}"
        refused(rule, "collect", "--recipe", path, f"--{flag}", value, "--out", "x.npz")


def test_collected_minari_datasets_say_where_they_came_from(tt: Run, recipe: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    code, text = tt("collect", "--recipe", recipe, "--policies", policies, "--workers", 1, "--result", "r.json")
    assert code == 0, text
    assert "wrote tt/hopper-small-v0" in text
    stored = minari.load_dataset("tt/hopper-small-v0")
    assert stored.env_spec is not None and stored.env_spec.id == "Hopper-v5"
    raw = stored.storage.metadata
    assert (raw["ref_min_score"], raw["ref_max_score"]) == (-20.272305, 3234.3)
    assert any(each.startswith("mujoco==") for each in raw["requirements"])
    known = load_dataset("tt/hopper-small-v0").metadata
    assert known["policy"] == "hopper-medium-sac sto, random"
    assert known["policy.0.file"] == "hopper-medium-sac.safetensors"
    assert len(str(known["policy.0.sha256"])) == 64
    assert (known["policy.0.mode"], known["policy.0.steps"], known["policy.1.steps"]) == ("sto", 1500, 500)
    assert known["seed"] == 0 and "version.mujoco" in known
    result = json.loads(Path("r.json").read_text())
    assert result["metrics"]["total_steps"] == 2000
    assert result["metrics"].keys() >= {"return", "return_stderr", "normalized_score", "core_share"}


def test_show_prints_names_returns_tokens_and_oddities_and_draws_them(tt: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(11, 1))
    observations = np.concatenate([x, np.full((11, 1), 2.0), x], axis=1).astype(np.float32)
    actions = rng.integers(0, 3, (10, 1)).astype(np.float32)
    episode = Episode(observations, actions, np.ones(10, np.float32), terminated=False)
    observed, acted = tuple(map(Dimension, ("speed", "mass", "copy"))), (Dimension("action 0", 3),)
    save_npz(Dataset((episode, episode), {"env": "Hopper-v5"}, observed, acted), tmp_path / "x.npz")
    code, text = tt("data", "show", "x.npz", "--plot", "x.png", "--tokens.num_bins", 5)
    assert code == 0, text
    for part in ("2 episodes, 20 steps", "quartiles 10, 10, 10", "normalised mean 0.9", "constant", "same as speed"):
        assert part in text
    assert "3 categories" in text and "5 bins" in text
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_columns_can_be_given_as_flags_or_as_a_file(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("run,v,u,r\n0,1,0.5,1\n0,2,0.5,1\n0,3,0.5,1\n1,4,0.5,1\n1,5,0.5,1\n")
    flags = ["--columns.episode", "run", "--columns.observations", "[v]", "--columns.actions", "[u]"]
    code, text = tt("data", "show", "log.csv", *flags)
    assert code == 0, text
    assert "2 episodes, 3 steps" in text and "no rewards were recorded" in text
    (tmp_path / "columns.yaml").write_text("episode: run\nobservations: [v]\nactions: [u]\n")
    code, text = tt(
        "data", "convert", "log.csv", "--mapping", "columns.yaml", "--columns.reward", "r", "--out", "l.npz"
    )
    assert code == 0, text
    assert load_dataset("l.npz").has_rewards


def test_bad_data_is_answered_in_one_sentence_with_file_and_row(
    refused: Refused, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "cut.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((1000, 3))
    path.write_bytes(path.read_bytes()[:2000])
    refused(r"cut\.hdf5: not a complete HDF5 file; it may be truncated", "train", "cut.hdf5")
    lists = {"s": [[1.0, 2.0], [1.0, 2.0], [3.0]], "a": [0.0, 1.0, 2.0], "e": [0, 0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(lists), tmp_path / "mixed.parquet")
    flags = ["--columns.observations", "[s]", "--columns.actions", "[a]"]
    refused(r"mixed\.parquet, row 3: lists .* must have 2 entries", "data", "show", "mixed.parquet", *flags)
    refused(r"mixed\.parquet: the table has no column 'b'", "data", "show", "mixed.parquet", *flags[:3], "[b]")
    (tmp_path / "log.csv").write_text("s,a\n1,2\n1,two\n")
    refused(r"log\.csv, row 2: column 'a' must hold numbers, got 'two'", "data", "show", "log.csv", *flags)
    refused(r"hopper: not a dataset; expected a file", "train", "hopper")
    refused(r"name the dataset to write with --out", "data", "convert", "log.csv")


def test_an_unknown_minari_id_is_answered_in_seconds(refused: Refused) -> None:
    started = time.perf_counter()
    refused(r"Minari dataset nobody/nothing-v0: not ", "train", "nobody/nothing-v0")
    assert time.perf_counter() - started < 20  # a network that answers may take its time


def test_policies_that_do_not_fit_are_answered_in_one_sentence(refused: Refused, tt: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong_actors.py").write_text(
        "import numpy as np\ndef act(observation, goal, rng):\n    return np.ones(5)\n"
    )
    refused(
        r"policy wrong_actors:act det: an action must have 2 dimensions to fit Box.*got shape \(5,\)",
        *("collect", "--policy", "wrong_actors:act", "--episodes", 2),
    )
    refused(
        r"recipe 'nothing': not a file and not a recipe of this package, which has .*hopper-medium",
        "collect",
        "--recipe",
        "nothing",
    )
    refused(r"give the folder of actor files with --policies", "collect", "--recipe", "hopper-medium")
    assert not (tmp_path / "data").exists()


def test_flags_of_collect_that_would_do_nothing_are_refused(refused: Refused) -> None:
    words = ("collect", "--env", "Pendulum-v1", "--policy", "random")
    refused("--noise is for the policy demonstrator, not for random; leave it out", *words, "--noise", 0.3)
    refused("--wander is for the policy demonstrator", *words, "--wander", 0)
    refused("--steps and --episodes both say how much to collect", *words, "--steps", 5, "--episodes", 2)
    refused("--policies must be a folder, got nowhere", *words, "--policies", "nowhere")


def test_discrete_environments_are_collected_trained_on_and_played(tt: Run) -> None:
    words = ["--env", "CartPole-v1", "--policy", "['random', 'random eps=0.5']", "--steps", 300, "--workers", 1]
    code, text = tt("collect", *words, "--out", "pole.npz")
    assert code == 0, text
    assert [d.categories for d in load_dataset("pole.npz").action_dimensions] == [2]
    code, text = tt("train", "pole.npz", "--out", "run", *TINY, *SHORT)
    assert code == 0, text
    code, text = tt("evaluate", "run", "--episodes", 2, "--search.beam_width", 2, "--search.horizon", 1)
    assert code == 0, text


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("h5py", "x.hdf5", "hdf5"), ("pyarrow", "x.parquet", "parquet"), ("minari", "x-v0", "minari")],
)
def test_a_missing_package_is_named_with_its_cure(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, extra: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    refused(rf"needs: pip install 'trajectory-transformer\[{extra}\]'", "data", "show", name)
