"""CSV and Parquet logs: episodes from rows, guessed columns, and errors that name the row."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.data.sources import Columns, load_dataset, save_dataset
from trajectory_transformer.data.sources.columns import guess_columns, read_columns

# Two runs with interleaved, unsorted rows; run "b" ends with a row without action.
LOG = """run,t,speed,angle,torque,reward,done
a,0,1.0,10,0.1,1,false
b,0,2.0,20,0.2,2,0
a,2,1.2,12,0.3,3,True
b,2,2.2,22,,,
a,1,1.1,11,0.4,4,false
b,1,2.1,21,0.5,5,0
"""
COLUMNS = Columns(
    episode="run", order="t", observations=("speed", "angle"), actions=("torque",), reward="reward", terminal="done"
)


def log(folder: Path, text: str = LOG) -> str:
    path = folder / "log.csv"
    path.write_text(text)
    return str(path)


def test_rows_are_grouped_and_sorted_and_a_row_without_action_is_the_final_state(tmp_path: Path) -> None:
    dataset = load_dataset(log(tmp_path), COLUMNS)
    assert dataset.observation_dimensions == (Dimension("speed"), Dimension("angle"))
    first, second = dataset.episodes
    # Run "a" terminated and its final state was not recorded: the last state is repeated.
    np.testing.assert_allclose(first.observations[:, 0], [1.0, 1.1, 1.2, 1.2])
    np.testing.assert_allclose(first.actions[:, 0], [0.1, 0.4, 0.3])
    assert first.terminated
    np.testing.assert_allclose(second.observations[:, 1], [20, 21, 22])
    np.testing.assert_allclose(second.actions[:, 0], [0.2, 0.5])
    np.testing.assert_allclose(second.rewards if second.rewards is not None else [], [2, 5])
    assert not second.terminated


def test_truncated_episodes_without_final_state_lose_their_last_action(tmp_path: Path) -> None:
    columns = Columns(observations=("x",), actions=("u",))
    dataset = load_dataset(log(tmp_path, "x,u\n1,5\n2,6\n3,7\n"), columns)
    (episode,) = dataset.episodes
    np.testing.assert_array_equal(episode.observations[:, 0], [1, 2, 3])
    np.testing.assert_array_equal(episode.actions[:, 0], [5, 6])
    assert episode.rewards is None
    found_by = "nothing: all rows are one episode"
    assert dataset.metadata == {"episodes_found_by": found_by, "last_actions_dropped": 1}


def test_the_yaml_file_next_to_a_table_is_used(tmp_path: Path) -> None:
    path = log(tmp_path)
    Path(path + ".columns.yaml").write_text(COLUMNS.to_yaml())
    assert read_columns(Path(path + ".columns.yaml")) == COLUMNS
    assert len(load_dataset(path)) == 2


def test_a_table_without_columns_is_an_error_with_a_guess_to_save(tmp_path: Path) -> None:
    path = log(tmp_path, "run,t,speed,action,reward\n0,0,0.5,2,1\n0,1,0.6,0,1\n")
    with pytest.raises(ValueError, match=r"log\.csv: the roles of its columns are not known") as caught:
        load_dataset(path)
    text = str(caught.value)
    Path(path + ".columns.yaml").write_text(text.partition("\n\n")[2])
    dataset = load_dataset(path)
    assert [d.categories for d in dataset.action_dimensions] == [3]
    np.testing.assert_array_equal(dataset.episodes[0].actions, [[2]])


def test_columns_are_guessed_from_common_names() -> None:
    guess = guess_columns(["episode_id", "timestep", "obs_0", "obs.1", "act[0]", "Reward", "terminated", "battery"])
    assert guess == Columns(
        episode="episode_id",
        order="timestep",
        observations=("obs_0", "obs.1"),
        actions=("act[0]",),
        reward="Reward",
        terminal="terminated",
    )
    assert guess_columns(["speed", "angle"]) is None


def test_given_columns_override_the_stored_ones(tmp_path: Path, tiny_dataset: Dataset) -> None:
    path = str(tmp_path / "x.parquet")
    save_dataset(tiny_dataset, path)
    columns = Columns(episode="episode", observations=("observation_1",), actions=("action_0",))
    chosen = load_dataset(path, columns)
    assert chosen.observation_dimensions == (Dimension("observation_1"),)
    np.testing.assert_array_equal(chosen.episodes[1].observations, tiny_dataset.episodes[1].observations[:, 1:2])


def test_lists_in_parquet_are_several_dimensions(tmp_path: Path) -> None:
    table = {"state": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "a": [[0], [1], None], "episode": ["x", "x", "x"]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
    columns = Columns(episode="episode", observations=("state",), actions=("a",))
    dataset = load_dataset(str(tmp_path / "log.parquet"), columns)
    assert dataset.observation_dimensions == (Dimension("state[0]"), Dimension("state[1]"))
    np.testing.assert_array_equal(dataset.episodes[0].observations, table["state"])
    np.testing.assert_array_equal(dataset.episodes[0].actions, [[0], [1]])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("1.1,11", "fast,11"), r"log\.csv, row 5: column 'speed' must hold numbers, got 'fast'"),
        (
            ("1.1,11", ",11"),
            r"log\.csv, row 5: column 'speed' must be a finite number; 1 of 6 rows are NaN or infinite",
        ),
        (("11,0.4", "11,"), r"log\.csv, row 5: column 'torque' must be a finite number"),
        (("0.4,4,false", "0.4,4"), r"log\.csv, row 5: a row needs 7 cells, got 6"),
        (("torque", "force"), r"log\.csv: the table has no column 'torque'; its columns are run, t, speed"),
        ((LOG, "run,t,speed,angle,torque,reward,done\n"), r"log\.csv: the table has no rows"),
        ((LOG, ""), r"log\.csv: not a CSV table with a header"),
    ],
)
def test_errors_in_csv_files_name_the_row(tmp_path: Path, change: tuple[str, str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        load_dataset(log(tmp_path, LOG.replace(*change)), COLUMNS)


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ([[1.0, 2.0], [3.0]], r"log\.parquet, row 2: lists of column 'state' must have 2 entries, as in row 1, got 1"),
        (["fast", "slow"], r"log\.parquet, row 1: column 'state' must hold numbers, got 'fast'"),
        ([1.0, None], r"log\.parquet, row 2: column 'state' must be a finite number"),
    ],
)
def test_errors_in_parquet_files_name_the_row(tmp_path: Path, state: list[object], rule: str) -> None:
    path = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"state": state, "a": [0.0, 1.0]}), path)
    with pytest.raises(ValueError, match=rule):
        load_dataset(str(path), Columns(observations=("state",), actions=("a",)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"log\.parquet: not a complete Parquet file"):
        load_dataset(str(path), Columns(observations=("state",), actions=("a",)))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("observations: null\n", r"columns\.yaml: columns\.observations must be a list of names, got None"),
        ("observations: [x]\nactions: 1\n", r"columns\.yaml: columns\.actions must be a list of names, got 1"),
        ("observations: [x]\n", r"columns\.yaml: columns\.actions must name at least one column"),
        ("observation: [x]\nactions: [u]\n", r"keys episode, order, observations.* got 'observation'"),
        (
            "observations: [x]\nactions: [u]\ncategories: {v: 2}\n",
            r"must name columns of actions or observations, got 'v'",
        ),
        ("observations: [x\n", r"columns\.yaml: not valid YAML"),
    ],
)
def test_errors_in_columns_files_name_the_file(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "columns.yaml").write_text(text)
    with pytest.raises(ValueError, match=rule):
        read_columns(tmp_path / "columns.yaml")
