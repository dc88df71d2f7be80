"""Minari datasets: all kinds of spaces, datasets without an environment, unknown ids."""

import time
import warnings
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer

from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.data.sources import load_dataset, save_dataset
from trajectory_transformer.data.sources import minari as source


@pytest.fixture(autouse=True)
def own_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty folder of Minari datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def store(dataset_id: str, observations: Any, actions: Any, observation_space: Any, action_space: Any) -> None:
    """Store one episode of two steps with Minari itself."""
    buffer = EpisodeBuffer(
        id=0,
        observations=observations,
        actions=actions,
        rewards=[0.5, 1.5],
        terminations=[False, True],
        truncations=[False, False],
        infos={"success": np.array([0, 0, 1])},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers(
            dataset_id, [buffer], observation_space=observation_space, action_space=action_space
        )


def test_dictionaries_are_flattened_by_key_and_desired_goal_is_the_goal() -> None:
    box = spaces.Box(-9, 9, (2,), np.float64)
    space = spaces.Dict(
        {"observation": spaces.Box(-9, 9, (1,)), "desired_goal": box, "achieved_goal": box, "arm": spaces.Discrete(3)}
    )
    observations = {
        "observation": np.array([[1.0], [2.0], [3.0]]),
        "desired_goal": np.array([[7.0, 8.0]] * 3),
        "achieved_goal": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
        "arm": np.array([0, 1, 2]),
    }
    store("maze/small-v0", observations, np.array([[0.0], [1.0]]), space, spaces.Box(-1, 1, (1,)))
    dataset = load_dataset("maze/small-v0")
    (episode,) = dataset.episodes
    names = [dimension.name for dimension in dataset.observation_dimensions]
    assert names == ["achieved_goal[0]", "achieved_goal[1]", "arm", "observation 0"]
    np.testing.assert_allclose(episode.observations[1], [0.3, 0.4, 1, 2], rtol=1e-6)
    assert episode.goal is not None and episode.goal.tolist() == [7, 8]
    assert episode.terminated and episode.outcome == {"success": 1.0}
    assert dataset.metadata == {"minari": "maze/small-v0"}


def test_discrete_actions_are_counted_from_the_start_of_their_space() -> None:
    box = spaces.Box(-9, 9, (1,))
    store("other/one-v0", np.zeros((3, 1)), np.array([5, 7]), box, spaces.Discrete(3, start=5))
    store("other/two-v0", np.zeros((3, 1)), np.array([[1, 2], [0, 0]]), box, spaces.MultiDiscrete([2, 3]))
    one, two = load_dataset("other/one-v0"), load_dataset("other/two-v0")
    assert [[d.categories for d in each.action_dimensions] for each in (one, two)] == [[3], [2, 3]]
    np.testing.assert_array_equal(one.episodes[0].actions, [[0], [2]])
    np.testing.assert_array_equal(two.episodes[0].actions, [[1, 2], [0, 0]])


@pytest.mark.parametrize("categories", [(), (4, 2)])
@pytest.mark.parametrize("rewards", [True, False])
def test_saved_datasets_load_unchanged(rng: np.random.Generator, categories: tuple[int, ...], rewards: bool) -> None:
    episodes = [
        Episode(
            observations=rng.normal(size=(steps + 1, 3)).astype(np.float32),
            actions=rng.integers(0, 2, (steps, 2)).astype(np.float32),
            rewards=rng.normal(size=steps).astype(np.float32) if rewards else None,
            terminated=steps == 2,
            goal=np.array([steps], dtype=np.float32),
            outcome={"success": float(steps)},
        )
        for steps in (2, 4)
    ]
    observed, acted = map(Dimension, ("a", "b", "c")), map(Dimension, ("d", "e"), categories)
    dataset = Dataset(tuple(episodes), {"seed": 3, "policy": "mine"}, tuple(observed), tuple(acted))
    save_dataset(dataset, "mine/test-v0")
    loaded = load_dataset("mine/test-v0")
    assert loaded.metadata == {"minari": "mine/test-v0", "seed": 3, "policy": "mine"}
    assert loaded.action_dimensions == dataset.action_dimensions
    assert loaded.observation_dimensions == dataset.observation_dimensions
    for a, b in zip(loaded, dataset, strict=True):
        for name in ("observations", "actions", "rewards", "goal"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert (a.terminated, a.outcome) == (b.terminated, b.outcome)
    with pytest.raises(ValueError, match=r"mine/test-v0: cannot be written \(.*already exists"):
        save_dataset(dataset, "mine/test-v0")


def test_the_environment_and_reference_scores_are_stored(tiny_dataset: Dataset) -> None:
    pendulum = Dataset(
        tuple(Episode(e.observations, e.actions[:, :1], e.rewards, e.terminated) for e in tiny_dataset),
        {"env": "Pendulum-v1"},
    )
    save_dataset(pendulum, "tests/pendulum-v0")
    stored = minari.load_dataset("tests/pendulum-v0")
    assert stored.env_spec is not None and stored.env_spec.id == "Pendulum-v1"
    assert isinstance(stored.action_space, spaces.Box) and stored.action_space.high.tolist() == [2.0]
    assert load_dataset("tests/pendulum-v0").metadata["env"] == "Pendulum-v1"


def test_an_unknown_id_without_network_fails_quickly(monkeypatch: pytest.MonkeyPatch, tiny_dataset: Dataset) -> None:
    save_dataset(tiny_dataset, "mine/here-v0")
    monkeypatch.setattr(source, "_unreachable", lambda endpoint: "no network")
    started = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"mine/there-v0: not among the local datasets \(mine/here-v0\), .*\(no network\)"
    ):
        load_dataset("mine/there-v0")
    assert time.perf_counter() - started < 5


def test_an_unreachable_server_is_detected_within_seconds() -> None:
    started = time.perf_counter()
    assert source._unreachable("http://127.0.0.1:9/") is not None
    assert time.perf_counter() - started < 5


def test_episodes_that_do_not_fit_their_space_are_errors_with_their_number() -> None:
    box = spaces.Box(-9, 9, (2,))
    store("other/mixed-v0", np.zeros((3, 2)), np.zeros((2, 1)), box, spaces.Box(-1, 1, (1,)))
    wide = EpisodeBuffer(
        id=1, observations=np.zeros((2, 3)), actions=np.zeros((1, 1)), rewards=[0], terminations=[0], truncations=[1]
    )
    minari.load_dataset("other/mixed-v0").update_dataset_from_buffer([wide])
    with pytest.raises(
        ValueError, match=r"other/mixed-v0, episode 1: .* 2 entries in each of 2 rows, got shape \(2, 3\)"
    ):
        load_dataset("other/mixed-v0")


def test_a_name_that_is_no_text_is_an_error_that_names_the_file(tmp_path: Path, tiny_dataset: Dataset) -> None:
    save_dataset(tiny_dataset, "own/bytes-v0")
    (path,) = tmp_path.rglob("main_data.hdf5")
    path.write_bytes(path.read_bytes().replace(b"rewards", b"rew\xfbrds"))
    with pytest.raises(ValueError, match=r"own/bytes-v0: main_data\.hdf5 cannot be read \('utf-8' codec"):
        load_dataset("own/bytes-v0")


def test_names_that_are_neither_file_nor_id_nor_task_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"hopper: not a dataset; expected a file .* a Minari id .* or a benchmark task"
    ):
        load_dataset("hopper")


def test_tasks_load_the_collected_dataset_or_else_the_public_ones(
    tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dataset(tiny_dataset, "mujoco/hopper/medium-v0")
    save_dataset(Dataset(tiny_dataset.episodes[:2]), "mujoco/hopper/expert-v0")
    both = load_dataset("hopper-medium-expert")
    assert len(both) == 8
    assert both.metadata["minari"] == "mujoco/hopper/medium-v0 + mujoco/hopper/expert-v0"
    save_dataset(Dataset(tiny_dataset.episodes[:3]), "tt/hopper-medium-v0")
    assert len(load_dataset("hopper-medium")) == 3
    monkeypatch.setattr(source, "_unreachable", lambda endpoint: "no network")
    with pytest.raises(ValueError, match=r"walker2d-medium: not collected yet \(run: tt collect --recipe .*no network"):
        load_dataset("walker2d-medium")
    with pytest.raises(ValueError, match=r"hopper-medium-replay: not collected yet .* Minari has no public dataset"):
        load_dataset("hopper-medium-replay")
