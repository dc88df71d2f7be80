"""One small valid input of every format, and what reads it."""

import gzip
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import safetensors.numpy
import torch

from trajectory_transformer.baselines import train_baseline
from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.data.sources import save_dataset
from trajectory_transformer.runs import start_run, train
from trajectory_transformer.runs.settings import RunSettings
from trajectory_transformer.runs.sources import open_or_build_shards

COLUMNS = "episode: episode\nobservations: [a, b]\nactions: [c]\nreward: r\nterminal: done\n"
RECIPE = "env: CartPole-v1\nparts:\n  - policy: random\n    steps: 3\n"
CONFIG = "env: CartPole-v1\npolicy: random\nepisodes: 1\nworkers: 1\nseed: 3\n"
TABLE = "episode,a,b,c,r,done\n0,1.5,2,0.5,1,false\n0,1,2.5,0.25,1,true\n1,3,4,0.5,0,false\n1,4,4,0.5,0,false\n"
SMALL = {"model": ModelConfig(window=2, num_layers=1, num_heads=1, width=8), "tokens": TokenConfig(num_bins=5)}
CPU = ("--device", "cpu")
RESUME = ("train", "--resume", "{}/run", *CPU)
SHORT = ("--device", "cpu", "--episodes", "1", "--num_envs", "1", "--env_options", '{"max_episode_steps": 5}')
SEARCH = ("--search.beam_width", "1", "--search.horizon", "1", *SHORT)


ONE = ("--out", "{}/x.npz", "--episodes", "1", "--workers", "1", "--env_options", '{"max_episode_steps": 5}')
AGENT = ("collect", "--env", "CartPole-v1", "--policy", "{}/agent.zip", *ONE)
ACTOR = ("collect", "--env", "Pendulum-v1", *ONE)
STEP = ["--train.steps", "1", "--train.batch_size", "2", "--device", "cpu", "--model.window", "2", "--model.width", "8"]
STEP += ["--model.num_layers", "1", "--model.num_heads", "1", "--tokens.num_bins", "5"]


@dataclass(frozen=True)
class Target:
    """A file to damage, and the command that reads it; `{}` in the words is the folder that holds the copy."""

    name: str
    file: str  # relative to the folder
    words: tuple[str, ...]
    protected: bool = False  # whether a checksum covers its contents
    member: str = ""  # of a zip file: what is damaged, with a checksum that fits
    blocks: int = 65  # how many pieces of mutations; fewer for commands that take long


TARGETS = (
    Target("npz", "data.npz", ("data", "show", "{}/data.npz"), protected=True),
    Target("ogbench", "ogbench.npz", ("data", "show", "{}/ogbench.npz"), protected=True),
    Target("hdf5", "data.hdf5", ("data", "show", "{}/data.hdf5")),
    Target("parquet", "data.parquet", ("data", "show", "{}/data.parquet")),
    Target("csv", "table.csv", ("data", "show", "{}/table.csv")),
    Target("csv.gz", "packed.csv.gz", ("data", "show", "{}/packed.csv.gz"), protected=True),
    Target("columns", "table.csv.columns.yaml", ("data", "show", "{}/table.csv")),
    Target("lerobot info", "lerobot/meta/info.json", ("data", "show", "{}/lerobot")),
    Target("lerobot tasks", "lerobot/meta/tasks.jsonl", ("data", "show", "{}/lerobot")),
    Target("minari metadata", "minari/corpus/data-v0/data/metadata.json", ("data", "show", "corpus/data-v0")),
    Target("minari data", "minari/corpus/data-v0/data/main_data.hdf5", ("data", "show", "corpus/data-v0")),
    Target("recipe", "recipe.yaml", ("collect", "--recipe", "{}/recipe.yaml", "--out", "{}/x.npz", "--workers", "1")),
    Target("config", "config.yaml", ("collect", "--config", "{}/config.yaml", "--out", "{}/x.npz", "--episodes", "1")),
    Target("description", "run/checkpoint.json", ("evaluate", "{}/run", "--out", "{}/x.json", *SEARCH)),
    Target("weights", "run/weights.safetensors", ("evaluate", "{}/run", "--out", "{}/x.json", *SEARCH), protected=True),
    Target("run settings", "run/run.json", RESUME),
    Target("resume state", "run/resume.safetensors", RESUME, protected=True),
    Target("metrics", "run/metrics.jsonl", RESUME, blocks=3),
    Target("training result", "run/training.json", ("evaluate", "{}/run", "--out", "{}/x.json", *SEARCH), blocks=12),
    Target("page", "run/evaluation.json", ("report", "{}/run"), blocks=3),
    Target("episodes", "run/evaluation.npz", ("report", "{}/run"), protected=True),
    Target("result", "results/a.json", ("report", "{}/results", "--into", "[{}/doc.md]")),
    Target("shard index", "shards/index.json", ("train", "--shards", "{}/shards", "--out", "{}/new", *STEP)),
    Target("shard rows", "shards/rows.bin", ("train", "--shards", "{}/shards", "--out", "{}/new", *STEP)),
    Target(
        "discretizer",
        "shards/discretizer.safetensors",
        ("train", "--shards", "{}/shards", "--out", "{}/new", *STEP),
    ),
    Target("baseline", "bc/checkpoint.json", ("evaluate", "{}/bc", "--out", "{}/x.json", *SHORT)),
    Target("baseline weights", "bc/weights.safetensors", ("evaluate", "{}/bc", "--out", "{}/x.json", *SHORT)),
    Target("baseline settings", "bc/run.json", ("baseline", "--resume", "{}/bc", *CPU)),
    Target("baseline state", "bc/resume.safetensors", ("baseline", "--resume", "{}/bc", *CPU), protected=True),
    Target("policy", "actor.zip", ("collect", "--env", "CartPole-v1", "--policy", "{}/actor.zip", "--out", "{}/x.npz")),
    Target(
        "actor",
        "actor.safetensors",
        ("collect", "--env", "CartPole-v1", "--policy", "{}/actor.safetensors", "--out", "{}/x.npz"),
    ),
    Target("zip", "agent.zip", AGENT, blocks=12),
    Target("zip data", "agent.zip", AGENT, member="data", blocks=12),
    Target("zip weights", "agent.zip", AGENT, member="policy.pth", blocks=12),
    Target("real actor", "real.safetensors", (*ACTOR, "--policy", "{}/real.safetensors")),
    Target("noisy actor", "real.safetensors", (*ACTOR, "--policy", "{}/real.safetensors sto")),
    Target("state", "state_1.pt", ("import", "{}/state_1.pt", "--dataset", "{}/five.npz", "--out", "{}/new")),
)


def small_dataset(seed: int = 0, episodes: int = 4, env: str | None = "Pendulum-v1") -> Dataset:
    """Episodes of the sizes of Pendulum."""
    rng = np.random.default_rng(seed)
    made = [
        Episode(
            observations=rng.normal(size=(steps + 1, 3)).astype(np.float32),
            actions=rng.uniform(-2, 2, size=(steps, 1)).astype(np.float32),
            rewards=rng.normal(size=steps).astype(np.float32),
            terminated=index % 2 == 0,
        )
        for index, steps in enumerate(range(4, 4 + episodes))
    ]
    return Dataset(tuple(made), {} if env is None else {"env": env})


def build_corpus(folder: Path, main: Callable[[list[str]], int]) -> None:
    """Write every input; `main` is the command line. MINARI_DATASETS_PATH must be `folder / "minari"`."""
    # Runs record the program that started them; mutations by number need the same bytes in every process.
    with patch.object(sys, "argv", ["attack"]):
        _build(folder, main)


def _build(folder: Path, main: Callable[[list[str]], int]) -> None:
    data = small_dataset()
    for name in ("data.npz", "data.hdf5", "data.parquet"):
        save_dataset(data, folder / name)
    save_dataset(data, "corpus/data-v0")
    rows = np.concatenate([episode.observations for episode in data])
    last = np.cumsum([len(episode) + 1 for episode in data]) - 1
    ends = np.zeros(len(rows), np.bool_)
    ends[last] = True
    np.savez(folder / "ogbench.npz", observations=rows, actions=rows[:, :1], terminals=ends)
    for name in ("table.csv", "packed.csv.gz"):
        (folder / name).write_bytes(TABLE.encode() if name == "table.csv" else gzip.compress(TABLE.encode()))
        (folder / f"{name}.columns.yaml").write_text(COLUMNS)
    _lerobot(folder / "lerobot")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "config.yaml").write_text(CONFIG)
    train(data, out=folder / "run", train=TrainConfig(steps=2, batch_size=2), device="cpu", **SMALL)  # type: ignore[arg-type]
    _stopped(folder / "stopped", data)
    for name in ("run", "stopped"):
        _point_to(folder / name, folder / "data.npz")
    assert main(["evaluate", str(folder / "run"), *SEARCH]) == 0
    (folder / "results").mkdir()
    shutil.copy(folder / "run" / "evaluation.json", folder / "results" / "a.json")
    (folder / "doc.md").write_text("<!-- results -->\n<!-- /results -->\n")
    open_or_build_shards(folder / "shards", data, TokenConfig(num_bins=5))
    train_baseline(
        str(folder / "data.npz"),
        algorithm="bc",
        settings={"hidden": (4, 4), "steps": 2, "batch_size": 2},
        out=folder / "bc",
        device="cpu",
    )
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(9, 4)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
    save_dataset(Dataset((Episode(states, actions, np.ones(8, np.float32), True),)), folder / "five.npz")
    (folder / "actor.zip").write_bytes((folder / "data.npz").read_bytes())
    shutil.copy(folder / "bc" / "weights.safetensors", folder / "actor.safetensors")
    _agent(folder / "agent.zip")
    _actor(folder / "real.safetensors")
    shutil.copy(Path(__file__).parents[1] / "golden" / "state_1.pt", folder / "state_1.pt")


def _stopped(folder: Path, data: Dataset) -> None:
    """A run that was stopped after its second of six steps."""
    settings = RunSettings(
        train=TrainConfig(steps=6, batch_size=2),
        checkpoint_every=2,
        **SMALL,  # type: ignore[arg-type]
    )
    run = start_run(settings, folder, torch.device("cpu"), dataset=data)
    for _ in zip(range(2), run.advance(), strict=False):
        pass
    assert run.lock is not None
    run.lock.release()


def _point_to(run: Path, data: Path) -> None:
    """Let a run that was trained in memory be resumed from a file."""
    settings = json.loads((run / "run.json").read_text()) | {"dataset": str(data), "source": None}
    (run / "run.json").write_text(json.dumps(settings))


def _agent(path: Path) -> None:
    """A policy as Stable-Baselines3 stores it: settings as JSON, in it spaces and class as pickles, and weights."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.save_util import data_to_json

    env = gymnasium.make("CartPole-v1")
    network = {"net_arch": [4]}
    policy = ActorCriticPolicy(env.observation_space, env.action_space, lambda _: 1e-3, **network)  # type: ignore[arg-type]
    data = {
        "policy_class": ActorCriticPolicy,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "policy_kwargs": network,
        "n_envs": 1,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "n_steps": 2,
        "seed": 0,
    }
    weights, optimizer = io.BytesIO(), io.BytesIO()
    torch.save(policy.state_dict(), weights)
    torch.save(policy.optimizer.state_dict(), optimizer)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", data_to_json(data))
        file.writestr("policy.pth", weights.getvalue())
        file.writestr("policy.optimizer.pth", optimizer.getvalue())
        file.writestr("_stable_baselines3_version", "2.0.0")
    assert PPO.load(path, device="cpu").predict(np.zeros(4, np.float32))[0] in (0, 1)


def _actor(path: Path) -> None:
    """An actor file for Pendulum, with all that such files may hold."""
    rng = np.random.default_rng(0)
    shapes = {"layer0.weight": (4, 3), "layer0.bias": (4,), "layer1.weight": (1, 4), "layer1.bias": (1,)}
    shapes |= {"obs_mean": (3,), "log_std_layer.weight": (1, 4), "log_std_layer.bias": (1,)}
    tensors: dict[str, npt.NDArray[Any]] = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    tensors |= {"obs_std": np.ones(3, np.float32), "obs_index_v1": np.arange(3)}
    tensors |= {"action_low": np.full(1, -2, np.float32), "action_high": np.full(1, 2, np.float32)}
    envs = [{"id": "Pendulum-v1", "kwargs": {}, "obs_index": "obs_index_v1"}, {"id": "Other-v4", "obs_index": None}]
    meta = {"envs": json.dumps(envs), "n_layers": "2", "activation": "relu", "clip_obs": "10.0", "squash": "tanh"}
    safetensors.numpy.save_file(
        tensors, path, {**meta, "weight_layout": "[out, in]", "eval": json.dumps({"mean": 1.5})}
    )


def _lerobot(folder: Path) -> None:
    """Two episodes in the layout of LeRobot 2.1."""
    (folder / "meta").mkdir(parents=True)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    features = {name: {"dtype": "float32", "shape": [2]} for name in ("observation.state", "action")}
    info = {"codebase_version": "v2.1", "total_episodes": 2, "fps": 10, "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "lift"}\n')
    for episode in range(2):
        rows = {
            "episode_index": [episode] * 3,
            "frame_index": [0, 1, 2],
            "observation.state": [[0.5, 1.0], [1.0, 2.0], [1.5, 3.0]],
            "action": [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]],
        }
        path = folder / "data" / "chunk-000" / f"episode_{episode:06d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(rows), path)
