"""What a run offers, why tabs are missing, and what its data holds."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.tokens.tokenizer import Tokenizer
from trajectory_transformer.viewer.content import load_content
from trajectory_transformer.viewer.histograms import action_limits, episode_order, slot_histogram


def copied(run: Path, folder: Path, *, env: str | None = None, dataset: str | None = None) -> Path:
    """A run folder with another environment and another path of its data."""
    shutil.copytree(run, folder)
    changes: dict[str, dict[str, object]] = {
        "checkpoint.json": {"metadata": {} if env is None else {"env": env}},
        "run.json": {"dataset": dataset},
    }
    for name, change in changes.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


def test_a_whole_run_misses_nothing(rooms_run: Path) -> None:
    content = load_content(rooms_run)
    assert content.missing == {} and content.env == "tt/FourRooms-v0"
    assert content.dataset is not None and len(content.dataset) == 8
    assert content.planner.kind == "goal"


def test_without_an_environment_control_is_missing_and_plans_start_from_recorded_states(
    rooms_run: Path, tmp_path: Path
) -> None:
    run = copied(rooms_run, tmp_path / "run", dataset=str(rooms_run.parent / "rooms.npz"))
    content = load_content(run)
    assert list(content.missing) == ["Control"]
    assert "names no environment" in content.missing["Control"] and content.env is None


def test_without_data_the_tabs_of_episodes_are_missing(rooms_run: Path, tmp_path: Path) -> None:
    run = copied(rooms_run, tmp_path / "run", env="tt/FourRooms-v0", dataset=str(tmp_path / "gone.npz"))
    content = load_content(run)
    assert sorted(content.missing) == ["Attention", "Data", "Forecast"]
    assert "gone.npz" in content.missing["Data"] and "--dataset" in content.missing["Data"]
    save_npz(load_dataset(rooms_run.parent / "rooms.npz"), run / "evaluation.npz")
    assert load_content(run).missing == {}


def test_without_both_no_plan_can_be_made(rooms_run: Path, tmp_path: Path) -> None:
    content = load_content(copied(rooms_run, tmp_path / "run", env="Nowhere-v0"))
    assert sorted(content.missing) == ["Attention", "Control", "Data", "Forecast", "Plan"]
    assert "Nowhere" in content.missing["Plan"]


def test_a_model_with_rewards_cannot_read_episodes_without(pendulum_run: Path, tmp_path: Path) -> None:
    dataset = load_dataset(pendulum_run.parent / "pendulum.npz")
    without = replace(dataset, episodes=tuple(replace(episode, rewards=None) for episode in dataset))
    save_npz(without, tmp_path / "plain.npz")
    content = load_content(pendulum_run, dataset=str(tmp_path / "plain.npz"))
    assert sorted(content.missing) == ["Attention", "Forecast"]
    assert "these episodes have none" in content.missing["Forecast"]


def test_data_of_another_task_is_refused(rooms_run: Path, pendulum_run: Path) -> None:
    with pytest.raises(
        ValueError, match="it has 3 observation and 1 action dimensions, the model was trained on 2 and 2"
    ):
        load_content(rooms_run, dataset=str(pendulum_run.parent / "pendulum.npz"))


def small() -> Dataset:
    states = np.array([[0.0], [1.0], [2.0], [4.0], [4.0]], np.float32)
    actions = np.array([[-1.0], [1.0], [0.5], [0.2]], np.float32)
    rewards = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
    low, high = (Episode(states, actions, rewards * scale, False) for scale in (1.0, 5.0))
    return Dataset((low, high))


def test_histograms_count_values_in_the_bins() -> None:
    config = TokenConfig(num_bins=2, discretizer="uniform")
    dataset = small()
    found = slot_histogram(dataset, Tokenizer.fit(dataset, config), 0)
    assert found.edges.tolist() == [0.0, 2.0, 4.0]
    assert found.counts.tolist() == [4, 6]  # of two episodes: 0 and 1; 2, 4 and 4
    assert found.density.tolist() == [0.2, 0.3]
    assert found.at_limits == pytest.approx(0.6)  # 0, 4 and 4 of five
    reward = slot_histogram(dataset, Tokenizer.fit(dataset, config), 2)
    assert reward.counts.sum() == 8 and reward.edges.tolist() == [0.0, 2.5, 5.0]


def test_a_constant_has_one_bin() -> None:
    episode = Episode(np.full((3, 1), 7.0, np.float32), np.zeros((2, 1), np.float32), None, True)
    dataset = Dataset((episode,))
    found = slot_histogram(dataset, Tokenizer.fit(dataset, TokenConfig(rewards=False)), 0)
    assert found.edges.tolist() == [7.0, 7.0] and found.counts.tolist() == [3]


def test_limits_and_order_of_episodes() -> None:
    assert action_limits(small()).tolist() == [0.5]
    assert episode_order(small()).tolist() == [1, 0]
