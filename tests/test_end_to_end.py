"""The whole way through the commands: from nothing to a report, and from bad data to a better controller."""

import json
from pathlib import Path

import pytest

from trajectory_transformer.cli import main

ROOT = Path(__file__).parent.parent


def test_the_demo_writes_all_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--demonstrations", "100", "--steps", "30", "--goals", "3"]
    assert main(["demo", *words]) == 0
    run = tmp_path / "runs/demo"
    promised = {"checkpoint.json", "weights.safetensors", "evaluation.json", "routes.png", "report.html"}
    assert promised <= {path.name for path in run.iterdir()}
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    assert metrics["success_rate_n"] == 3
    page = (run / "report.html").read_text()
    assert "of 3 goals reached" in page
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")  # opens without a network
    assert main(["demo", *words]) == 2  # nothing is overwritten unasked


@pytest.mark.timeout(600)
def test_planning_for_return_beats_imitation_of_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where examples.race is
    data, run = tmp_path / "race.npz", tmp_path / "run"
    policies = "['demonstrator share=0.3', 'examples.race:lured share=0.7']"
    words = ["--env", "tt/FourRoomsRace-v0", "--episodes", "500", "--policy", policies]
    assert main(["collect", *words, "--out", str(data)]) == 0
    tokens = ["--tokens.discretizer", "uniform", "--tokens.num_bins", "32"]
    model = ["--model.window", "2", "--model.num_layers", "2", "--model.width", "48", "--model.dropout", "0"]
    train = ["--train.steps", "700", "--train.batch_size", "64", "--train.learning_rate", "3e-3"]
    assert main(["train", str(data), "--out", str(run), *tokens, *model, *train]) == 0
    search = ["--search.beam_width", "12", "--search.horizon", "2", "--search.context", "0"]
    wide = ["--search.expansion", "4", "--search.action_nucleus", "0.8", "--search.observation_top_k", "null"]
    means = {}
    for kind, more in (("return", wide), ("imitate", [])):
        out = tmp_path / f"{kind}.json"
        assert main(["evaluate", str(run), "--plan", kind, "--episodes", "24", "--out", str(out), *search, *more]) == 0
        means[kind] = json.loads(out.read_text())["metrics"]["return"]
    assert means["return"] > means["imitate"] + 5, means
    assert means["return"] > -46.9, "the mean return of such data"
