"""LeRobot folders of versions 2.1 and 3.0, written here as their specification says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dimension
from trajectory_transformer.data.sources import Columns, load_dataset

LENGTHS = (4, 3, 5)
V21_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V30_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


def frames(episode: int, start: int, **extra: Any) -> dict[str, Any]:
    """The columns of one episode: vectors as fixed-size lists, entries of shape [1] as numbers."""
    count = LENGTHS[episode]
    step = np.arange(count)
    state = np.stack([step + 10.0 * episode, -step.astype(float)], axis=1).astype(np.float32)
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(state.ravel()), 2)
    actions = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array((state * 0.1).ravel()), 2)
    return {
        "observation.state": vectors,
        "action": actions,
        "next.reward": (step * 0.5).astype(np.float32),
        "next.done": step == count - 1,
        "next.success": (step == count - 1) & (episode == 1),
        "timestamp": (step / 10).astype(np.float32),
        "frame_index": step,
        "episode_index": np.full(count, episode),
        "index": start + step,
        "task_index": np.full(count, episode % 2),
        **extra,
    }


def info(version: str, **changed: Any) -> dict[str, Any]:
    scalar = {"shape": [1], "names": None}
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": ["pan", "lift"]}},
        "action": {"dtype": "float32", "shape": [2], "names": ["pan", "lift"]},
        "observation.images.top": {"dtype": "video", "shape": [480, 640, 3], "names": ["height", "width", "channels"]},
        "next.reward": {"dtype": "float32", **scalar},
        "next.done": {"dtype": "bool", **scalar},
        "next.success": {"dtype": "bool", **scalar},
        "timestamp": {"dtype": "float32", **scalar},
        **{name: {"dtype": "int64", **scalar} for name in ("frame_index", "episode_index", "index", "task_index")},
    }
    return {
        "codebase_version": version,
        "robot_type": "so100",
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": 2,
        "chunks_size": 1000,
        "fps": 10,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": V21_DATA if version == "v2.1" else V30_DATA,
        "video_path": None,
        "features": features,
        **changed,
    }


def write_table(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_v21(folder: Path, tasks: int = 2) -> Path:
    """One Parquet file per episode, tasks and episodes as JSON lines."""
    start = 0
    for episode, count in enumerate(LENGTHS):
        write_table(folder / V21_DATA.format(episode_chunk=0, episode_index=episode), frames(episode, start))
        start += count
    (folder / "meta").mkdir()
    (folder / "meta/info.json").write_text(json.dumps(info("v2.1")))
    texts = ["pick up the cube", "open the drawer"][:tasks]
    lines = [json.dumps({"task_index": index, "task": text}) for index, text in enumerate(texts)]
    (folder / "meta/tasks.jsonl").write_text("\n".join(lines) + "\n")
    episodes = [{"episode_index": i, "tasks": [texts[i % tasks]], "length": n} for i, n in enumerate(LENGTHS)]
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
    return folder


def write_v30(folder: Path) -> Path:
    """Episodes 0 and 1 in one file, episode 2 in the next; tasks as a Parquet file with the text as pandas index."""
    parts = [frames(0, 0), frames(1, LENGTHS[0])]
    joined = pyarrow.concat_tables([pyarrow.table(each) for each in parts])
    path = folder / V30_DATA.format(chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(joined, path)
    write_table(folder / V30_DATA.format(chunk_index=0, file_index=1), frames(2, sum(LENGTHS[:2])))
    (folder / "meta").mkdir()
    (folder / "meta/info.json").write_text(json.dumps(info("v3.0")))
    tasks = {"task_index": [0, 1], "__index_level_0__": ["pick up the cube", "open the drawer"]}
    write_table(folder / "meta/tasks.parquet", tasks)
    where = {"episode_index": [0, 1, 2], "length": list(LENGTHS), "data/chunk_index": [0, 0, 0]}
    where |= {"data/file_index": [0, 0, 1], "dataset_from_index": [0, 4, 7], "dataset_to_index": [4, 7, 12]}
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", where)
    return folder


WRITERS = pytest.mark.parametrize("write", [write_v21, write_v30])


@WRITERS
def test_episodes_are_read_with_names_tasks_and_rewards(write: Callable[[Path], Path], tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "so100"))
    # Episode 1 ended with success and repeats its final state; the others lose their last action.
    assert [len(episode) for episode in dataset] == [3, 3, 4]
    assert [episode.terminated for episode in dataset] == [False, True, False]
    names = ["state.pan", "state.lift", "task"]
    assert [dimension.name for dimension in dataset.observation_dimensions] == names
    assert dataset.observation_dimensions[2] == Dimension("task", 2, ("pick up the cube", "open the drawer"))
    assert [dimension.name for dimension in dataset.action_dimensions] == ["action.pan", "action.lift"]
    np.testing.assert_array_equal(dataset.episodes[2].observations[:, 0], [20, 21, 22, 23, 24])
    np.testing.assert_allclose(dataset.episodes[2].actions[:, 0], [2.0, 2.1, 2.2, 2.3], rtol=1e-6)
    np.testing.assert_array_equal(dataset.episodes[1].observations[:, 2], [1, 1, 1, 1])
    np.testing.assert_array_equal(dataset.episodes[0].rewards, [0, 0.5, 1.0])
    known = dataset.metadata
    assert known["episodes_found_by"] == "column 'episode_index'"
    assert (known["robot_type"], known["fps"], known["left_out"]) == ("so100", 10, "observation.images.top")


@WRITERS
def test_the_command_line_shows_trains_and_converts(
    write: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write(tmp_path / "so100"))
    assert main(["data", "show", folder]) == 0
    text = capsys.readouterr().out
    assert "3 episodes, 10 steps" in text and "left_out: observation.images.top" in text
    assert "task: 2 categories: pick up the cube, open the drawer" in text
    sizes = ["--model.window", "3", "--model.num_layers", "1", "--model.width", "16", "--train.steps", "1"]
    assert main(["train", folder, "--out", str(tmp_path / "run"), *sizes]) == 0
    assert main(["data", "convert", folder, "--out", str(tmp_path / "x.npz")]) == 0
    assert load_dataset(tmp_path / "x.npz").observation_dimensions == load_dataset(folder).observation_dimensions


def test_columns_choose_other_features(tmp_path: Path) -> None:
    folder = write_v30(tmp_path / "so100")
    chosen = load_dataset(folder, Columns(observations=("observation.state",), terminal="next.done"))
    assert chosen.observation_dim == 2 and all(episode.terminated for episode in chosen)
    assert [len(episode) for episode in chosen] == list(LENGTHS)


def test_a_single_task_is_metadata(tmp_path: Path) -> None:
    dataset = load_dataset(write_v21(tmp_path / "so100", tasks=1))
    assert dataset.observation_dim == 2 and dataset.metadata["task"] == "pick up the cube"


def test_incomplete_and_unsupported_datasets_are_refused(tmp_path: Path) -> None:
    folder = write_v21(tmp_path / "so100")
    (folder / V21_DATA.format(episode_chunk=0, episode_index=1)).unlink()
    with pytest.raises(ValueError, match=r"states 3 episodes, the files in data hold 2; was it downloaded completely"):
        load_dataset(folder)
    described = folder / "meta/info.json"
    described.write_text(json.dumps(info("v1.6")))
    with pytest.raises(ValueError, match=r"LeRobot version v1\.6 is not supported, expected v2\.0, v2\.1, v3\.0"):
        load_dataset(folder)
    features = info("v2.1")["features"]
    del features["observation.state"]
    described.write_text(json.dumps(info("v2.1", features=features)))
    with pytest.raises(ValueError, match=r"all observations are images \(observation\.images\.top\), which are not"):
        load_dataset(folder)
    described.write_text("{")
    with pytest.raises(ValueError, match=r"info\.json: not (the description of a LeRobot dataset|valid JSON)"):
        load_dataset(folder)


@pytest.mark.parametrize("shape", [{}, [], 3, None])
def test_a_shape_of_another_form_names_the_file(tmp_path: Path, shape: object) -> None:
    folder = write_v21(tmp_path / "data")
    path = folder / "meta" / "info.json"
    stored = json.loads(path.read_text())
    stored["features"]["action"]["shape"] = shape
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"info\.json: not the description of a LeRobot dataset") as found:
        load_dataset(folder)
    assert str(path) in str(found.value)
