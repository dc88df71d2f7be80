"""Datasets of other people's making at the command line: nothing is misread in silence."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import matplotlib.figure
import numpy as np
import pytest

from trajectory_transformer.data.episode import Dimension
from trajectory_transformer.data.sources import load_dataset

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]

TINY = ["--model.window", 3, "--model.num_layers", 1, "--model.num_heads", 2, "--model.width", 16]
TINY += ["--tokens.num_bins", 8, "--train.batch_size", 4, "--train.steps", 2]
NAMED = ["--columns.observations", "[x]", "--columns.actions", "[u]"]


def ten_episodes(*, end: str = "done", every: int = 15, label: bool = False) -> str:
    """A CSV table of 150 rows that says where its episodes end."""
    header = ",".join([*(["run"] if label else []), "x", "u", "r", end])
    rows = []
    for i in range(150):
        start = ["a" if i < 75 else "b"] if label else []
        rows.append(",".join([*start, str(i % 7), str(i % 3), "1", str(int(i % every == every - 1))]))
    return "\n".join([header, *rows]) + "\n"


def test_a_table_is_split_where_done_is_true(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(ten_episodes())
    words = ["data", "show", "log.csv", *NAMED, "--columns.reward", "r"]
    code, text = tt(*words, "--columns.terminal", "done")
    assert code == 0, text
    assert "10 episodes, 150 steps" in text and "terminated: 100.0 %" in text
    assert "episodes_found_by: rows where 'done' is true" in text
    code, text = tt(*words, "--columns.truncated", "done")
    assert code == 0, text
    assert "10 episodes, 140 steps" in text and "truncated: 100.0 %" in text  # without final states
    code, text = tt(*words)
    assert code == 0, text
    assert "1 episode," in text and "episodes_found_by: nothing: all rows are one episode" in text


def test_done_within_an_episode_splits_it_unless_a_flag_says_otherwise(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(ten_episodes(label=True))
    words = ["data", "show", "log.csv", *NAMED, "--columns.episode", "run", "--columns.terminal", "done"]
    code, text = tt(*words)
    assert code == 0, text
    assert "10 episodes, 150 steps" in text
    assert "episodes_found_by: column 'run' and rows where 'done' is true" in text
    code, text = tt(*words, "--columns.split_at_terminal", "false")
    assert code == 0, text
    assert "2 episodes, 150 steps" in text and "episodes_found_by: column 'run'\n" in text


def test_done_in_consecutive_rows_of_an_episode_is_refused(refused: Refused, tt: Run, tmp_path: Path) -> None:
    rows = "run,x,u,done\na,1,1,0\na,2,1,1\na,3,1,1\nb,1,1,0\nb,2,1,1\n"
    (tmp_path / "log.csv").write_text(rows)
    words = ["data", "show", "log.csv", *NAMED, "--columns.episode", "run", "--columns.terminal", "done"]
    refused(r"log\.csv, rows 2 and 3: consecutive rows of one episode .*split_at_terminal false", *words)
    code, text = tt(*words, "--columns.split_at_terminal", "false")
    assert code == 0 and "2 episodes, 5 steps" in text


def test_a_row_after_done_without_action_is_the_final_state(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("x,u,done\n1,1,0\n2,1,1\n3,,\n7,1,0\n8,1,0\n9,,1\n")
    code, text = tt("data", "convert", "log.csv", *NAMED, "--columns.terminal", "done", "--out", "log.npz")
    assert code == 0, text
    first, second = load_dataset("log.npz").episodes
    assert first.observations.ravel().tolist() == [1, 2, 3] and second.observations.ravel().tolist() == [7, 8, 9]
    assert first.terminated and second.terminated


def test_a_missing_action_in_the_middle_is_no_end_of_an_episode(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("x,u,done\n1,1,0\n2,,0\n3,1,0\n4,1,1\n")
    refused(
        r"row 2: column 'u' must be a finite number", "data", "show", "log.csv", *NAMED, "--columns.terminal", "done"
    )


MISSING = "run,x,u,r\na,1,1,1\na,,1,2\na,3,1,\na,4,1,1\nb,5,1,1\nb,6,1,1\nb,7,1,1\n"


def test_missing_values_are_refused_dropped_or_filled(refused: Refused, tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(MISSING)
    words = ["log.csv", *NAMED, "--columns.episode", "run", "--columns.reward", "r"]
    refused(
        r"log\.csv, row 2: column 'x' must be a finite number; 1 of 7 rows .*--missing drop_episode, or .*forward_fill",
        *("data", "show", *words),
    )
    code, text = tt("data", "show", *words, "--missing", "drop_episode")
    assert code == 0, text
    assert "1 episode, 2 steps" in text and "episodes_with_missing_values_dropped: 1" in text
    code, text = tt("data", "convert", *words, "--missing", "forward_fill", "--out", "full.npz")
    assert code == 0, text
    dataset = load_dataset("full.npz")
    assert dataset.metadata["values_filled"] == 2
    assert dataset.episodes[0].observations.ravel().tolist() == [1, 1, 3, 4]
    np.testing.assert_array_equal(dataset.episodes[0].rewards, [1, 2, 2])
    (tmp_path / "first.csv").write_text("x,u\n,1\n2,1\n3,1\n")
    refused(
        r"row 1: column 'x' is missing and has no earlier value .*use --missing drop_episode",
        *("data", "show", "first.csv", *NAMED, "--missing", "forward_fill"),
    )
    (tmp_path / "inf.csv").write_text("x,u\n1,1\ninf,1\n3,1\n")
    refused(r"row 2: column 'x' must be a finite", "data", "show", "inf.csv", *NAMED, "--missing", "forward_fill")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", "x;u\n0,5;1\n1,5;2,25\n2,5;1\n"),
        ("log.csv", "x\tu\n0.5\t1\n1.5\t2.25\n2.5\t1\n"),
        ("log.tsv", "x\tu\n0,5\t1\n1,5\t2,25\n2,5\t1\n"),
        ("log.csv", "x;u\n0.5;1\n1.5;2.25\n2.5;1\n"),
        ("log.csv.gz", "x,u\n0.5,1\n1.5,2.25\n2.5,1\n"),
        ("log.csv", "\ufeffx,u\r\n0.5,1\r\n\r\n1.5,2.25\r\n2.5,1\r\n"),
    ],
)
def test_separators_decimal_commas_and_gzip_are_read(tt: Run, tmp_path: Path, name: str, text: str) -> None:
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    code, shown = tt("data", "convert", name, *NAMED, "--out", "x.npz")
    assert code == 0, shown
    (episode,) = load_dataset("x.npz").episodes
    np.testing.assert_array_equal(episode.observations, [[0.5], [1.5], [2.5]])
    np.testing.assert_array_equal(episode.actions, [[1], [2.25]])


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"x;u\n0,5;1\n1.5;2\n", r"both a decimal point and a decimal comma \('1\.5' in row 2, .*'0,5' in row 1"),
        (b"x,u,x\n1,2,3\n", r"log\.csv: 2 columns are named 'x'; rename them"),
        (b'x,u\n"1,234",1\n', r"row 1: column 'x' must hold numbers, got '1,234'"),
        (b"x,u\n1,1\n\xff,1\n", r"log\.csv: not UTF-8 text"),
        (b"run,x,u\na,1,1\n,2,1\n", r"row 2: column 'run' is empty; every row needs one"),
    ],
)
def test_tables_that_could_be_misread_are_refused(
    refused: Refused, tmp_path: Path, content: bytes, pattern: str
) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    label = ["--columns.episode", "run"] if content.startswith(b"run") else []
    refused(pattern, "data", "show", "log.csv", *NAMED, *label)


def test_a_damaged_gzip_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    whole = gzip.compress(ten_episodes().encode())
    (tmp_path / "log.csv.gz").write_bytes(whole[: len(whole) // 2])
    refused(r"log\.csv\.gz: not a complete gzip file", "data", "show", "log.csv.gz", *NAMED)


GEARS = "run,speed,mode,gear\na,1,eco,1\na,2,sport,3\na,3,eco,2\na,4,eco,1\nb,1,sport,3\nb,2,eco,1\nb,3,eco,2\n"


def test_text_and_one_based_categories_keep_their_names(tt: Run, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(GEARS)
    flags = ["--columns.episode", "run", "--columns.observations", "[speed,mode]", "--columns.actions", "[gear]"]
    refused(
        r"row 1: column 'mode' must hold numbers, got 'eco'; .*columns\.categories '\{mode: \[eco, \.\.\.\]\}'",
        *("data", "show", "log.csv", *flags),
    )
    flags += ["--columns.categories"]
    refused(
        r"row 2: column 'gear' has 3 categories, which must be 0 to 2, got 3; .*'\{gear: \[1, 2, 3\]\}'",
        *("data", "show", "log.csv", *flags, "{mode: [eco, sport], gear: 3}"),
    )
    refused(
        r"row 2: column 'mode' must hold one of eco, race, got 'sport'; add it to columns\.categories\.mode",
        *("data", "show", "log.csv", *flags, "{mode: [eco, race], gear: [1, 2, 3]}"),
    )
    flags += ["{mode: [eco, sport], gear: [1, 2, 3]}"]
    code, text = tt("data", "show", "log.csv", *flags)
    assert code == 0, text
    assert "2 categories: eco, sport" in text and "3 categories: 1, 2, 3" in text
    for name in ("x.npz", "x.parquet", "x.csv", "x.csv.gz", "x.hdf5", "tests/x-v0"):
        assert tt("data", "convert", "log.csv", *flags, "--out", name)[0] == 0
        dataset = load_dataset(name)
        assert dataset.observation_dimensions[1] == Dimension("mode", 2, ("eco", "sport"))
        assert dataset.action_dimensions == (Dimension("gear", 3, (1, 2, 3)),)
        np.testing.assert_array_equal(dataset.episodes[0].actions, [[0], [2], [1]])
    assert (tmp_path / "x.csv").read_text().splitlines()[1] == "0,0,1.0,eco,1,false"


def test_the_guess_for_a_table_lists_its_categories(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(GEARS.replace("gear", "action"))
    code, text = tt("data", "show", "log.csv")
    assert code == 2
    (tmp_path / "log.csv.columns.yaml").write_text(text.partition("\n\n")[2])
    code, text = tt("data", "show", "log.csv")
    assert code == 0, text
    assert "2 episodes" in text and "2 categories: eco, sport" in text and "3 categories: 1, 2, 3" in text


def test_columns_work_in_every_command_that_reads_data(
    tt: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.csv").write_text(ten_episodes())
    flags = [*NAMED, "--columns.reward", "r", "--columns.terminal", "done"]
    (tmp_path / "map.yaml").write_text("observations: [x]\nactions: [u]\nreward: r\n")
    refused(r"no columns? .*'q'", "train", "log.csv", *NAMED, "--columns.reward", "q", *TINY)
    code, text = tt("train", "log.csv", *flags, "--out", "run", *TINY)
    assert code == 0, text
    code, text = tt("train", "log.csv", "--mapping", "map.yaml", "--columns.terminal", "done", "--out", "same", *TINY)
    assert code == 0, text
    for name in ("weights.safetensors", "metrics.jsonl"):
        whole = (tmp_path / "run" / name).read_bytes(), (tmp_path / "same" / name).read_bytes()
        assert name.endswith("jsonl") or whole[0] == whole[1]
    # A run remembers how its data was read.
    assert json.loads((tmp_path / "run/run.json").read_text())["columns"]["terminal"] == "done"
    code, text = tt("train", "--resume", "run")
    assert code == 0, text

    labels: list[str] = []
    save = matplotlib.figure.Figure.savefig

    def note(figure: matplotlib.figure.Figure, path: Path, **options: Any) -> None:
        labels.extend(panel.get_ylabel() for panel in figure.axes)
        save(figure, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", note)
        code, text = tt("predict", "run", "--dataset", "log.csv", *flags, "--horizon", 3, "--samples", 2)
    assert code == 0, text
    assert labels == ["x"] and "\n  x: " in text
    code, text = tt("train", "log.csv", *flags, "--shards", "tokens", "--out", "sharded", *TINY)
    assert code == 0, text
    refused(
        r"tokens holds tokens of a different dataset",
        *("train", "log.csv", *flags, "--columns.truncated", "r", "--shards", "tokens", "--out", "other", *TINY),
    )


def test_a_table_whose_mapping_changed_is_different_data(refused: Refused, tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(ten_episodes())
    mapping = tmp_path / "log.csv.columns.yaml"
    mapping.write_text("observations: [x]\nactions: [u]\nreward: r\nterminal: done\n")
    assert tt("train", "log.csv", "--out", "run", *TINY)[0] == 0
    mapping.write_text("observations: [x]\nactions: [u]\nreward: r\n")
    refused(r"run was started on a different dataset", "train", "--resume", "run")


def test_columns_are_refused_where_they_would_be_ignored(tt: Run, refused: Refused, tmp_path: Path) -> None:
    assert tt("collect", "--episodes", 2, "--out", "x.npz")[0] == 0
    refused(r"x\.npz: describes its episodes itself.*names of columns", "data", "show", "x.npz", *NAMED)
    refused(r"x\.npz: describes its episodes itself.*missing and max", "train", "x.npz", "--missing", "drop_episode")


def test_d4rl_files_without_timeouts_need_a_step_limit(refused: Refused, tt: Run, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "old.hdf5", "w") as file:
        file["observations"], file["actions"] = np.random.default_rng(0).normal(size=(2, 30, 2))
        file["rewards"], file["terminals"] = np.ones(30), np.arange(30) == 14
    refused(r"old\.hdf5: the array 'timeouts' is missing.*--max_episode_steps 1000", "train", "old.hdf5")
    code, text = tt("data", "show", "old.hdf5", "--max_episode_steps", 10)
    assert code == 0, text
    assert "4 episodes" in text  # rows 1-10, 11-15 (terminal), 16-25, 26-30
    assert "episodes_found_by: the array terminals, at most 10 steps each" in text
    code, text = tt("train", "old.hdf5", "--max_episode_steps", 10, "--out", "run", *TINY)
    assert code == 0, text


def test_rows_of_several_episodes_are_not_sorted_by_a_time_that_starts_again(
    refused: Refused, tt: Run, tmp_path: Path
) -> None:
    (tmp_path / "log.csv").write_text("t;x;u;done\n0,5;1;1;0\n1,5;2;1;0\n10,5;3;1;1\n0,5;4;1;0\n1,5;5;1;1\n")
    words = ["log.csv", *NAMED, "--columns.terminal", "done"]
    refused(
        r"log\.csv, row 4: column 't' goes back from 10\.5 to 0\.5, and no column .*would mix episodes",
        *("data", "show", *words, "--columns.order", "t"),
    )
    code, text = tt("data", "convert", *words, "--out", "x.npz")
    assert code == 0, text
    assert [episode.observations.ravel().tolist() for episode in load_dataset("x.npz")] == [[1, 2, 3, 3], [4, 5, 5]]
    # Sorted as numbers, not as text: 10,5 comes after 1,5.
    (tmp_path / "one.csv").write_text("t;run;x;u\n10,5;a;3;1\n0,5;a;1;1\n1,5;a;2;1\n")
    code, text = tt(
        *("data", "convert", "one.csv", *NAMED, "--columns.episode", "run", "--columns.order", "t", "--out", "y.npz")
    )
    assert code == 0, text
    assert load_dataset("y.npz").episodes[0].observations.ravel().tolist() == [1, 2, 3]


def test_the_guess_completes_what_flags_say(tt: Run, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("time,speed,gear,done\n0,1,1,0\n1,2,3,1\n0,3,2,0\n1,4,1,1\n")
    code, text = tt("data", "show", "log.csv", "--columns.actions", "[gear]")
    assert code == 2
    guess = text.partition("\n\n")[2]
    assert "- speed" in guess and "terminal: done" in guess and "order" not in guess
    (tmp_path / "log.csv.columns.yaml").write_text(guess)
    code, text = tt("data", "show", "log.csv")
    assert code == 0, text
    assert "2 episodes, 4 steps" in text and "gear: 3 categories: 1, 2, 3" in text


def test_a_table_without_known_names_is_told_how_to_name_columns(tt: Run, tmp_path: Path) -> None:
    rows = [f"B{batch};{20 + step},5;0,{step}" for batch in range(3) for step in range(4)]
    (tmp_path / "plant.csv").write_text("\n".join(["charge;temperatur;ventil", *rows]) + "\n")
    code, text = tt("data", "show", "plant.csv")
    text = " ".join(text.split())
    assert code == 2 and "the table has the columns charge, temperatur, ventil" in text
    assert "--columns.observations '[NAME, ...]' --columns.actions '[NAME, ...]'" in text
    words = ["--columns.observations", "[temperatur]", "--columns.actions", "[ventil]", "--columns.episode", "charge"]
    code, text = tt("data", "show", "plant.csv", *words)
    assert code == 0 and "3 episodes" in text, text
