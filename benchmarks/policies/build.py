"""Make the actor files that collect the MuJoCo data, from copies of the two public repositories that hold the policies.

git clone https://github.com/berkeleydeeprlcourse/homework
git clone https://github.com/DLR-RM/rl-trained-agents
python benchmarks/policies/build.py --berkeley homework --dlr rl-trained-agents --out policies

Only the actor of each policy is kept: weights, limits of actions, normalisation of observations. Sources are pickles,
which are read without running anything they name (`pickles.py`). A file is written only if its SHA-256 is the recorded
one. Both repositories carry the MIT licence; their LICENSE files are copied beside the weights.
"""

import argparse
import hashlib
import io
import json
import re
import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.policies.pickles import Array, read_pickle, read_tensors
from trajectory_transformer.files import write_atomically

BERKELEY = "https://github.com/berkeleydeeprlcourse/homework at dde95f4e126e14a343a53efe25d1c2205854ea3a"
DLR = "https://github.com/DLR-RM/rl-trained-agents at cd35bde610f4045bf2e0731c8f4c88d22df8fc85"
LIMITS = {"Ant": (8, 1.0), "HalfCheetah": (6, 1.0), "Hopper": (3, 1.0), "Humanoid": (17, 0.4), "Walker2d": (6, 1.0)}
SUMS = Path(__file__).with_name("sha256.json")

Tensors = dict[str, Array]


@dataclass(frozen=True)
class Source:
    """Where a policy is, and what is done to its inputs."""

    path: str  # within its repository
    time: float | None = None  # value at which the clock input of the policy is frozen

    @property
    def env(self) -> str:
        """The environment without its version."""
        found = re.search(r"(\w+)-v[23]", self.path)
        assert found is not None
        return found.group(1)

    @property
    def is_berkeley(self) -> bool:
        """Whether the policy is one of the course's experts."""
        return self.path.startswith("hw1/")


SOURCES = {
    "ant-expert-berkeley": Source("hw1/experts/Ant-v2.pkl"),
    "ant-expert-trpo": Source("trpo/Ant-v3_1/Ant-v3.zip"),
    "ant-medium-ars": Source("ars/Ant-v3_1/best_model.zip"),
    "ant-medium-ppo-t100": Source("ppo/Ant-v3_1/Ant-v3.zip", time=1.0),
    "halfcheetah-expert-tqc": Source("tqc/HalfCheetah-v3_1/HalfCheetah-v3.zip"),
    "halfcheetah-high-sac": Source("sac/HalfCheetah-v3_1/HalfCheetah-v3.zip"),
    "halfcheetah-low-a2c": Source("a2c/HalfCheetah-v3_1/HalfCheetah-v3.zip"),
    "halfcheetah-low-trpo": Source("trpo/HalfCheetah-v3_1/HalfCheetah-v3.zip"),
    "halfcheetah-medium-ars": Source("ars/HalfCheetah-v3_1/best_model.zip"),
    "halfcheetah-medium-berkeley": Source("hw1/experts/HalfCheetah-v2.pkl"),
    "halfcheetah-medium-ppo": Source("ppo/HalfCheetah-v3_1/HalfCheetah-v3.zip"),
    "hopper-expert-ars": Source("ars/Hopper-v3_1/Hopper-v3.zip"),
    "hopper-expert-berkeley": Source("hw1/experts/Hopper-v2.pkl"),
    "hopper-expert-tqc": Source("tqc/Hopper-v3_1/Hopper-v3.zip"),
    "hopper-high-ppo": Source("ppo/Hopper-v3_1/Hopper-v3.zip"),
    "hopper-low-a2c": Source("a2c/Hopper-v3_1/Hopper-v3.zip"),
    "hopper-medium-sac": Source("sac/Hopper-v3_1/Hopper-v3.zip"),
    "humanoid-expert-berkeley": Source("hw1/experts/Humanoid-v2.pkl"),
    "humanoid-low-a2c": Source("a2c/Humanoid-v3_1/Humanoid-v3.zip"),
    "walker2d-expert-berkeley": Source("hw1/experts/Walker2d-v2.pkl"),
    "walker2d-expert-tqc": Source("tqc/Walker2d-v3_1/Walker2d-v3.zip"),
    "walker2d-high-sac": Source("sac/Walker2d-v3_1/Walker2d-v3.zip"),
    "walker2d-low-a2c": Source("a2c/Walker2d-v3_1/Walker2d-v3.zip"),
    "walker2d-low-ars": Source("ars/Walker2d-v3_1/best_model.zip"),
    "walker2d-medium-ppo-t075": Source("ppo/Walker2d-v3_1/Walker2d-v3.zip", time=0.75),
    "walker2d-medium-ppo-t090": Source("ppo/Walker2d-v3_1/Walker2d-v3.zip", time=0.9),
    "walker2d-medium-trpo": Source("trpo/Walker2d-v3_1/Walker2d-v3.zip"),
}


def read_berkeley(content: bytes) -> tuple[Tensors, dict[str, str]]:
    """Tensors and settings of an expert of the course: two hidden layers, standardised observations."""
    found = read_pickle(content)
    policy = found["GaussianPolicy"]
    hidden = policy["hidden"]["FeedforwardNet"]
    layers = [hidden[name]["AffineLayer"] for name in sorted(hidden)] + [policy["out"]["AffineLayer"]]
    scale = policy["obsnorm"]["Standardizer"]
    mean = scale["mean_1_D"][0]
    tensors = {"log_std": policy["logstdevs_1_Da"][0].astype(np.float32), "obs_mean": mean}
    tensors["obs_std"] = np.sqrt(np.maximum(0, scale["meansq_1_D"][0] - mean**2)) + 1e-6
    for index, layer in enumerate(layers):
        tensors[f"layer{index}.weight"] = layer["W"].T.astype(np.float32)
        tensors[f"layer{index}.bias"] = layer["b"][0].astype(np.float32)
    return tensors, {"activation": found["nonlin_type"], "clip_obs": "inf", "squash": "clip"}


def read_stable_baselines(content: bytes, normalisation: bytes | None) -> tuple[Tensors, dict[str, str]]:
    """Tensors and settings of a Stable-Baselines3 policy; `normalisation` is its `vecnormalize.pkl`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        weights = read_tensors(archive.read("policy.pth"))
        options = json.loads(archive.read("data")).get("policy_kwargs", {})
    squashed = "actor.mu.weight" in weights  # SAC and TQC
    hidden, out = ("actor.latent_pi", "actor.mu") if squashed else ("mlp_extractor.policy_net", "action_net")
    numbers = sorted({int(name.split(".")[-2]) for name in weights if name.startswith(f"{hidden}.")})
    names = [*(f"{hidden}.{number}" for number in numbers), out]
    tensors: Tensors = {}
    for index, name in enumerate(names):
        weight = weights[f"{name}.weight"]
        tensors[f"layer{index}.weight"] = weight
        tensors[f"layer{index}.bias"] = weights.get(f"{name}.bias", np.zeros(len(weight), np.float32))
    if squashed:
        tensors |= {f"log_std_layer.{part}": weights[f"actor.log_std.{part}"] for part in ("weight", "bias")}
    elif "log_std" in weights:
        tensors["log_std"] = weights["log_std"]
    clip = "inf"
    if normalisation is not None:
        scale = read_pickle(normalisation)
        tensors["obs_mean"] = scale["obs_rms"]["mean"]
        tensors["obs_std"] = np.sqrt(scale["obs_rms"]["var"] + scale["epsilon"])
        clip = str(float(scale["clip_obs"]))
    relu = squashed or "ReLU" in str(options.get("activation_fn", ""))
    activation = "none" if len(names) == 1 else "relu" if relu else "tanh"
    return tensors, {"activation": activation, "clip_obs": clip, "squash": "tanh" if squashed else "clip"}


def freeze_time(tensors: Tensors, time: float, clip: float) -> None:
    """Fold the last input, the clock 1 - t / 1000, into the first bias as if it stood still."""
    value = np.clip((time - tensors["obs_mean"][-1]) / tensors["obs_std"][-1], -clip, clip)
    weight = tensors["layer0.weight"]
    tensors["layer0.bias"] = tensors["layer0.bias"] + weight[:, -1] * np.float32(value)
    _keep(tensors, np.arange(weight.shape[1] - 1))


def fit_inputs(env: str, is_berkeley: bool, tensors: Tensors) -> list[dict[str, object]]:
    """Fit the inputs to current environments; returns the environments, each with the tensor of the inputs it gives."""
    inputs: dict[str, str | None] = {"v5": None, "v4": None}
    options: dict[str, object] = {}
    if env == "Ant" and is_berkeley:
        # Ant-v5 lacks the contact forces of the world body, which are always 0.
        inputs["v4"], options = "obs_index_v4", {"use_contact_forces": True}
        tensors["obs_index_v4"] = np.array([*range(27), *range(33, 111)])
        _keep(tensors, tensors["obs_index_v4"])
        _ignore(tensors, np.flatnonzero(tensors["obs_std"] <= 2e-6))  # constant in training
    elif env == "Ant":
        # Contact forces were constant 0 in training; with real ones these policies fail.
        inputs["v5"] = "obs_index_v5"
        tensors["obs_index_v5"] = np.arange(27)
        _keep(tensors, tensors["obs_index_v5"])
    elif env == "Humanoid":
        # Humanoid-v5 lacks the entries of the world body and the root, which are always 0: inertia, velocity, actuator
        # and contact forces. The masses of the 13 bodies were constant in training and have other values now.
        inputs["v4"] = "obs_index_v4"
        absent = {*range(45, 55), *range(185, 191), *range(269, 275), *range(292, 298)}
        tensors["obs_index_v4"] = np.array([index for index in range(376) if index not in absent])
        _keep(tensors, tensors["obs_index_v4"])
        _ignore(tensors, 45 + 10 * np.arange(13) + 9)
    return [
        {"id": f"{env}-{version}", "kwargs": options if version == "v4" else {}, "obs_index": index}
        for version, index in inputs.items()
    ]


def _keep(tensors: Tensors, inputs: Array) -> None:
    """Keep some inputs of the first layer."""
    tensors["layer0.weight"] = tensors["layer0.weight"][:, inputs]
    tensors |= {name: tensors[name][inputs] for name in ("obs_mean", "obs_std")}


def _ignore(tensors: Tensors, inputs: Array) -> None:
    """Give some inputs of the first layer no weight."""
    weight, std = tensors["layer0.weight"].copy(), tensors["obs_std"].copy()
    weight[:, inputs], std[inputs] = 0, 1
    tensors |= {"layer0.weight": weight, "obs_std": std}


def actor_file(name: str, repository: Path) -> bytes:
    """The content of an actor file, made from a copy of the repository of its policy."""
    source = SOURCES[name]
    path = repository / source.path
    content = path.read_bytes()
    found = [] if source.is_berkeley else sorted(path.parent.glob("*/vecnormalize.pkl"))
    normalisation = found[0].read_bytes() if found else None
    try:
        if source.is_berkeley:
            tensors, settings = read_berkeley(content)
        else:
            tensors, settings = read_stable_baselines(content, normalisation)
        if source.time is not None:
            freeze_time(tensors, source.time, float(settings["clip_obs"]))
        envs = fit_inputs(source.env, source.is_berkeley, tensors)
    except Exception as error:  # an invalid pickle may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a policy of the expected format ({reason})") from error
    num_actions, limit = LIMITS[source.env]
    tensors["action_high"] = np.full(num_actions, limit, np.float32)
    tensors["action_low"] = -tensors["action_high"]
    metadata = {
        "name": name,
        "envs": json.dumps(envs),
        "n_layers": str(sum(each.endswith(".weight") and each.startswith("layer") for each in tensors)),
        **settings,
        "source": f"{BERKELEY if source.is_berkeley else DLR}: {source.path}",
        "licence": "MIT, see the LICENSE of the repository",
    }
    return to_safetensors(tensors, metadata)


def to_safetensors(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file, in a fixed order; the library writes metadata in random order."""
    kinds = {"float32": "F32", "float64": "F64", "int64": "I64"}
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    content, end = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):  # keeps every tensor aligned
        array = np.ascontiguousarray(tensors[name])
        start, end = end, end + array.nbytes
        header[name] = {"dtype": kinds[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
        content.append(array.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *content])


def build(names: list[str], repositories: Mapping[bool, Path], out: Path, sums: Mapping[str, str]) -> None:
    """Write actor files whose SHA-256 is the recorded one; `repositories` are by `is_berkeley`."""
    for name in names:
        content = actor_file(name, repositories[SOURCES[name].is_berkeley])
        found = hashlib.sha256(content).hexdigest()
        if found != sums[name]:
            commit = (BERKELEY if SOURCES[name].is_berkeley else DLR).split()[-1]
            raise ValueError(
                f"{name}: expected SHA-256 {sums[name]}, got {found}; check out commit {commit} of the repository"
            )
        write_atomically(out / f"{name}.safetensors", content)
        print(f"{out / name}.safetensors: {found}")
    for key, repository in repositories.items():
        licence = "berkeleydeeprlcourse-homework" if key else "DLR-RM-rl-trained-agents"
        write_atomically(out / f"{licence}.LICENSE", (repository / "LICENSE").read_bytes())


def main() -> int:
    """Parse flags and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="actors to make; default: all of the repositories that are given")
    parser.add_argument("--berkeley", type=Path, help="copy of github.com/berkeleydeeprlcourse/homework")
    parser.add_argument("--dlr", type=Path, help="copy of github.com/DLR-RM/rl-trained-agents")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    given = {True: options.berkeley, False: options.dlr}
    repositories = {key: folder for key, folder in given.items() if folder is not None}
    names = options.names or [name for name, source in SOURCES.items() if source.is_berkeley in repositories]
    try:
        for name in names:
            if name not in SOURCES:
                raise ValueError(f"no actor {name!r}; valid are {', '.join(SOURCES)}")
            if SOURCES[name].is_berkeley not in repositories:
                raise ValueError(f"{name} needs --{'berkeley' if SOURCES[name].is_berkeley else 'dlr'} FOLDER")
        if not names:
            raise ValueError("name a copy of a repository with --berkeley or --dlr")
        build(names, repositories, options.out, json.loads(SUMS.read_text()))
    except (ValueError, OSError) as error:
        print(f"build.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
