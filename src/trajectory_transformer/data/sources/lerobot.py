"""LeRobot datasets: a folder with Parquet files, described by `meta/info.json`.

Versions 2.0 and 2.1 have one file per episode, version 3.0 has several episodes per file. Images and videos are left
out. In a dataset with several tasks, the task of an episode is one more observation, a category.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.data.sources.cells import listed_categories
from trajectory_transformer.data.sources.columns import Columns
from trajectory_transformer.data.sources.parquet import parquet_header, read_parquet, read_records
from trajectory_transformer.data.sources.tables import check_names, table_dataset
from trajectory_transformer.files import naming, parse_json, read_json

_INFO = Path("meta") / "info.json"
_VERSIONS = ("v2.0", "v2.1", "v3.0")
_TASK = "task_index"


def is_lerobot(path: Path) -> bool:
    """Whether a folder holds a LeRobot dataset."""
    return (path / _INFO).is_file()


def load_lerobot(path: str | Path, columns: Columns | None = None) -> Dataset:
    """Read a LeRobot dataset; `columns` overrides which features are observations, actions, reward and terminal."""
    path = Path(path)
    info = _info(path)
    kinds = (AttributeError, TypeError, IndexError, KeyError, OverflowError)
    with naming(path / _INFO, "not the description of a LeRobot dataset", *kinds):
        return _load(path, info, columns)


def _load(path: Path, info: dict[str, Any], columns: Columns | None) -> Dataset:
    features: dict[str, dict[str, Any]] = info["features"]
    images = [name for name, each in features.items() if each.get("dtype") in ("image", "video")]
    vectors = [name for name in features if name not in images]
    tasks = _tasks(path)
    files = sorted((path / "data").glob("*/*.parquet"))
    if not files:
        raise ValueError(f"{path / 'data'}: no Parquet files; a LeRobot dataset has them in data/chunk-000 and so on")
    columns = (columns or Columns()).over(_default_columns(path, vectors, images, tasks))
    check_names(path, columns, [name for name in parquet_header(files[0])[0] if name not in images])
    table = read_parquet(files, columns.numeric, columns.labels, listed_categories(columns))
    names = {name: _entry_names(name, features) for name in (*columns.observations, *columns.actions)}
    facts: dict[str, str | int | float] = {"format": f"LeRobot {info['codebase_version']}"}
    facts |= {key: info[key] for key in ("robot_type", "fps") if isinstance(info.get(key), str | int | float)}
    if len(tasks) == 1:
        facts["task"] = next(iter(tasks.values()))
    if images:
        facts["left_out"] = ", ".join(images)
    dataset = table_dataset(path, table, columns, {}, names=names, metadata=facts)
    stated = info.get("total_episodes")
    found = len(set(table["episode_index"].ravel().tolist())) if "episode_index" in table else None
    if isinstance(stated, int) and found is not None and found != stated:
        raise ValueError(
            f"{path}: {_INFO} states {stated} episodes, the files in data hold {found}; was it downloaded completely?"
        )
    return _with_task_names(dataset, tasks)


def _with_task_names(dataset: Dataset, tasks: dict[int, str]) -> Dataset:
    """Label the categories of the observation that holds the task."""
    texts = [tasks.get(index, "") for index in range(len(tasks))]
    labels = tuple(texts) if all(texts) and len(set(texts)) == len(texts) else ()
    dimensions = tuple(
        Dimension("task", each.categories, labels) if each.name == _TASK and each.categories == len(tasks) else each
        for each in dataset.observation_dimensions
    )
    return replace(dataset, observation_dimensions=dimensions)


def _info(path: Path) -> dict[str, Any]:
    """The description of a dataset."""
    with naming(path / _INFO, "not the description of a LeRobot dataset", KeyError, TypeError):
        info = read_json(path / _INFO)
        version, features = info["codebase_version"], info["features"]
    if version not in _VERSIONS or not isinstance(features, dict):
        raise ValueError(f"{path / _INFO}: LeRobot version {version} is not supported, expected {', '.join(_VERSIONS)}")
    known: dict[str, Any] = info
    return known


def _tasks(path: Path) -> dict[int, str]:
    """The tasks of a dataset by index: JSON lines before version 3.0, then a Parquet file indexed by the text."""
    lines, table = path / "meta" / "tasks.jsonl", path / "meta" / "tasks.parquet"
    kinds = (KeyError, StopIteration, TypeError, AttributeError, OverflowError)
    with naming(path / "meta", "the list of tasks cannot be read", *kinds):
        if table.is_file():
            records = read_records(table)
            texts = [next(str(value) for key, value in each.items() if key != _TASK) for each in records]
            return {int(each[_TASK]): text for each, text in zip(records, texts, strict=True)}
        if lines.is_file():
            texts = lines.read_text(encoding="utf-8").splitlines()
            records = [parse_json(line, str(lines)) for line in texts if line.strip()]
            return {int(each[_TASK]): str(each["task"]) for each in records}
    return {}


def _default_columns(path: Path, vectors: list[str], images: list[str], tasks: dict[int, str]) -> Columns:
    """Which features hold what, by LeRobot's names."""
    observations = [name for name in vectors if name == "observation" or name.startswith("observation.")]
    actions = [name for name in vectors if name == "action" or name.startswith("action.")]
    if not observations and images:
        raise ValueError(
            f"{path}: all observations are images ({', '.join(images)}), which are not supported, because every number "
            "becomes a token: encode them as vectors of a few dozen numbers first"
        )
    if not observations or not actions:
        raise ValueError(
            f"{path / _INFO}: no features named observation.* and action; name them with --columns.observations and "
            f"--columns.actions, the features are {', '.join(vectors)}"
        )
    several = len(tasks) > 1 and _TASK in vectors
    return Columns(
        episode="episode_index",
        order="frame_index",
        observations=(*observations, *([_TASK] if several else [])),
        actions=tuple(actions),
        reward="next.reward" if "next.reward" in vectors else None,
        # `next.done` marks every last frame, also at a time limit; only success says that the task ended the episode.
        terminal="next.success" if "next.success" in vectors else None,
        split_at_terminal=False,
        categories={_TASK: max(tasks) + 1} if several else {},
    )


def _entry_names(name: str, features: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the entries of a vector, such as `state.elbow`; empty if the description has none that fit."""
    feature = features.get(name, {})
    names = feature.get("names")
    if isinstance(names, dict):  # {"motors": [...]}
        names = next(iter(names.values()), None) if len(names) == 1 else None
    size = feature.get("shape", [0])[0]
    if not isinstance(names, list) or len(names) != size or len(set(map(str, names))) != size:
        return []
    return [f"{name.removeprefix('observation.')}.{each}" for each in names]
