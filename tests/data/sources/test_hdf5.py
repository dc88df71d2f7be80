"""D4RL files: ends of episodes, final states, goals, and errors that name the file."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.data.sources import Columns, load_dataset, save_dataset


def write(path: Path, **changed: Any) -> str:
    """Six steps: a terminated episode of 3, a truncated one of 2, and a single step of an incomplete one."""
    arrays: dict[str, Any] = {
        "observations": np.arange(12.0).reshape(6, 2),
        "actions": np.arange(6.0)[:, None] / 10,
        "rewards": np.arange(6.0),
        "terminals": np.array([0, 0, 1, 0, 0, 0], dtype=np.bool_),
        "timeouts": np.array([0, 0, 0, 0, 1, 0], dtype=np.bool_),
    }
    arrays |= changed
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if values is not None:
                file[name] = values
    return str(path)


def test_final_states_come_from_next_observations(tmp_path: Path) -> None:
    following = np.arange(12.0).reshape(6, 2) + 100
    dataset = load_dataset(write(tmp_path / "x.hdf5", next_observations=following))
    assert [len(episode) for episode in dataset] == [3, 2, 1]
    assert [episode.terminated for episode in dataset] == [True, False, False]
    np.testing.assert_array_equal(dataset.episodes[0].observations, [[0, 1], [2, 3], [4, 5], [104, 105]])
    np.testing.assert_array_equal(dataset.episodes[2].observations, [[10, 11], [110, 111]])
    assert dataset.metadata == {"episodes_found_by": "the arrays terminals and timeouts"}


def test_without_final_states_terminated_episodes_repeat_a_state_and_truncated_ones_lose_an_action(
    tmp_path: Path,
) -> None:
    dataset = load_dataset(write(tmp_path / "x.hdf5"))
    assert [len(episode) for episode in dataset] == [3, 1]  # the single step has no following state
    terminated, truncated = dataset.episodes
    np.testing.assert_array_equal(terminated.observations, [[0, 1], [2, 3], [4, 5], [4, 5]])
    np.testing.assert_array_equal(terminated.rewards, [0, 1, 2])
    np.testing.assert_array_equal(truncated.observations, [[6, 7], [8, 9]])
    np.testing.assert_array_equal(truncated.rewards, [3])
    assert dataset.metadata == {
        "episodes_found_by": "the arrays terminals and timeouts",
        "final_states_repeated": 1,
        "last_actions_dropped": 2,
        "episodes_without_actions_dropped": 1,
    }


def test_a_step_limit_replaces_missing_timeouts(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", timeouts=None)
    dataset = load_dataset(path, Columns(max_episode_steps=2))
    # Rows 1-2, 3 (terminal), 4-5, 6: a terminal starts the count again.
    assert [episode.terminated for episode in dataset] == [False, True, False]
    np.testing.assert_array_equal(dataset.episodes[1].observations, [[4, 5], [4, 5]])
    np.testing.assert_array_equal(dataset.episodes[2].observations, [[6, 7], [8, 9]])
    assert dataset.metadata["episodes_found_by"] == "the array terminals, at most 2 steps each"


def test_names_of_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.hdf5: describes its episodes itself, so it takes no names of columns"):
        load_dataset(write(tmp_path / "x.hdf5"), Columns(reward="r"))


def test_a_vector_of_integers_is_a_discrete_action(tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "x.h5", actions=np.array([0, 3, 1, 0, 2, 1]), rewards=None))
    assert dataset.action_dimensions == (Dimension("action 0", 4),)
    assert not dataset.has_rewards
    np.testing.assert_array_equal(dataset.episodes[0].actions, [[0], [3], [1]])


def test_goals_are_loaded(tmp_path: Path) -> None:
    goals = np.repeat([[1.0, 2.0], [3.0, 4.0]], [3, 3], axis=0)
    path = write(tmp_path / "x.hdf5", **{"infos/goal": goals})
    first, second = load_dataset(path).episodes
    assert first.goal is not None and second.goal is not None
    assert (first.goal.tolist(), second.goal.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"terminals": None}, r"x\.hdf5: a D4RL file needs the array 'terminals', got \['actions'"),
        ({"timeouts": None}, r"x\.hdf5: the array 'timeouts' is missing, .* for example --max_episode_steps 1000"),
        ({"rewards": np.zeros(5)}, r"x\.hdf5: rewards must have 6 rows, one per observation, got 5"),
        (
            {"actions": np.array([[1.0], [2], [np.nan], [4], [np.inf], [6]])},
            r"row 3: actions must be a finite .* 2 of 6",
        ),
        (
            {"observations": np.zeros((6, 2, 2))},
            r"observations must have 2 axes, got shape \(6, 2, 2\); images are not",
        ),
        ({"rewards": np.array([b"a"] * 6)}, r"rewards must hold numbers, got"),
    ],
)
def test_invalid_files_are_errors_that_name_the_file(tmp_path: Path, changed: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        load_dataset(write(tmp_path / "x.hdf5", **changed))


def test_truncated_files_are_errors_that_name_the_file(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "x.hdf5"))
    content = path.read_bytes()
    for share in (0.0, 0.3, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"x\.hdf5: not a complete HDF5 file; it may be truncated"):
            load_dataset(str(path))


def test_a_damaged_heap_of_texts_is_refused_instead_of_searched_forever(tmp_path: Path, tiny_dataset: Dataset) -> None:
    path = tmp_path / "x.hdf5"
    save_dataset(tiny_dataset, path)
    whole = path.read_bytes()
    heap = whole.index(b"GCOL")
    size = int.from_bytes(whole[heap + 24 : heap + 32], "little")  # of the first text
    rest = heap + 32 + -(-size // 8) * 8
    for place, value in ((rest + 8, bytes(8)), (heap + 24, b"\xff" * 8), (heap + 8, b"\xff" * 8)):
        path.write_bytes(whole[:place] + value + whole[place + 8 :])
        with pytest.raises(ValueError, match=r"x\.hdf5: not a complete HDF5 file: its heap of texts is damaged"):
            load_dataset(path)


def test_a_name_that_is_no_text_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "x.hdf5"))
    path.write_bytes(path.read_bytes().replace(b"rewards", b"rew\xfbrds"))
    with pytest.raises(ValueError, match=r"x\.hdf5: not a complete HDF5 file; it may be truncated"):
        load_dataset(path)
