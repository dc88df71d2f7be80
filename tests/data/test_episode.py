"""Episodes and datasets: checks and their errors, returns-to-go, `.npz` files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory_transformer.data.episode import FORMAT, Dataset, Dimension, Episode, load_npz, returns_to_go, save_npz

Arrays = dict[str, npt.NDArray[Any]]


def episode(
    steps: int = 3, *, observation_dim: int = 2, action_dim: int = 1, rewards: bool = True, goal_dim: int | None = None
) -> Episode:
    """An episode whose arrays hold distinct numbers."""
    return Episode(
        observations=np.arange((steps + 1) * observation_dim, dtype=np.float32).reshape(steps + 1, observation_dim),
        actions=-np.arange(steps * action_dim, dtype=np.float32).reshape(steps, action_dim),
        rewards=0.5 * np.arange(steps, dtype=np.float32) if rewards else None,
        terminated=steps % 2 == 1,
        goal=None if goal_dim is None else np.arange(goal_dim, dtype=np.float32) + steps,
    )


def test_episodes_know_their_length_and_return() -> None:
    assert len(episode(4)) == 4
    assert episode(4).total_reward == 0.0 + 0.5 + 1.0 + 1.5
    assert episode(4, rewards=False).total_reward == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"observations": np.zeros((3, 2), np.float32)},
            r"an episode of 3 actions needs 4 observations \(the final state included\), got 3",
        ),
        ({"observations": np.zeros((5, 2), np.float32)}, "of 3 actions needs 4 observations .*, got 5"),
        ({"actions": np.zeros((0, 1), np.float32)}, "an episode needs at least one action, got none"),
        (
            {"observations": np.zeros(4, np.float32)},
            r"needs observations \[T \+ 1, O\] and actions \[T, A\], got shapes \(4,\) and \(3, 1\)",
        ),
        ({"actions": np.zeros(3, np.float32)}, r"got shapes \(4, 2\) and \(3,\)"),
        ({"rewards": np.zeros(4, np.float32)}, r"of 3 actions needs rewards of shape \(3,\), got \(4,\)"),
        ({"rewards": np.zeros((3, 1), np.float32)}, r"needs rewards of shape \(3,\), got \(3, 1\)"),
        (
            {"observations": np.array([[0, 0], [0, 0], [0, np.nan], [0, 0]], np.float32)},
            r"observations must be finite, got nan at \[2, 1\]",
        ),
        ({"actions": np.array([[0], [np.inf], [0]], np.float32)}, r"actions must be finite, got inf at \[1, 0\]"),
        ({"rewards": np.array([0, 0, -np.inf], np.float32)}, r"rewards must be finite, got -inf at \[2\]"),
        ({"goal": np.array([np.nan, 0], np.float32)}, r"goal must be finite, got nan at \[0\]"),
    ],
)
def test_invalid_arrays_are_refused_by_an_episode(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(episode(), **change)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (episode(observation_dim=3), "got 3 observation and 1 action dimensions, rewards and no goal"),
        (episode(action_dim=2), "got 2 observation and 2 action dimensions"),
        (episode(rewards=False), "got 2 observation and 1 action dimensions, no rewards"),
        (episode(goal_dim=2), "got .* rewards and a goal of 2 dimensions"),
    ],
)
def test_episodes_of_a_dataset_must_have_the_same_structure(other: Episode, message: str) -> None:
    expected = "2 observation and 1 action dimensions, rewards and no goal"
    with pytest.raises(
        ValueError, match=f"episode 2: every episode must have {expected}, as episode 0 does, {message}"
    ):
        Dataset((episode(3), episode(5), other))


def test_empty_datasets_are_refused() -> None:
    with pytest.raises(ValueError, match="a dataset needs at least one episode, got none"):
        Dataset(())


def test_datasets_know_their_sizes() -> None:
    dataset = Dataset((episode(3), episode(5)))
    assert (len(dataset), dataset.num_steps, dataset.observation_dim, dataset.action_dim) == (2, 8, 2, 1)
    assert dataset.has_rewards and not Dataset((episode(rewards=False),)).has_rewards
    assert [len(each) for each in dataset] == [3, 5]


def test_returns_to_go_exclude_the_reward_of_their_own_step() -> None:
    rewards = np.array([1.0, 2.0, 4.0], dtype=np.float32)
    np.testing.assert_array_equal(returns_to_go(rewards, 0.5), [4.0, 4.0, 0.0])


def test_returns_to_go_can_include_the_reward_of_their_own_step() -> None:
    rewards = np.array([1.0, 2.0, 4.0], dtype=np.float32)
    np.testing.assert_array_equal(returns_to_go(rewards, 0.5, include_own=True), [3.0, 4.0, 4.0])


@given(
    rewards=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12), discount=st.sampled_from([0.0, 0.9, 1.0])
)
def test_returns_to_go_equal_their_definition(rewards: list[float], discount: float) -> None:
    steps = len(rewards)
    later = [sum(discount ** (k - t - 1) * rewards[k] for k in range(t + 1, steps)) for t in range(steps)]
    own = [sum(discount ** (k - t) * rewards[k] for k in range(t, steps)) for t in range(steps)]
    found = np.array(rewards, dtype=np.float32)
    np.testing.assert_allclose(returns_to_go(found, discount), later, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(returns_to_go(found, discount, include_own=True), own, rtol=1e-12, atol=1e-9)


def assert_equal(found: Dataset, expected: Dataset) -> None:
    """Compare datasets value by value."""
    assert dict(found.metadata) == dict(expected.metadata)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in ("observations", "actions", "rewards", "goal"):
            left, right = getattr(a, name), getattr(b, name)
            assert (left is None) == (right is None), name
            if left is not None:
                assert left.dtype == np.float32
                np.testing.assert_array_equal(left, right)
        assert (a.terminated, dict(a.outcome)) == (b.terminated, dict(b.outcome))


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("goal_dim", [None, 2])
def test_saved_datasets_load_unchanged(tmp_path: Path, rewards: bool, goal_dim: int | None) -> None:
    episodes = tuple(
        replace(episode(steps, rewards=rewards, goal_dim=goal_dim), outcome={"success": steps / 4, "n": 1})
        for steps in (3, 1, 4)
    )
    dataset = Dataset(episodes, {"env_id": "a/b-v0", "seed": 3, "noise": 0.25, "expert": True, "url": None})
    save_npz(dataset, tmp_path / "data.npz")
    assert_equal(load_npz(tmp_path / "data.npz"), dataset)
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]  # no temporary file remains


def test_paths_may_be_strings(tmp_path: Path) -> None:
    save_npz(Dataset((episode(3),)), str(tmp_path / "new" / "data.npz"))
    assert len(load_npz(str(tmp_path / "new" / "data.npz"))) == 1


def test_outcomes_and_metadata_are_optional_in_a_file(tmp_path: Path) -> None:
    write_changed(tmp_path / "data.npz", lambda arrays: [arrays.pop(name) for name in ("outcomes", "metadata")])
    found = load_npz(tmp_path / "data.npz")
    assert found.metadata == {} and [each.outcome for each in found] == [{}, {}]


def write_changed(path: Path, change: Callable[[Arrays], object]) -> None:
    """Write a file of two episodes with goals, of 3 and 4 steps, after a change to its arrays."""
    save_npz(Dataset((episode(3, goal_dim=2), episode(4, goal_dim=2))), path)
    with np.load(path) as file:
        arrays: Arrays = {name: file[name] for name in file.files}
    change(arrays)
    with path.open("wb") as out:
        np.savez_compressed(out, allow_pickle=True, **arrays)


def not_finite(arrays: Arrays) -> None:
    """Write a NaN into the second episode."""
    arrays["observations"] = arrays["observations"].copy()
    arrays["observations"][6, 1] = np.nan


def too_large(arrays: Arrays) -> None:
    """Write a number that is too large for float32 into the second episode."""
    arrays["actions"] = arrays["actions"].astype(np.float64)
    arrays["actions"][4, 0] = 1e300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda arrays: arrays.update(format=np.array(FORMAT + 1)),
            f"format {FORMAT + 1} is not supported, expected at most {FORMAT}",
        ),
        (lambda arrays: arrays.pop("actions"), "needs the array 'actions', got"),
        (lambda arrays: arrays.pop("format"), "needs the array 'format', got"),
        (
            lambda arrays: arrays.update(observations=arrays["observations"][:7]),  # as many as actions
            "2 episodes of 7 actions in total need 9 rows of observations .*, got 7",
        ),
        (lambda arrays: arrays.update(actions=arrays["actions"][1:]), "need 7 rows of actions .*, got 6"),
        (lambda arrays: arrays.update(lengths=np.array([7, 0])), "episode 1: an episode needs at least one action"),
        (lambda arrays: arrays.update(rewards=arrays["rewards"][:-1]), "rewards"),
        (not_finite, r"episode 1: observations must be finite, got nan at \[2, 1\]"),
        (lambda arrays: arrays.update(metadata=np.array({"a": 1}, dtype=object)), "not a readable .npz dataset"),
        # Errors without a specific message; each must still name the file.
        (too_large, "episode 1: actions must be finite"),
        (lambda arrays: arrays.update(rewards=np.zeros(8, np.float32)), ""),
        (lambda arrays: arrays.update(terminated=np.array([True])), ""),
        (lambda arrays: arrays.update(terminated=np.array([True, False, True])), ""),
        (lambda arrays: arrays.update(goals=np.zeros((1, 2), np.float32)), ""),
        (lambda arrays: arrays.update(outcomes=np.array("[{}]")), ""),
        (lambda arrays: arrays.update(outcomes=np.array("{nonsense")), ""),
        (lambda arrays: arrays.update(metadata=np.array("{nonsense")), ""),
        (lambda arrays: arrays.update(format=np.array("one")), ""),
        (lambda arrays: arrays.update(format=np.array([1, 1])), ""),
        (lambda arrays: arrays.update(lengths=np.array([3.0, 4.0])), ""),
        (lambda arrays: arrays.update(actions=np.array(0.0)), ""),
        (
            lambda arrays: arrays.update(
                lengths=np.zeros(0, np.int64), actions=arrays["actions"][:0], observations=arrays["observations"][:0]
            ),
            "at least one episode",
        ),
    ],
    ids=[
        "newer-format",
        "no-actions",
        "no-format",
        "no-final-states",
        "missing-action",
        "empty-episode",
        "missing-reward",
        "nan",
        "pickle",
        "too-large-for-float32",
        "surplus-reward",
        "missing-terminated",
        "surplus-terminated",
        "missing-goal",
        "missing-outcome",
        "outcomes-not-json",
        "metadata-not-json",
        "format-not-a-number",
        "format-not-a-scalar",
        "lengths-not-integers",
        "actions-not-an-array",
        "no-episodes",
    ],
)
def test_invalid_files_are_errors_that_name_the_file(
    tmp_path: Path, change: Callable[[Arrays], object], message: str
) -> None:
    path = tmp_path / "faulty.npz"
    write_changed(path, change)
    with pytest.raises(ValueError, match=r"faulty\.npz(: |, ).*" + message):
        load_npz(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.npz: not a readable"):
        load_npz(tmp_path / "absent.npz")


def test_truncated_files_are_errors_that_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.npz"
    save_npz(Dataset((episode(3), episode(4))), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.npz: not a readable \.npz dataset"):
            load_npz(path)


def test_files_with_damaged_bytes_raise_an_error_or_load_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    dataset = Dataset((episode(3), episode(4)), {"env_id": "a"})
    save_npz(dataset, path)
    whole = path.read_bytes()
    # The directory at the end of the archive has no checksum: damage there can hide an optional array, not change one.
    directory = whole.index(b"PK\x01\x02")
    for place in range(0, len(whole), 3):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            try:
                found = load_npz(path)
            except ValueError as error:
                assert "damaged.npz" in str(error), f"byte {place}: {error}"
            else:
                if place < directory:
                    assert_equal(found, dataset)


def test_an_npy_file_is_not_a_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"array\.npy: "):
        load_npz(tmp_path / "array.npy")


def test_files_contain_plain_arrays_and_json(tmp_path: Path) -> None:
    save_npz(Dataset((episode(3), episode(4)), {"seed": 1}), tmp_path / "data.npz")
    with np.load(tmp_path / "data.npz", allow_pickle=False) as file:
        assert file["format"] == FORMAT
        np.testing.assert_array_equal(file["lengths"], [3, 4])
        assert file["observations"].shape == (9, 2) and file["actions"].shape == (7, 1)
        assert json.loads(str(file["metadata"])) == {"seed": 1}
        assert "goals" not in file.files


def test_maps_are_saved_and_loaded_with_their_dtype(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.uint8).reshape(2, 1, 4, 3)
    for maps in (numbers, numbers.astype(np.float32) / 7):
        episodes = tuple(replace(episode(), map=each) for each in maps)
        path = tmp_path / f"{maps.dtype}.npz"
        save_npz(Dataset(episodes, {}, (Dimension("x"), Dimension("cell", 8))), path)
        loaded = load_npz(path)
        assert loaded.map_shape == (1, 4, 3)
        assert loaded.observation_dimensions == (Dimension("x"), Dimension("cell", 8))
        for each, expected in zip(loaded, maps, strict=True):
            assert each.map is not None and each.map.dtype == maps.dtype
            np.testing.assert_array_equal(each.map, expected)


def test_maps_stored_under_their_old_key_contexts_are_loaded(tmp_path: Path) -> None:
    map = np.arange(12, dtype=np.uint8).reshape(1, 4, 3)
    save_npz(Dataset((replace(episode(), map=map),)), tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as file:
        arrays = {"contexts" if name == "maps" else name: file[name] for name in file.files}
    assert "contexts" in arrays
    np.savez(tmp_path / "old.npz", **arrays)
    np.testing.assert_array_equal(load_npz(tmp_path / "old.npz").episodes[0].map, map)


def test_names_and_categories_in_a_file_must_have_the_same_length(tmp_path: Path) -> None:
    save_npz(Dataset((episode(),)), tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(tmp_path / "bad.npz", **{**arrays, "observation_categories": np.array([0, 0, 3])})
    rule = r"bad\.npz, observation_names and observation_categories must have the same length, got 2 and 3"
    with pytest.raises(ValueError, match=rule):
        load_npz(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("map", "message"),
    [
        (np.zeros((3, 4), np.uint8), r"\[channels, height, width\], got uint8 of shape \(3, 4\)"),
        (np.zeros((1, 3, 4), np.int64), r"a map must be a uint8 or float32 array .*, got int64 of shape"),
        (np.full((1, 1, 2), np.nan, np.float32), r"map must be finite, got nan at \[0, 0, 0\]"),
    ],
)
def test_maps_of_other_shapes_or_types_are_refused(map: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(episode(), map=map)


def test_maps_of_a_dataset_must_have_the_same_shape() -> None:
    with_map = replace(episode(), map=np.zeros((1, 2, 2), np.uint8))
    with pytest.raises(ValueError, match=r"episode 1: every episode must have .*a map of shape \(1, 2, 2\)"):
        Dataset((with_map, episode()))


def test_values_of_discrete_observations_must_be_categories() -> None:
    with pytest.raises(ValueError, match="episode 0: cell must be an integer from 0 to 4, got 5"):
        Dataset((episode(),), {}, (Dimension("x"), Dimension("cell", 5)))


def test_an_array_whose_name_was_damaged_is_not_taken_for_a_missing_one(tmp_path: Path, tiny_dataset: Dataset) -> None:
    path = tmp_path / "x.npz"
    save_npz(tiny_dataset, path)
    whole = path.read_bytes()
    for place in (whole.index(b"rewards.npy"), whole.rindex(b"rewards.npy")):
        path.write_bytes(whole[:place] + b"t" + whole[place + 1 :])  # in the header of the array, or in the directory
        with pytest.raises(ValueError, match=r"x\.npz: not a readable \.npz dataset .*tewards"):
            load_npz(path)
