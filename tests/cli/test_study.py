"""`tt data split`, `tt pets` and `tt study`: from a dataset to the result file, fully and partially observed."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import load_npz

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]
TINY = ["--model.num_layers", 1, "--model.num_heads", 2, "--model.width", 16, "--tokens.rewards", "false"]
TINY += ["--tokens.discretizer", "uniform", "--train.batch_size", 32, "--train.steps", 20]
NETWORKS = ["--ensemble.num_networks", 2, "--ensemble.num_elites", 2, "--ensemble.num_layers", 1]
NETWORKS += ["--ensemble.width", 8, "--ensemble.epochs", 2]
STUDY = ["--horizon", 12, "--samples", 20, "--starts", 2, "--context", 3]


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a split dataset of Pendulum-v1, and predictors of a few steps of training."""
    folder = tmp_path_factory.mktemp("study")

    def tt(*words: object) -> None:
        assert main([str(word) for word in words]) == 0

    data = folder / "data.npz"
    tt("collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", 6, "--workers", 1, "--out", data)
    tt("data", "split", data, "--out", folder / "split", "--held_out", 0.4, "--hidden", 0.5, "--num_bins", 10)
    for name, window, extra in (("tt", 4, 0), ("markov", 2, 0), ("tt_masked", 4, 1)):
        source = folder / "split" / ("train_masked.npz" if extra else "train.npz")
        sizes = ["--model.window", window, "--tokens.num_bins", 10 + extra]
        tt("train", source, "--out", folder / name, *TINY, *sizes)
    tt("pets", folder / "split/train.npz", "--out", folder / "pets", *NETWORKS)
    tt("pets", folder / "split/train.npz", "--out", folder / "pets_masked", *NETWORKS, "--hidden", 0.5)
    return folder


def test_a_split_holds_episodes_out_and_masks_only_training_data(studied: Path) -> None:
    train, held_out, masked = (
        load_npz(studied / f"split/{name}.npz") for name in ("train", "held_out", "train_masked")
    )
    assert (len(train), len(held_out), len(masked)) == (4, 2, 4)
    hidden = np.concatenate([one.observations != other.observations for one, other in zip(train, masked, strict=True)])
    assert hidden.mean() == pytest.approx(0.5, abs=0.05)


def test_a_study_writes_metrics_curves_and_a_figure(tt: Run, studied: Path, tmp_path: Path) -> None:
    names = ("tt", "markov", "pets")
    predictors = json.dumps({name: str(studied / name) for name in names})
    words = ["--predictors", predictors, *STUDY, "--actions", '["policy", "recorded"]']
    code, text = tt("study", studied / "split/held_out.npz", *words)
    assert code == 0, text
    result = json.loads((tmp_path / "study.json").read_text())
    ranges = np.array(result["ranges"])
    oracle = float(np.log(10 / (ranges[:, 1] - ranges[:, 0])).sum())
    assert result["metrics"]["oracle_logp"] == pytest.approx(oracle)
    lowest = oracle + 3 * math.log(1e-4)
    for name in names:
        for suffix in ("", "_recorded"):
            assert lowest <= result["metrics"][f"{name}_logp_12{suffix}"] <= oracle
            assert result["metrics"][f"{name}_mse_10{suffix}"] > 0
        assert np.isfinite(result["metrics"][f"{name}_one_step_logp"])
        assert len(result["curves"]["policy"][name]["log_prob"]) == 12
    assert "pets_gaussian_logp_12" in result["metrics"] and "tt_gaussian_logp_12" not in result["metrics"]
    assert result["settings"]["floor"] == 1e-4 and len(result["starts"]) == 2
    assert (tmp_path / "study.png").read_bytes()[1:4] == b"PNG"


def test_predict_with_study_is_the_same_command(tt: Run, studied: Path, tmp_path: Path) -> None:
    words = [studied / "split/held_out.npz", "--predictors", json.dumps({"tt": str(studied / "tt")}), *STUDY]
    for out, command in (("one.json", ["study"]), ("two.json", ["predict", "--study"])):
        code, text = tt(*command, *words, "--out", out)
        assert code == 0, text
    one, two = (json.loads((tmp_path / name).read_text())["metrics"] for name in ("one.json", "two.json"))
    assert one == two


def test_masked_predictors_are_studied_on_masked_states(
    tt: Run, refused: Refused, studied: Path, tmp_path: Path
) -> None:
    predictors = json.dumps({"tt": str(studied / "tt_masked"), "pets": str(studied / "pets_masked")})
    code, text = tt("study", studied / "split/held_out.npz", "--predictors", predictors, *STUDY, "--hidden", 0.5)
    assert code == 0, text
    metrics = json.loads((tmp_path / "study.json").read_text())["metrics"]
    assert {"tt_logp_12_masked", "pets_mse_12_masked", "oracle_logp_masked"} <= set(metrics)
    plain = json.dumps({"tt": str(studied / "tt")})
    words = ["--predictors", plain, *STUDY, "--hidden", 0.5, "--out", "b.json"]
    refused("unobserved entries need a predictor trained with masks", "study", studied / "split/held_out.npz", *words)


def test_studies_that_cannot_run_are_refused(refused: Refused, studied: Path) -> None:
    data = studied / "split/held_out.npz"
    refused("name predictors with --predictors", "study", data)
    only = ["--predictors", json.dumps({"pets": str(studied / "pets")})]
    refused("needs a Trajectory Transformer", "study", data, *only, *STUDY)
    refused("no such checkpoint folder", "study", data, "--predictors", "{tt: nowhere}")
    long = ["--predictors", json.dumps({"tt": str(studied / "tt")}), "--horizon", 900]
    refused("no held-out episode has 900 steps", "study", data, *long)


def test_a_finished_ensemble_is_resumed_to_itself(tt: Run, studied: Path) -> None:
    before = (studied / "pets/weights.safetensors").read_bytes()
    words = ["--out", studied / "pets", *NETWORKS, "--resume", "true"]
    code, text = tt("pets", studied / "split/train.npz", *words)
    assert code == 0, text
    assert (studied / "pets/weights.safetensors").read_bytes() == before


def test_an_ensemble_is_refused_where_a_model_is_needed(refused: Refused, studied: Path) -> None:
    rule = "pets: a checkpoint of kind 'ensemble', but kind 'model' is needed"
    refused(rule, "predict", studied / "pets", "--dataset", studied / "data.npz")
    refused(rule, "evaluate", studied / "pets")
    policy = f'{{"policy": "{studied / "pets" / "behaviour"}"}}'
    rule = "behaviour: a checkpoint of kind 'cloned policy', but kind 'model'"
    refused(rule, "study", studied / "data.npz", "--predictors", policy)
