"""Minari datasets: load by id, from local datasets or by download, and save local datasets."""

import json
import secrets
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from trajectory_transformer.data.episode import (
    Dataset,
    Episode,
    FloatArray,
    check_description,
    dimension_fields,
    dimensions_from,
)
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.data.sources.hdf5 import check_contents
from trajectory_transformer.data.sources.rows import description
from trajectory_transformer.data.spaces import (
    Leaf,
    Space,
    flatten,
    leaves,
    map_leaf,
    maps_of,
    split_goal,
    total_dim,
)
from trajectory_transformer.files import parse_json, publish, read_json, write_atomically

_DESCRIPTION = "trajectory_transformer"
_TIMEOUT = 3.0  # seconds for the server to answer


def _minari() -> ModuleType:
    try:
        import_module("h5py")
        return import_module("minari")
    except ImportError as error:
        raise ImportError("reading Minari datasets needs: pip install 'trajectory-transformer[minari]'") from error


def is_local(dataset_id: str) -> bool:
    """Whether a dataset is stored locally."""
    try:
        _minari().load_dataset(dataset_id)
    except FileNotFoundError:
        return False
    return True


def delete_minari(dataset_id: str) -> None:
    """Delete a local dataset."""
    _minari().delete_dataset(dataset_id)


def load_minari(dataset_id: str) -> Dataset:
    """Read a Minari dataset; download it first if it is not stored locally."""
    minari = _minari()
    local_id = dataset_id.split("://", 1)[-1].split("/", 1)[-1] if "://" in dataset_id else dataset_id
    try:
        source = minari.load_dataset(local_id)
    except FileNotFoundError:
        _download(minari, dataset_id)
        source = minari.load_dataset(local_id)
    except Exception as error:  # a damaged dataset fails in many ways
        raise ValueError(f"Minari dataset {dataset_id}: cannot be read ({error})") from error
    place = f"Minari dataset {dataset_id}"
    _check_files(Path(source.storage.data_path), place)
    try:
        raw = source.storage.metadata
        stored = check_description(parse_json(str(raw.get(_DESCRIPTION, "{}")), place), place)
        observation_parts, goal_parts = split_goal(source.observation_space)
        map_part = map_leaf(source.observation_space)
        action_parts = leaves(source.action_space, "actions")
        records = _records(source, place)
        found = _minari_metadata(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: its metadata cannot be read ({type(error).__name__}: {error})") from error
    outcomes = stored.get("outcomes", [])
    episodes = []
    for index, record in enumerate(records):
        try:
            outcome = outcomes[index] if index < len(outcomes) else _outcome(record.infos)
            episode = _episode(record, observation_parts, goal_parts, action_parts, outcome)
            if map_part is not None:
                episode = replace(episode, map=maps_of(record.observations, map_part, len(episode) + 1)[0])
            episodes.append(episode)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{place}, episode {index}: {error}") from error
    if not stored.get("rewards", True):
        episodes = [replace(episode, rewards=None) for episode in episodes]
    metadata = {"minari": local_id, **found, **stored.get("metadata", {})}
    observed = [dimension for leaf in observation_parts for dimension in leaf.dimensions("observation")]
    acted = [dimension for leaf in action_parts for dimension in leaf.dimensions("action")]
    try:
        known = {**dimension_fields(observed, acted), **stored}
        known["action_categories"] = [dimension.categories for dimension in acted]  # the action space has the last word
        dimensions = [dimensions_from(kind, known) for kind in ("observation", "action")]
        return Dataset(tuple(episodes), metadata, *dimensions)
    except ValueError as error:
        raise ValueError(f"Minari dataset {dataset_id}: {error}") from error


def _records(source: Any, place: str) -> Iterator[Any]:
    """The episodes as Minari reads them."""
    try:
        yield from source.iterate_episodes()
    except Exception as error:  # a damaged dataset fails in many ways
        raise ValueError(f"{place}: cannot be read ({type(error).__name__}: {error})") from error


def _check_files(folder: Path, place: str) -> None:
    """Refuse HDF5 files of a dataset that refer to other files or declare more than they hold."""
    h5py = import_module("h5py")
    for path in sorted(folder.glob("*.hdf5")):
        try:
            with h5py.File(path, "r") as file:
                check_contents(path, file)
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ValueError) and str(path) in str(error):
                raise
            raise ValueError(f"{place}: {path.name} cannot be read ({error})") from error


def _episode(
    record: Any,
    observation_parts: Sequence[Leaf],
    goal_parts: Sequence[Leaf],
    action_parts: Sequence[Leaf],
    outcome: Mapping[str, float],
) -> Episode:
    steps = len(record.rewards)
    observations = flatten(record.observations, observation_parts, steps + 1)
    goals = flatten(record.observations, goal_parts, steps + 1)
    return Episode(
        observations=observations,
        actions=flatten(record.actions, action_parts, steps),
        rewards=np.asarray(record.rewards, dtype=np.float32),
        terminated=bool(record.terminations[-1]),
        goal=goals[0] if total_dim(goal_parts) else None,
        outcome=outcome,
    )


def _outcome(infos: Mapping[str, Any] | None) -> dict[str, float]:
    """The success of an episode, if the environment reported it."""
    success = (infos or {}).get("success")
    return {} if success is None or np.ndim(success) != 1 else {"success": float(success[-1])}


def _minari_metadata(raw: Mapping[str, Any]) -> dict[str, str | float]:
    """The environment and the reference scores from Minari's own metadata."""
    found: dict[str, str | float] = {}
    if isinstance(raw.get("env_spec"), str):
        found["env"] = str(parse_json(raw["env_spec"], "env_spec")["id"])
    for key in ("ref_min_score", "ref_max_score"):
        if isinstance(raw.get(key), int | float):
            found[key] = float(raw[key])
    return found


def _download(minari: ModuleType, dataset_id: str) -> None:
    """Download a dataset; fails within seconds without a network."""
    try:
        endpoint = import_module("huggingface_hub.constants").ENDPOINT
    except ImportError as error:
        raise ImportError(
            f"Minari dataset {dataset_id} is not stored locally; downloading it needs: "
            "pip install 'trajectory-transformer[minari]'"
        ) from error
    reason = _unreachable(endpoint)
    if reason is not None:
        local = sorted(minari.list_local_datasets())
        raise ValueError(
            f"Minari dataset {dataset_id}: not among the local datasets ({', '.join(local) or 'none'}), "
            f"and the server cannot be reached ({reason})"
        )
    try:
        minari.download_dataset(dataset_id)
    except Exception as error:  # the client raises many types; the cause is the id or the network
        raise ValueError(
            f"Minari dataset {dataset_id}: not stored locally and cannot be downloaded ({error})"
        ) from error


def _unreachable(endpoint: str) -> str | None:
    """Why the server cannot be reached, or None. Minari's own client would retry for half a minute."""
    answer: list[str | None] = []

    def ask() -> None:
        try:
            with urlopen(Request(endpoint, method="HEAD"), timeout=_TIMEOUT):
                answer.append(None)
        except HTTPError:
            answer.append(None)  # an error status is an answer
        except OSError as error:
            answer.append(str(getattr(error, "reason", error)))

    # In a thread, because resolving the host name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT + 1)
    return answer[0] if answer else f"no answer in {_TIMEOUT + 1:.0f} s"


def save_minari(
    dataset: Dataset, dataset_id: str, seeds: Sequence[int] | None = None, *, overwrite: bool = False
) -> None:
    """Write a local Minari dataset; goals become `desired_goal` of every step, missing rewards become 0.

    It is written under a temporary id and renamed, so it appears complete or not at all.
    """
    if dataset.map_shape:
        raise ValueError(f"{dataset_id}: only .npz files can store the maps of episodes; save to a .npz file")
    minari = _minari()
    episode_buffer = import_module("minari.data_collector.episode_buffer").EpisodeBuffer
    env = _environment(dataset)
    action_space = _action_space(dataset, env)
    observation_space: Space = spaces.Box(-np.inf, np.inf, (dataset.observation_dim,), np.float32)
    goal = dataset.episodes[0].goal
    if goal is not None:
        goal_space = spaces.Box(-np.inf, np.inf, goal.shape, np.float32)
        observation_space = spaces.Dict({"observation": observation_space, "desired_goal": goal_space})
    buffers = [
        episode_buffer(
            id=index,
            seed=None if seeds is None else seeds[index],
            observations=_observations(episode),
            actions=_actions(episode, action_space),
            rewards=np.zeros(len(episode), np.float32) if episode.rewards is None else episode.rewards,
            terminations=_at_end(len(episode), episode.terminated),
            truncations=_at_end(len(episode), not episode.terminated),
        )
        for index, episode in enumerate(dataset)
    ]
    known = references_of(str(dataset.metadata.get("env", "")), dataset.metadata)
    packages = [name for name in ("gymnasium", "mujoco") if f"version.{name}" in dataset.metadata]
    folder = import_module("minari.storage").get_dataset_path
    if folder(dataset_id).exists() and not overwrite:
        raise ValueError(f"Minari dataset {dataset_id}: cannot be written (it already exists)")
    name, version = dataset_id.rsplit("-v", 1)
    temporary_id = f"{name}-{secrets.token_hex(8)}-tmp-v{version}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about missing authors and links
            stored = minari.create_dataset_from_buffers(
                temporary_id,
                buffers,
                env=None if env is None else env.spec,
                observation_space=observation_space,
                action_space=action_space,
                algorithm_name=str(dataset.metadata.get("policy", "recorded")),
                description=str(dataset.metadata.get("description", f"{len(dataset)} episodes, written by tt")),
                ref_min_score=known.random if known else None,
                ref_max_score=known.expert if known else None,
                requirements=[f"{name}=={dataset.metadata[f'version.{name}']}" for name in packages],
            )
        stored.storage.update_metadata({_DESCRIPTION: description(dataset)})
        _rename(Path(stored.storage.data_path) / "metadata.json", dataset_id)
    except BaseException as error:
        shutil.rmtree(folder(temporary_id), ignore_errors=True)
        if isinstance(error, ValueError):
            raise ValueError(f"Minari dataset {dataset_id}: cannot be written ({error})") from error
        raise
    if overwrite and folder(dataset_id).exists():
        delete_minari(dataset_id)
    publish(folder(temporary_id), folder(dataset_id), overwrite=False)


def _rename(path: Path, dataset_id: str) -> None:
    """Write the id into the metadata of a dataset; Minari itself refuses to change it."""
    write_atomically(path, json.dumps({**read_json(path), "dataset_id": dataset_id}).encode())


def _environment(dataset: Dataset) -> "gymnasium.Env[Any, Any] | None":
    """The environment of a dataset, if it can be made here without importing a module that only the data names."""
    name = dataset.metadata.get("env")
    if not isinstance(name, str):
        return None
    module, _, own = name.rpartition(":")
    if module and own not in gymnasium.registry:
        return None
    try:
        options = parse_json(str(dataset.metadata.get("env_options", "{}")), "env_options")
        return gymnasium.make(own, **options)
    except Exception:  # an environment may refuse the arguments that the data names with any exception
        return None


def _action_space(dataset: Dataset, env: "gymnasium.Env[Any, Any] | None") -> Space:
    """The action space of the environment if it fits the dataset, else the smallest space with all its actions."""
    categories = tuple(dimension.categories for dimension in dataset.action_dimensions)
    if env is not None and isinstance(env.action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
        leaf = Leaf((), env.action_space)
        if leaf.categories == categories:
            return env.action_space
    if all(categories):
        return spaces.Discrete(categories[0]) if len(categories) == 1 else spaces.MultiDiscrete(list(categories))
    if any(categories):
        raise ValueError(
            f"Minari cannot store continuous and discrete actions in one array; got categories {categories}"
        )
    actions = np.concatenate([episode.actions for episode in dataset])
    return spaces.Box(actions.min(axis=0), actions.max(axis=0), dtype=np.float32)


def _observations(episode: Episode) -> FloatArray | dict[str, FloatArray]:
    if episode.goal is None:
        return episode.observations
    return {"observation": episode.observations, "desired_goal": np.tile(episode.goal, (len(episode) + 1, 1))}


def _actions(episode: Episode, space: Space) -> npt.NDArray[np.generic]:
    leaf = Leaf((), space)
    actions = episode.actions.reshape(len(episode), *(space.shape or ()))
    return actions if isinstance(space, spaces.Box) else np.asarray(actions.astype(np.int64) + leaf.start)


def _at_end(steps: int, value: bool) -> npt.NDArray[np.bool_]:
    """A mask [steps] that is `value` at the last step and false before."""
    return np.asarray((np.arange(steps) == steps - 1) & value)
