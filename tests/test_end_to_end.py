"""All commands in sequence: from nothing to a report, and from bad data to a better controller."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from trajectory_transformer.cli import demo, main
from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, load_npz
from trajectory_transformer.planner import Planner
from trajectory_transformer.runs import train

ROOT = Path(__file__).parent.parent


def test_the_demo_writes_its_checkpoint_result_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--demonstrations", "100", "--steps", "30", "--goals", "3"]
    assert main(["demo", *words]) == 0
    run = tmp_path / "runs/demo"
    expected = {"checkpoint.json", "weights.safetensors", "evaluation.json", "routes.png", "report.html"}
    assert expected <= {path.name for path in run.iterdir()}
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    assert metrics["success_rate_n"] == 3
    page = (run / "report.html").read_text()
    assert "of 3 goals reached" in page
    # Losses, routes, two of forecasts, demonstrations.
    assert page.count("data:image/png;base64,") == 5
    assert "http://" not in page and "https://" not in page  # opens without a network
    assert main(["demo", *words]) == 2  # an existing folder is not overwritten


@pytest.mark.timeout(600)
def test_planning_for_return_beats_imitation_of_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where examples.race is
    data, run = tmp_path / "race.npz", tmp_path / "run"
    policies = "['demonstrator share=0.3', 'examples.race:lured share=0.7']"
    words = ["--env", "tt/FourRoomsRace-v0", "--episodes", "500", "--policy", policies]
    assert main(["collect", *words, "--out", str(data)]) == 0
    tokens = ["--tokens.discretizer", "uniform", "--tokens.num_bins", "32"]
    model = ["--model.window", "2", "--model.num_layers", "2", "--model.width", "48", "--model.dropout", "0"]
    steps = ["--train.steps", "700", "--train.batch_size", "64", "--train.learning_rate", "3e-3"]
    assert main(["train", str(data), "--out", str(run), *tokens, *model, *steps]) == 0
    search = ["--search.beam_width", "12", "--search.horizon", "2", "--search.context", "0"]
    wide = ["--search.expansion", "4", "--search.action.nucleus", "0.8", "--search.observation.top_k", "null"]
    means = {}
    for kind, more in (("return", wide), ("imitate", [])):
        out = tmp_path / f"{kind}.json"
        assert main(["evaluate", str(run), "--plan", kind, "--episodes", "24", "--out", str(out), *search, *more]) == 0
        means[kind] = json.loads(out.read_text())["metrics"]["return"]
    assert means["return"] > means["imitate"] + 5, means
    assert means["return"] > -46.9, "the mean return of such data"


def test_goals_on_new_maps_are_reached(tmp_path: Path) -> None:
    """A wall with one gap, at another place in every episode: a model that ignores the map runs into the wall."""
    data, run, out = tmp_path / "maps.npz", tmp_path / "run", tmp_path / "goals.json"
    env = ["--env", "MiniGrid-SimpleCrossingS9N1-v0", "--env_options", '{"max_steps": 40}']
    policies = ["--policy", '["expert share=0.9", "random"]', "--episodes", "600", "--workers", "1"]
    assert main(["collect", *env, *policies, "--out", str(data)]) == 0
    tokens = ["--tokens.num_bins", "9", "--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false"]
    model = ["--model.window", "2", "--model.num_layers", "2", "--model.width", "64", "--model.map_channels", "8"]
    steps = [
        "--model.dropout",
        "0",
        "--train.steps",
        "300",
        "--train.batch_size",
        "64",
        "--train.learning_rate",
        "3e-3",
    ]
    assert main(["train", str(data), "--out", str(run), *tokens, *model, *steps, "--device", "cpu"]) == 0
    search = ["--search.beam_width", "2", "--search.horizon", "1", "--search.context", "1", "--device", "cpu"]
    assert main(["evaluate", str(run), "--episodes", "100", "--num_envs", "100", "--out", str(out), *search]) == 0
    result = json.loads(out.read_text())
    # 0.99 when this was written, 0.09 with the output of the map encoder multiplied by zero.
    assert result["metrics"]["success_rate"] > 0.85
    assert result["metrics"]["success_rate_low"] > 0.75
    assert result["training"]["metrics"]["steps"] == 300
    for episode in load_npz(out.with_suffix(".npz")):
        cells = episode.observations[:, :2].astype(int)
        assert episode.map is not None
        assert not episode.map[0, cells[:, 1], cells[:, 0]].any(), "the agent never enters a wall"
        assert (np.abs(np.diff(cells, axis=0)).sum(axis=1) <= 1).all()


def test_the_minigrid_demo_writes_its_result_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = demo.TASKS["minigrid"]
    sizes = replace(task.model, width=32, num_heads=2, num_layers=1, map_channels=4)
    small = replace(task, model=sizes, train=replace(task.train, batch_size=8))
    monkeypatch.setitem(demo.TASKS, "minigrid", small)
    assert main(["demo", "--task", "minigrid", "--demonstrations", "20", "--steps", "3", "--goals", "3"]) == 0
    run = tmp_path / "runs/demo"
    page = (run / "report.html").read_text()
    assert "MiniGrid-MultiRoom-N4-S5-v0" in page and "of 3 goals reached" in page
    assert page.count("data:image/png;base64,") >= 3
    assert json.loads((run / "evaluation.json").read_text())["settings"]["env"] == "MiniGrid-MultiRoom-N4-S5-v0"


def runs_and_walks(num_runs: int, num_walks: int, *, recorded: int) -> Dataset:
    """From one start, action 0 runs (reward 1.5, falls after 15 steps), action 1 walks (reward 1, `recorded` steps)."""

    def episode(kind: float, steps: int, reward: float) -> Episode:
        states = np.full((steps + 1, 1), kind, np.float32)
        states[0] = 0.0
        actions = np.full((steps, 1), kind - 1.0, np.float32)
        return Episode(states, actions, np.full(steps, reward, np.float32), terminated=kind == 1.0)

    kinds = num_runs * [(1.0, 15, 1.5)] + num_walks * [(2.0, recorded, 1.0)]
    return Dataset(tuple(episode(*kind) for kind in kinds), {}, (), (Dimension("action", 2),))


def first_action(dataset: Dataset, tokens: TokenConfig, search: SearchConfig) -> float:
    """The first action of a small model that is trained for 200 steps."""
    sizes = ModelConfig(window=2, num_layers=1, width=32, dropout=0.0)
    settings = TrainConfig(steps=200, batch_size=64, learning_rate=1e-2)
    model = train(dataset, tokens=tokens, model=sizes, train=settings, device="cpu")
    return float(np.ravel(Planner(model, search=search).act([0.0]))[0])


@pytest.mark.parametrize(
    ("discount", "truncated", "recorded", "action"),
    [(0.9, "stop", 100, 0.0), (0.98, "stop", 100, 1.0), (0.98, "stop", 20, 0.0), (0.98, "continue", 20, 1.0)],
)
def test_plans_depend_on_the_discount_and_on_returns_after_truncation(
    discount: float, truncated: Literal["stop", "continue"], recorded: int, action: float
) -> None:
    tokens = TokenConfig(num_bins=20, discount=discount, truncated=truncated)
    search = SearchConfig(beam_width=8, horizon=2, context=0, action=Sampler())
    assert first_action(runs_and_walks(20, 20, recorded=recorded), tokens, search) == action


@pytest.mark.parametrize(("nucleus", "action"), [(None, 0.0), (0.5, 0.0), (1.0, 1.0)])
def test_a_wide_first_action_finds_rare_but_better_behaviour(nucleus: float | None, action: float) -> None:
    tokens = TokenConfig(num_bins=20, discount=0.98)
    first = None if nucleus is None else Sampler(nucleus=nucleus)
    search = SearchConfig(beam_width=32, horizon=2, context=1, action=Sampler(nucleus=0.4), first_action=first)
    assert first_action(runs_and_walks(40, 8, recorded=100), tokens, search) == action


def clipped_actions(*, rewarded: bool = False) -> Dataset:
    """Actions of mean 0.7 and standard deviation 0.5, clipped at 1: three in ten are at the limit, the fullest bin."""
    rng = np.random.default_rng(0)
    actions = np.clip(rng.normal(0.7, 0.5, (300, 4, 1)), -1.0, 1.0).astype(np.float32)
    rewards = np.ones(4, np.float32) if rewarded else None
    return Dataset(tuple(Episode(np.zeros((5, 1), np.float32), each, rewards, terminated=False) for each in actions))


def test_the_median_imitates_the_intended_action_despite_clipping() -> None:
    tokens = TokenConfig(num_bins=20, rewards=False)
    mode, median = (
        first_action(clipped_actions(), tokens, search)
        for search in (SearchConfig(beam_width=4, horizon=2), SearchConfig(imitate="median"))
    )
    assert mode == 1.0
    assert median == pytest.approx(0.7, abs=0.1)


def test_sampling_the_middle_plans_the_intended_action_despite_clipping() -> None:
    likely, middle = (
        first_action(clipped_actions(rewarded=True), TokenConfig(num_bins=20), search)
        for search in (
            SearchConfig(beam_width=4, action=Sampler(nucleus=0.2), first_action=None),
            SearchConfig(beam_width=4, action=Sampler(middle=0.2), first_action=None),
        )
    )
    assert likely == 1.0
    assert middle == pytest.approx(0.7, abs=0.2)
