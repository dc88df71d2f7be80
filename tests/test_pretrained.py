"""Models to share: folders with a card, models of the package by name, and the Hub, played by a local folder."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from trajectory_transformer import Planner, TrajectoryModel, from_pretrained, pretrained, push_to_hub, save_pretrained
from trajectory_transformer.checkpoint import load_checkpoint
from trajectory_transformer.cli import main
from trajectory_transformer.config import FIRST_SEED, Sampler, SearchConfig
from trajectory_transformer.data.episode import Metadata
from trajectory_transformer.pretrained import (
    Details,
    default_episodes,
    find_model,
    model_card,
    read_search,
    shipped_models,
)
from trajectory_transformer.rollout import make_envs, rollout

ROOT = Path(__file__).parent.parent
FLAGS = ["--search.beam_width", "3", "--search.horizon", "2", "--search.action.top_k", "2"]
SEARCH = SearchConfig(beam_width=3, horizon=2, action=Sampler(top_k=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on random episodes of Pendulum-v1, with an evaluation of two short episodes."""
    folder = tmp_path_factory.mktemp("pendulum")
    data, run = str(folder / "data.npz"), folder / "run"
    assert main(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]) == 0
    sizes = ["--tokens.num_bins", "10", "--model.window", "3", "--model.num_layers", "1", "--model.width", "16"]
    assert main(["train", data, "--out", str(run), *sizes, "--train.steps", "3", "--train.batch_size", "4"]) == 0
    short = ["--env_options", "{max_episode_steps: 5}", "--episodes", "2"]
    assert main(["evaluate", str(run), *short, *FLAGS]) == 0
    return run


POLICIES: Metadata = {
    "policy.0.policy": "a det",
    "policy.0.episodes": 3,
    "policy.0.steps": 60,
    "policy.0.sha256": "0123456789abcdef",
    "policy.1.policy": "b sto",
    "policy.1.episodes": 2,
    "policy.1.steps": 40,
}


def env_of(model: TrajectoryModel) -> str:
    return str(model.metadata["env"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder)[0]


def test_a_saved_model_is_the_same_model_without_what_training_needs(run: Path, tmp_path: Path) -> None:
    save_pretrained(run, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"README.md", "checkpoint.json", "evaluation.json", "search.json", "weights.safetensors"}
    before, after = weights(run), weights(tmp_path / "model")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    state = np.array([1.0, 0.0, 0.5])
    actions = [Planner(each, search=SEARCH).act(state) for each in (run, from_pretrained(tmp_path / "model"))]
    np.testing.assert_array_equal(*actions)


def test_half_stores_rounded_weights_and_exact_bins(run: Path, tmp_path: Path) -> None:
    save_pretrained(run, tmp_path / "half", half=True)
    before, after = weights(run), weights(tmp_path / "half")
    for name, value in before.items():
        if name.startswith("gpt.") and value.ndim > 1:
            assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], value.bfloat16()), name
        else:
            assert torch.equal(after[name], value), name
    loaded = from_pretrained(tmp_path / "half")
    assert all(value.dtype == torch.float32 for value in loaded.gpt.parameters())
    size = {each: (each / "weights.safetensors").stat().st_size for each in (run, tmp_path / "half")}
    assert size[tmp_path / "half"] < 0.7 * size[run]


def test_search_settings_are_those_of_the_evaluation_unless_given(run: Path, tmp_path: Path) -> None:
    save_pretrained(run, tmp_path / "a")
    assert read_search(tmp_path / "a") == SEARCH
    other = SearchConfig(beam_width=7, first_action=Sampler(nucleus=1.0))
    save_pretrained(run, tmp_path / "b", search=other)
    assert read_search(tmp_path / "b") == other


@pytest.mark.parametrize("text", ['{"beam_width": 0}', '{"beams": 3}', '{"action": {"top": 1}}', "[1]", "{"])
def test_search_settings_that_are_invalid_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "search.json").write_text(text)
    with pytest.raises(ValueError, match=r"search\.json"):
        read_search(tmp_path)


def test_the_card_has_the_scores_and_the_commands_of_the_run(run: Path, tmp_path: Path) -> None:
    save_pretrained(run, tmp_path / "model", name="swing", half=True)
    card = (tmp_path / "model/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    known = yaml.safe_load(head)
    assert known["library_name"] == "trajectory-transformer" and "Pendulum-v1" in known["tags"]
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    scores = {each["type"]: each["value"] for each in known["model-index"][0]["results"][0]["metrics"]}
    assert scores["return"] == pytest.approx(metrics["return"], abs=1e-4)
    parameters = sum(value.numel() for value in TrajectoryModel.load(run).gpt.parameters())
    assert "# swing" in body and f"{parameters:,} parameters" in body and "bfloat16" in body
    for part in ("training.json", "evaluation.json"):
        assert json.loads((run / part).read_text())["command"] in body
    assert f"| return | {metrics['return']:.4g} |" in body


def test_the_scores_of_one_episode_have_no_error(run: Path) -> None:
    metrics = {"return": -5.0, "return_n": 1.0, "plan_ms_p50": 3.0}
    evaluation = {"metrics": metrics, "device": "x", "commit": "y", "command": "z"}
    card = model_card(TrajectoryModel.load(run), "swing", Details(evaluation=evaluation))
    assert "| return | -5 |  | 1 |" in card and "plan_ms" not in card


def test_a_run_without_evaluation_has_a_card_that_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "bare")
    for name in ("evaluation.json", "training.json", "run.json"):
        (tmp_path / "bare" / name).unlink()
    save_pretrained(tmp_path / "bare", tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "has not been evaluated" in card and "does not say how it was trained" in card
    assert read_search(tmp_path / "model") is None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plays the Hub."""
    folder = tmp_path / "hub"

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            assert exist_ok
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "private").write_text(str(private))
            return f"https://hub.example/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            shutil.copytree(folder_path, folder / repo_id, dirs_exist_ok=True)

    def download(name: str, *, allow_patterns: list[str]) -> str:
        if not (folder / name).is_dir():
            raise LookupError("404 Client Error")
        found = tmp_path / "cache" / name
        found.mkdir(parents=True)
        for pattern in allow_patterns:
            for path in (folder / name).glob(pattern):
                shutil.copy(path, found)
        return str(found)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Api, snapshot_download=download))
    return folder


def test_a_pushed_model_is_loaded_from_the_hub(run: Path, hub: Path) -> None:
    assert push_to_hub(run, "me/swing", private=True) == "https://hub.example/me/swing"
    assert (hub / "me/swing/private").read_text() == "True"
    (hub / "me/swing/setup.py").write_text("raise SystemExit")
    model = from_pretrained("me/swing")
    assert torch.equal(model.gpt.heads, TrajectoryModel.load(run).gpt.heads)
    assert not (hub.parent / "cache/me/swing/setup.py").exists()
    with pytest.raises(ValueError, match=r"me/nobody: no such folder, and the Hugging Face Hub does not give it"):
        from_pretrained("me/nobody")
    assert "# swing" in (hub / "me/swing/README.md").read_text()


def test_the_functions_of_the_hub_take_these_arguments() -> None:
    library = pytest.importorskip("huggingface_hub")
    import inspect

    inspect.signature(library.snapshot_download).bind("me/swing", allow_patterns=["a"])
    inspect.signature(library.HfApi.create_repo).bind(None, "me/swing", private=True, exist_ok=True)
    inspect.signature(library.HfApi.upload_folder).bind(None, repo_id="me/a", folder_path="b", commit_message="c")


def test_the_hub_needs_its_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for act in (lambda: from_pretrained("me/swing"), lambda: push_to_hub(run, "me/swing")):
        with pytest.raises(ImportError, match=r"pip install 'trajectory-transformer\[hub\]'"):
            act()
    with pytest.raises(ValueError, match="named user/name, got 'swing'"):
        push_to_hub(run, "swing")


def test_ship_model_writes_rounded_weights_and_their_evaluation(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ship = runpy.run_path(str(ROOT / "benchmarks/ship_model.py"))["main"]
    words = ["--models", str(tmp_path), "--episodes", "1", "--env_options", "{max_episode_steps: 4}"]
    assert ship([str(run), "swing", *words]) == 0
    shipped = tmp_path / "swing"
    assert weights(shipped)["gpt.heads"].dtype == torch.bfloat16
    found = json.loads((shipped / "evaluation.json").read_text())
    assert found["command"].startswith("tt evaluate swing ") and found["metrics"]["steps"] == 4
    assert "--search.beam_width 3" in found["command"] and str(tmp_path.parent) not in json.dumps(found)
    assert found["command"] in (shipped / "README.md").read_text()
    assert ship([str(run), "swing", *words]) == 2  # it exists
    # Rounding these weights again changes nothing: nothing is played, and the evaluation stays.
    assert ship([str(shipped), "again", *words]) == 0
    renamed = {**found, "command": found["command"].replace("swing", "again")}
    kept = json.loads((tmp_path / "again/evaluation.json").read_text())
    assert {key: value for key, value in kept.items() if key != "training"} == {
        key: value for key, value in renamed.items() if key != "training"
    }
    assert ship([str(shipped), "other", *words, "--search.horizon", "1"]) == 0
    assert json.loads((tmp_path / "other/evaluation.json").read_text())["settings"]["search"]["horizon"] == 1


def test_ship_model_needs_only_a_checkpoint_and_tells_what_else_is_known(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "packed"
    bare.mkdir()
    for name in ("checkpoint.json", "weights.safetensors", "run.json"):
        shutil.copy(run / name, bare)
    facts = {"data": {"score": 41.25, "score_stderr": 1.0, "score_n": 9.0}, "best_policy": "swinger det"}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    words = ["--models", str(tmp_path), "--episodes", "1", "--env_options", "{max_episode_steps: 4}"]
    words += ["--facts", str(tmp_path / "facts.json"), "--search.beam_width", "5", "--search.horizon", "2"]
    command = [sys.executable, str(ROOT / "benchmarks/ship_model.py"), str(bare), "swing", *words]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)  # as it is typed
    search = read_search(tmp_path / "swing")
    assert search is not None and (search.beam_width, search.horizon) == (5, 2), "the flags are the model's settings"
    card = (tmp_path / "swing/README.md").read_text()
    assert "swinger det" in card and "data: 41.25 ± 1 over 9 episodes" in card
    assert "tt train" in card and "batch_size 4" in card and "steps 3," in card
    for path in (tmp_path / "swing").glob("*.[jm]*"):
        assert str(tmp_path.parent) not in path.read_text(), f"{path.name} names folders of this machine"


def test_the_card_lists_the_policies_of_the_data(run: Path) -> None:
    model = replace(TrajectoryModel.load(run), metadata={"env": "A-v0", **POLICIES})
    card = model_card(model, "swing", Details())
    assert "| a det | 3 | 60 | 0123456789ab |" in card and "| b sto | 2 | 40 |  |" in card


def test_a_model_of_the_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "four-rooms" in shipped_models()
    for name in shipped_models():
        folder = find_model(name)
        assert weights(folder)["gpt.heads"].dtype == torch.bfloat16
        assert f"# {name}" in (folder / "README.md").read_text() and read_search(folder) is not None
        assert from_pretrained(name).metadata["env"]
    (tmp_path / "four-rooms").mkdir()
    assert find_model("four-rooms") == Path("four-rooms"), "a folder here comes first"
    with pytest.raises(ValueError, match=r"nobody: no such checkpoint folder, and not a model .* four-rooms"):
        find_model("nobody")


def test_commands_that_look_at_a_model_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not main(["collect", "--env", "tt/FourRooms-v0", "--policy", "random", "--episodes", "1", "--out", "d.npz"])
    for name in ("predict", "attention"):
        assert not main([name, "four-rooms", "--dataset", "d.npz", "--out", f"{name}.png", "--device", "cpu"])
        assert (tmp_path / f"{name}.png").is_file()
    assert main(["attention", "five-rooms", "--dataset", "d.npz", "--out", "other.png"]) == 2
    assert "not a model of this package, which has four-rooms" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", shipped_models())
def test_every_model_of_the_package_plays(name: str) -> None:
    model, search = from_pretrained(name), read_search(find_model(name))
    pytest.importorskip({"MiniGrid": "minigrid", "tt": "gymnasium"}.get(re.split("[-/]", env_of(model))[0], "mujoco"))
    policy = Planner(model, search=search).policy()
    envs = make_envs(env_of(model), 1, {"max_episode_steps": 4})
    (episode,) = rollout(envs, policy, num_episodes=1, seed=FIRST_SEED)
    assert len(episode) == 4 and policy.num_outside == 0


def test_the_page_of_models_has_the_results_of_their_cards() -> None:
    page = (ROOT / "docs/models.md").read_text()
    for name in shipped_models():
        metrics = json.loads((find_model(name) / "evaluation.json").read_text())["metrics"]
        if "success_rate" in metrics:
            result = f"{metrics['success_rate'] * metrics['success_rate_n']:.0f} of {metrics['success_rate_n']:.0f}"
        else:
            result = f"{metrics['normalized_score']:.1f} ± {metrics['normalized_score_stderr']:.1f}"
        row = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
        assert result in row, row


def test_evaluate_plays_a_model_of_the_package_with_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in find_model("four-rooms").iterdir()}
    assert main(["evaluate", "four-rooms", "--episodes", "4"]) == 0
    assert "search settings that come with four-rooms: --search.beam_width 8" in capsys.readouterr().out
    found = json.loads((tmp_path / "four-rooms-evaluation.json").read_text())
    assert found["metrics"]["success_rate"] == 1.0
    assert found["settings"]["search"]["horizon"] == 3
    assert {path: path.stat().st_mtime_ns for path in find_model("four-rooms").iterdir()} == before
    assert main(["evaluate", "four-rooms", "--episodes", "1", "--search.beam_width", "2", "--out", "own.json"]) == 0
    assert json.loads((tmp_path / "own.json").read_text())["settings"]["search"]["beam_width"] == 2


def test_few_long_episodes_are_played_on_a_cpu(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    save_pretrained(run, models / "swing")
    monkeypatch.setattr(pretrained, "files", lambda package: tmp_path)
    monkeypatch.chdir(tmp_path)
    found = json.loads((models / "swing/evaluation.json").read_text())
    for steps, expected in ((40, 100), (1000, 1)):
        found["metrics"]["steps"] = steps
        (models / "swing/evaluation.json").write_text(json.dumps(found))
        assert default_episodes(models / "swing", torch.device("cpu"))[0] == expected
        assert default_episodes(models / "swing", torch.device("cuda"))[0] == 100
    assert main(["evaluate", "swing", "--env_options", "{max_episode_steps: 4}"]) == 0
    text = capsys.readouterr().out
    assert "playing 1 episode with beam 3 over 1 transition: on a CPU its episodes of about 1,000 steps" in text
    assert json.loads((tmp_path / "swing-evaluation.json").read_text())["metrics"]["return_n"] == 1
    command = json.loads((tmp_path / "swing-evaluation.json").read_text())["command"]
    assert "--search.beam_width 3 --search.horizon 1 " in command and "--search.action.top_k 2" in command
    words = ["--env_options", "{max_episode_steps: 4}", "--search.horizon", "2", "--out", "own.json"]
    assert main(["evaluate", "swing", *words]) == 0
    assert "playing 1 episode: on a CPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "own.json").read_text())["settings"]["search"]["horizon"] == 2
