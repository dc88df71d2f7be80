"""Who acts while data is collected, named in words: random actions, actor files, Stable-Baselines3, any function.

A *script* maps one observation [O], its goal [G] and a generator to one action [A]. Scripts see one environment at a
time and draw from the generator alone, so an episode does not depend on what else is being played.
"""

import hashlib
import importlib
import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Wrapper, spaces
from safetensors import SafetensorError, safe_open

from trajectory_transformer.config import require
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.data.spaces import Leaf, action_leaf
from trajectory_transformer.envs import FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID, is_minigrid
from trajectory_transformer.envs.four_rooms import Demonstrator
from trajectory_transformer.rollout import Step

Script = Callable[[FloatArray, FloatArray, np.random.Generator], npt.NDArray[Any]]

_MODES: dict[str, Literal["det", "sto"]] = {
    "det": "det",
    "deterministic": "det",
    "sto": "sto",
    "stochastic": "sto",
}
_ACTIVATIONS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "none": lambda x: x,
}
_OPTIONS = ("sigma", "eps", "share", "noise", "wander")


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """A policy in words, as `parse_actor` reads it: `hopper-expert.safetensors sto sigma=0.1 share=0.5`."""

    name: str  # random, demonstrator, expert, a file's path, or module:function
    mode: Literal["det", "sto"] = "det"  # the policy's mean, or a sample of its own Gaussian
    sigma: float = 0.0  # noise added to the clipped action, in units of half the action range
    eps: float = 0.0  # share of actions that are uniformly random instead
    share: float | None = None  # of the steps or episodes to collect; None: what the others leave, in equal parts
    noise: float = 0.1  # of the demonstrator, in units of the longest step
    wander: float = 0.25  # share of the demonstrator's steps that are random

    def __post_init__(self) -> None:
        """Refuse noise that is none."""
        require(self.sigma >= 0, f"policy {self.name}: sigma must not be negative", self.sigma)
        require(0 <= self.eps <= 1, f"policy {self.name}: eps must lie in [0, 1]", self.eps)
        require(self.share is None or 0 < self.share <= 1, f"policy {self.name}: share must lie in (0, 1]", self.share)

    @property
    def is_file(self) -> bool:
        """Whether it is read from a file."""
        return Path(self.name).suffix in (".safetensors", ".zip")

    @property
    def label(self) -> str:
        """What tells it apart from others, wherever its file lies: it seeds the policy's random stream."""
        words = [Path(self.name).stem if self.is_file else self.name]
        if self.name == "demonstrator":
            words += [f"noise={self.noise:g}", f"wander={self.wander:g}"]
        elif self.name not in ("random", "expert"):
            words.append(self.mode)
        return " ".join(words + [f"{key}={getattr(self, key):g}" for key in ("sigma", "eps") if getattr(self, key)])

    def provenance(self) -> dict[str, str | float]:
        """What a dataset's metadata says of it."""
        known: dict[str, str | float] = {"policy": self.label, "mode": self.mode, "sigma": self.sigma, "eps": self.eps}
        if self.is_file:
            path = Path(self.name)
            known |= {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        return known


def parse_actor(words: str, folder: str | Path | None = None) -> ActorSpec:
    """Read a policy's words; files are looked for in `folder` too, where `.safetensors` may be left out."""
    name, *options = words.split() or [""]
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals and key in _MODES:
            values["mode"] = _MODES[key]
            continue
        try:
            if key not in _OPTIONS:
                raise ValueError
            values[key] = float(value)
        except ValueError as error:
            raise ValueError(
                f"policy {words!r}: {option!r} must be det, sto or a number for one of {', '.join(_OPTIONS)}"
            ) from error
    return ActorSpec(name=_resolve(name, None if folder is None else Path(folder)), **values)


def _resolve(name: str, folder: Path | None) -> str:
    """The path of a policy's file; other names as they are."""
    if name in ("random", "demonstrator", "expert") or (":" in name and not Path(name).exists()):
        return name
    places = [Path(name), *([] if folder is None else [folder / name, folder / f"{name}.safetensors"])]
    for place in places:
        if place.is_file():
            if place.suffix not in (".safetensors", ".zip"):
                raise ValueError(f"policy {place}: a policy file is a .safetensors actor or a Stable-Baselines3 .zip")
            return str(place)
    raise ValueError(
        f"policy {name!r}: not random, demonstrator, expert or module:function, and no such file"
        + ("; name the folder of actor files with --policies" if folder is None else f" here or in {folder}")
    )


def make_script(
    spec: ActorSpec, env_id: str, actions: Leaf, observation_dim: int, env: Env[Any, Any] | None = None
) -> Script:
    """The script of a policy in one environment, noise included; checked against its spaces.

    The expert alone needs the environment `env` that it acts in: it plans with what only that knows (open doors).
    """
    if spec.name == "random":
        script = _random(actions)
    elif spec.name == "demonstrator":
        if env_id not in (FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID):
            raise ValueError(f"policy demonstrator knows only {FOUR_ROOMS_ID}, got --env {env_id}; try --policy random")
        script = Demonstrator(spec.noise, wander=spec.wander).act
    elif spec.name == "expert":
        if env is None or not is_minigrid(env_id):
            raise ValueError(f"policy expert knows only MiniGrid's environments, got --env {env_id}")
        script = _expert(env)
    elif Path(spec.name).suffix == ".zip":
        script = _stable_baselines(Path(spec.name), spec.mode == "det")
    elif spec.is_file:
        script = _actor_file(Path(spec.name), env_id, observation_dim, spec.mode == "sto")
    else:
        script = _function(spec.name)
    return _fitted(script, spec, actions)


def _fitted(script: Script, spec: ActorSpec, actions: Leaf) -> Script:
    """Check every action against the space, and add noise: after clipping, and clipped again.

    The order matters: many actors saturate, and a mean far outside the limits would absorb noise added before.
    """
    space = actions.space
    if not isinstance(space, spaces.Box):
        require(not spec.sigma, f"policy {spec.label}: sigma needs continuous actions, the environment has", space)
        return lambda observation, goal, rng: (
            rng.integers(0, np.array(actions.categories)).astype(np.float32)
            if spec.eps and rng.random() < spec.eps
            else _check(script(observation, goal, rng), spec, actions)
        )
    low, high = space.low.ravel(), space.high.ravel()
    half_range = 0.5 * (high - low)
    noisy = bool(spec.sigma or spec.eps)
    require(not noisy or space.is_bounded(), f"policy {spec.label}: noise needs bounded actions, got", space)

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
        if spec.eps and rng.random() < spec.eps:
            return rng.uniform(low, high).astype(np.float32)
        action = _check(script(observation, goal, rng), spec, actions)
        if spec.sigma:
            action = np.clip(action + spec.sigma * half_range * rng.standard_normal(len(action)), low, high)
        return action.astype(np.float32)

    return act


def _check(action: npt.NDArray[Any] | float, spec: ActorSpec, actions: Leaf) -> FloatArray:
    """An action as a row of numbers, refused where the environment could not take it."""
    row = np.asarray(action, dtype=np.float32)
    if row.size != actions.dim or row.ndim > max(1, len(actions.space.shape or ())):
        raise ValueError(
            f"policy {spec.label}: its actions must have {actions.dim} dimensions to fit {actions.space}, "
            f"got shape {row.shape}"
        )
    row = row.reshape(-1)
    if isinstance(actions.space, spaces.Box):
        fits = (row >= actions.space.low.ravel()) & (row <= actions.space.high.ravel())  # false for NaN
    else:
        row = row - actions.start.ravel().astype(np.float32)
        fits = (row >= 0) & (row < np.array(actions.categories)) & (row == np.rint(row))
    if not fits.all():
        raise ValueError(f"policy {spec.label}: its actions must lie in {actions.space}, got {action}")
    return row


def _random(actions: Leaf) -> Script:
    """Uniform actions."""
    space = actions.space
    if not isinstance(space, spaces.Box):
        counts = np.array(actions.categories)
        return lambda observation, goal, rng: rng.integers(0, counts).reshape(space.shape or ()) + actions.start
    if not space.is_bounded():
        raise ValueError(f"a random policy needs a bounded action space, got {space}")
    low, high = space.low.ravel(), space.high.ravel()
    return lambda observation, goal, rng: rng.uniform(low, high).astype(np.float32)


def _expert(env: Env[Any, Any]) -> Script:
    """The shortest way to the goal of a MiniGrid environment, as it stands."""
    from trajectory_transformer.envs.minigrid import GoalOnMap  # an optional dependency, here already if `env` is

    grid = env
    while isinstance(grid, Wrapper) and not isinstance(grid, GoalOnMap):
        grid = grid.env
    assert isinstance(grid, GoalOnMap), "made by make_env"
    return lambda observation, goal, rng: np.array(grid.expert_action())


def _function(name: str) -> Script:
    """`module:function` with the signature of a script; modules are found in the working folder too."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {name}: cannot be imported ({error})") from error
    if not callable(function):
        raise ValueError(f"policy {name}: must be a function of (observation, goal, rng), got {function!r}")
    script: Script = function
    return script


def _actor_file(path: Path, env_id: str, observation_dim: int, sample: bool) -> Script:
    """A Gaussian policy of dense layers in one safetensors file that describes itself; numpy only."""
    try:
        with safe_open(str(path), "np") as file:
            meta, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = {entry["id"]: entry for entry in json.loads(meta["envs"])}
        layers = [(tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"]) for i in range(int(meta["n_layers"]))]
        low, high = tensors["action_low"], tensors["action_high"]
        activation = _ACTIVATIONS[meta["activation"]]
        clip, squash = float(meta["clip_obs"]), meta["squash"] == "tanh"
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"policy {path}: not a whole actor file ({error})") from error
    if env_id not in known:
        raise ValueError(f"policy {path}: made for {', '.join(known)}, got --env {env_id}")
    chosen = tensors[known[env_id]["obs_index"]] if known[env_id]["obs_index"] else np.arange(observation_dim)
    if len(chosen) != layers[0][0].shape[1] or chosen.max() >= observation_dim:
        raise ValueError(
            f"policy {path}: reads {layers[0][0].shape[1]} numbers, the environment shows {observation_dim}"
        )
    mean, std = tensors.get("obs_mean"), tensors.get("obs_std")
    spread = _spread(tensors) if sample else None

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
        x = observation[chosen]
        if mean is not None:
            x = np.clip((x - mean) / std, -clip, clip).astype(np.float32)
        for weight, bias in layers[:-1]:
            x = activation(_dense(weight, x) + bias)
        u = _dense(layers[-1][0], x) + layers[-1][1]
        if spread is not None:
            u = u + spread(x) * rng.standard_normal(len(u), dtype=np.float32)
        action = low + 0.5 * (np.tanh(u) + 1) * (high - low) if squash else u
        return np.asarray(np.minimum(np.maximum(action, low), high), dtype=np.float32)

    return act


def _spread(tensors: dict[str, FloatArray]) -> Callable[[FloatArray], FloatArray] | None:
    """Standard deviation [A] of the policy's Gaussian from its last hidden layer; None: it has none (linear actors)."""
    if "log_std_layer.weight" in tensors:
        weight, bias = tensors["log_std_layer.weight"], tensors["log_std_layer.bias"]
        return lambda x: np.exp(np.minimum(np.maximum(_dense(weight, x) + bias, -20), 2))
    if "log_std" in tensors:
        std = np.exp(tensors["log_std"])
        return lambda x: std
    return None


def _dense(weight: FloatArray, x: FloatArray) -> FloatArray:
    """Matrix times vector: weight [out, in], x [in] -> [out].

    Not by BLAS, whose order of summation depends on the machine's threads: an episode is to depend on its seed alone.
    """
    return np.asarray(np.einsum("oi,i->o", weight, x))


def _stable_baselines(path: Path, deterministic: bool) -> Script:
    """A policy saved by Stable-Baselines3. Its zip holds pickles: load only what you trust."""
    try:
        library = importlib.import_module("stable_baselines3")
    except ImportError as error:
        raise ImportError("Stable-Baselines3 policies need: pip install 'trajectory-transformer[sb3]'") from error
    import torch  # loaded already wherever models are; the generator below is its global one

    try:
        with zipfile.ZipFile(path) as file:
            data = json.loads(file.read("data"))
        family = data["policy_class"]["__module__"].split(".")[1]
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ValueError(f"policy {path}: not a Stable-Baselines3 zip ({error})") from error
    algorithm = family.upper() if family != "common" else "PPO" if "clip_range" in data else "A2C"
    model = getattr(library, algorithm).load(path, device="cpu")
    certain = deterministic or algorithm == "DQN"  # its exploration draws from generators that cannot be seeded here

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> npt.NDArray[Any]:
        torch.manual_seed(int(rng.integers(2**62)))
        return np.asarray(model.predict(observation, deterministic=certain)[0])

    return act


class RandomPolicy:
    """Samples the action space uniformly, categories as their numbers."""

    def __init__(self, space: spaces.Space[Any], rng: np.random.Generator) -> None:
        """Sample a bounded box, or categories."""
        if isinstance(space, spaces.Box) and not space.is_bounded():
            raise ValueError(f"a random policy needs a bounded action space, got {space}")
        self._leaf = action_leaf(space)
        self._rng = rng

    def act(self, step: Step) -> FloatArray:
        """Uniform actions [E, A]."""
        shape = (len(step.observations), self._leaf.dim)
        if isinstance(self._leaf.space, spaces.Box):
            low, high = self._leaf.space.low.ravel(), self._leaf.space.high.ravel()
            return self._rng.uniform(low, high, shape).astype(np.float32)
        return self._rng.integers(0, np.array(self._leaf.categories), shape).astype(np.float32)


class ScriptedPolicy:
    """Asks a function for the action of each environment."""

    def __init__(
        self, script: Callable[[FloatArray, FloatArray, np.random.Generator], FloatArray], rng: np.random.Generator
    ) -> None:
        """Act by `script(observation [O], goal [G], rng) -> action [A]`."""
        self._script = script
        self._rng = rng

    def act(self, step: Step) -> FloatArray:
        """Actions [E, A]."""
        pairs = zip(step.observations, step.goals, strict=True)
        return np.stack([self._script(observation, goal, self._rng) for observation, goal in pairs])
