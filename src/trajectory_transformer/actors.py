"""Policies that collect data: random actions, actor files, Stable-Baselines3 models, scripted experts, any function.

A *script* is a function of one observation [O], its goal [G] and a random generator that returns one action [A]. A
script sees one environment at a time and draws random numbers only from that generator, so an episode does not depend
on the other episodes being played.
"""

import hashlib
import importlib
import inspect
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Wrapper, spaces
from safetensors import SafetensorError, safe_open

from trajectory_transformer.config import require
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.data.spaces import Leaf, action_leaf
from trajectory_transformer.envs import FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID, is_ant_maze, is_minigrid
from trajectory_transformer.envs.four_rooms import Demonstrator
from trajectory_transformer.files import allow_local_modules, naming
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
_WALKING = ("noise", "wander", "stray")
_OPTIONS = ("sigma", "eps", "share", *_WALKING)
_SCRIPTED = ("random", "demonstrator", "expert")
_SUFFIXES = (".safetensors", ".zip")


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """A policy and its options, as `parse_actor` reads them: `hopper-expert.safetensors sto sigma=0.1 share=0.5`."""

    name: str  # random, demonstrator, expert, the path of a file, or module:function
    mode: Literal["det", "sto"] = "det"  # the mean of the policy's Gaussian, or a sample of it
    sigma: float = 0.0  # standard deviation of the noise added to clipped actions, in units of half the action range
    eps: float = 0.0  # probability of a uniformly random action instead
    share: float | None = None  # of the steps or episodes to collect; None: an equal part of the remainder
    noise: float = 0.1  # demonstrator, walker: standard deviation of the noise, in units of the longest step or torque
    wander: float = 0.25  # demonstrator: probability of a random step; walker: of a wrong turn at a cell of the maze
    stray: float = 0.0  # walker: probability in every step that it begins to walk to a random point nearby
    script: Script | None = field(default=None, compare=False)  # set by `script_actor`: the function itself

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        require(self.sigma >= 0, f"policy {self.name}: sigma must not be negative", self.sigma)
        require(0 <= self.eps <= 1, f"policy {self.name}: eps must lie in [0, 1]", self.eps)
        require(0 <= self.noise < math.inf, f"policy {self.name}: noise must be finite and at least 0", self.noise)
        for name in ("wander", "stray"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"policy {self.name}: {name} must lie in [0, 1]", value)
        require(self.share is None or 0 < self.share <= 1, f"policy {self.name}: share must lie in (0, 1]", self.share)

    @property
    def is_file(self) -> bool:
        """Whether the policy is read from a file."""
        return self.script is None and Path(self.name).suffix in _SUFFIXES

    @property
    def runs_code(self) -> bool:
        """Whether making the policy runs code: that of a module, or the pickles of Stable-Baselines3."""
        return self.script is None and (Path(self.name).suffix == ".zip" or (":" in self.name and not self.is_file))

    @property
    def label(self) -> str:
        """A name without folders that is unique in a dataset; the random stream of an episode is derived from it."""
        words = [Path(self.name).stem if self.is_file else self.name]
        if self.name == "demonstrator":
            words += [f"noise={self.noise:g}", f"wander={self.wander:g}"]
        elif self.name not in ("random", "expert"):
            words.append(self.mode)
            usual = ActorSpec(name=self.name)
            words += [f"{key}={getattr(self, key):g}" for key in _WALKING if getattr(self, key) != getattr(usual, key)]
        return " ".join(words + [f"{key}={getattr(self, key):g}" for key in ("sigma", "eps") if getattr(self, key)])

    def provenance(self) -> dict[str, str | float]:
        """What the metadata of a dataset records about the policy."""
        known: dict[str, str | float] = {"policy": self.label, "mode": self.mode, "sigma": self.sigma, "eps": self.eps}
        if self.is_file:
            path = Path(self.name)
            known |= {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        return known


def parse_actor(text: str, folder: str | Path | None = None) -> ActorSpec:
    """Parse a policy and its options; files are also searched in `folder`, with or without `.safetensors`."""
    name, *options = text.split() or [""]
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
                f"policy {text!r}: an option must be det, sto or NAME=NUMBER with NAME one of {', '.join(_OPTIONS)}, "
                f"got {option!r}"
            ) from error
    return ActorSpec(name=_find(name, None if folder is None else Path(folder)), **values)


def script_actor(script: Script) -> ActorSpec:
    """A function of (observation, goal, rng) as a policy; named `module:function`, as on the command line."""
    name = getattr(script, "__qualname__", None) or type(script).__qualname__
    return ActorSpec(name=f"{script.__module__}:{name}", script=script)


def _find(name: str, folder: Path | None) -> str:
    """The path of an actor file; other names are returned unchanged."""
    if name in _SCRIPTED or (":" in name and not Path(name).exists()):
        return name
    for path in [Path(name), *([] if folder is None else [folder / name, folder / f"{name}.safetensors"])]:
        if path.is_file():
            if path.suffix not in _SUFFIXES:
                raise ValueError(
                    f"policy {path}: a policy file must be a .safetensors actor file or a Stable-Baselines3 .zip"
                )
            return str(path)
    raise ValueError(
        f"policy {name!r}: not one of {', '.join(_SCRIPTED)}, not module:function, and no such file "
        + ("here; give the folder of actor files with --policies" if folder is None else f"here or in {folder}")
    )


def make_script(
    spec: ActorSpec, env_id: str, actions: Leaf, observation_dim: int, env: Env[Any, Any] | None = None
) -> Script:
    """Make the script of a policy, with its noise, and check it against the spaces of the environment.

    Only `expert` and walkers use `env`: they read the environment that they act in (which doors are open, the maze).
    """
    if spec.script is not None:
        script = spec.script
    elif spec.name == "random":
        script = _random(actions)
    elif spec.name == "demonstrator":
        if env_id not in (FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID):
            raise ValueError(
                f"policy demonstrator: supports only {FOUR_ROOMS_ID} and {FOUR_ROOMS_RACE_ID}, "
                f"got environment {env_id}; use policy random"
            )
        script = Demonstrator(spec.noise, wander=spec.wander).act
    elif spec.name == "expert":
        if env is None or not is_minigrid(env_id):
            raise ValueError(f"policy expert: supports only MiniGrid environments, got environment {env_id}")
        script = _expert(env)
    elif Path(spec.name).suffix == ".zip":
        script = _stable_baselines(Path(spec.name), spec.mode == "det")
    elif spec.is_file and _is_walker(Path(spec.name)):
        script = _walker(spec, env_id, env)
    elif spec.is_file:
        script = _actor_file(Path(spec.name), env_id, observation_dim, spec.mode == "sto")
    else:
        script = _function(spec.name)
    return _with_noise(script, spec, actions)


def _with_noise(script: Script, spec: ActorSpec, actions: Leaf) -> Script:
    """Check every action against the space, then add noise and clip again.

    Noise is added after the policy's own clipping: many actors saturate, and noise added to a mean far outside the
    limits would be clipped away.
    """
    space = actions.space
    if not isinstance(space, spaces.Box):
        require(not spec.sigma, f"policy {spec.label}: sigma needs a continuous action space", space)
        return lambda observation, goal, rng: (
            rng.integers(0, np.array(actions.categories)).astype(np.float32)
            if spec.eps and rng.random() < spec.eps
            else _check(script(observation, goal, rng), spec, actions)
        )
    low, high = space.low.ravel(), space.high.ravel()
    half_range = 0.5 * (high - low)
    noisy = bool(spec.sigma or spec.eps)
    require(not noisy or space.is_bounded(), f"policy {spec.label}: sigma and eps need a bounded action space", space)

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
        if spec.eps and rng.random() < spec.eps:
            return rng.uniform(low, high).astype(np.float32)
        action = _check(script(observation, goal, rng), spec, actions)
        if spec.sigma:
            action = np.clip(action + spec.sigma * half_range * rng.standard_normal(len(action)), low, high)
        return action.astype(np.float32)

    return act


def _check(action: npt.NDArray[Any] | float, spec: ActorSpec, actions: Leaf) -> FloatArray:
    """Flatten an action to a row [A], categories counted from 0; raise if it is not in the action space."""
    row = np.asarray(action, dtype=np.float32)
    if row.size != actions.dim or row.ndim > max(1, len(actions.space.shape or ())):
        raise ValueError(
            f"policy {spec.label}: an action must have {actions.dim} dimensions to fit {actions.space}, "
            f"got shape {row.shape}"
        )
    row = row.reshape(-1)
    if isinstance(actions.space, spaces.Box):
        fits = (row >= actions.space.low.ravel()) & (row <= actions.space.high.ravel())  # false for NaN
    else:
        row = row - actions.start.ravel().astype(np.float32)
        fits = (row >= 0) & (row < np.array(actions.categories)) & (row == np.rint(row))
    if not fits.all():
        raise ValueError(f"policy {spec.label}: an action must lie in {actions.space}, got {action}")
    return row


def _random(actions: Leaf) -> Script:
    """Uniformly random actions."""
    space = actions.space
    if not isinstance(space, spaces.Box):
        counts = np.array(actions.categories)
        return lambda observation, goal, rng: rng.integers(0, counts).reshape(space.shape or ()) + actions.start
    if not space.is_bounded():
        raise ValueError(f"policy random: needs a bounded action space, got {space}")
    low, high = space.low.ravel(), space.high.ravel()
    return lambda observation, goal, rng: rng.uniform(low, high).astype(np.float32)


def _expert(env: Env[Any, Any]) -> Script:
    """A shortest path to the goal of a MiniGrid environment."""
    from trajectory_transformer.envs.minigrid import GoalOnMap  # an optional dependency, installed if `env` exists

    grid = env
    while isinstance(grid, Wrapper) and not isinstance(grid, GoalOnMap):
        grid = grid.env
    assert isinstance(grid, GoalOnMap), "made by make_env"
    return lambda observation, goal, rng: np.array(grid.expert_action())


def _is_walker(path: Path) -> bool:
    """Whether an actor file holds a goal-reaching ant; a broken file is reported by those who read it."""
    try:
        with safe_open(str(path), "np") as file:
            return {"obs.mean", "obs.var", "actor.0.weight"} <= set(file.keys())
    except SafetensorError:
        return False


def _walker(spec: ActorSpec, env_id: str, env: Env[Any, Any] | None) -> Script:
    """A goal-reaching ant that walks from cell to cell of a maze."""
    if env is None or not is_ant_maze(env_id):
        raise ValueError(f"policy {spec.name}: an ant that walks through mazes, got environment {env_id}")
    # Optional dependencies, installed if `env` exists.
    from trajectory_transformer.envs.ant_maze import AntMaze
    from trajectory_transformer.envs.ant_walker import AntWalker, Wanderer

    assert isinstance(env.unwrapped, AntMaze), "made by make_env"
    return Wanderer(env.unwrapped, AntWalker(spec.name), noise=spec.noise, wander=spec.wander, stray=spec.stray).act


def _function(name: str) -> Script:
    """Import the script `module:function`; modules are also searched in the working directory."""
    module, _, attribute = name.partition(":")
    allow_local_modules()
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs code of the user
        raise ValueError(f"policy {name}: cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ValueError(f"policy {name}: must be a function of (observation, goal, rng), got {function!r}")
    try:
        signature = inspect.signature(function)
        signature.bind(None, None, None)
    except ValueError:
        pass  # some functions of extension modules have no signature
    except TypeError as error:
        raise ValueError(
            f"policy {name}: must be a function of (observation, goal, rng), got {attribute}{signature}"
        ) from error
    script: Script = function
    return script


def _actor_file(path: Path, env_id: str, observation_dim: int, sample: bool) -> Script:
    """A Gaussian MLP policy from a safetensors file with metadata; evaluated with NumPy."""
    kinds = (SafetensorError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, OSError)
    with naming(f"policy {path}", "not a complete actor file", *kinds):
        with safe_open(str(path), "np") as file:
            meta, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = {str(entry["id"]): entry for entry in json.loads(meta["envs"])}
        num_layers = int(meta["n_layers"])
        require(1 <= num_layers <= len(tensors), "n_layers must be the number of layers", num_layers)
        layers = [(tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"]) for i in range(num_layers)]
        low, high = tensors["action_low"], tensors["action_high"]
        activation = _ACTIVATIONS[meta["activation"]]
        clip, squash = float(meta["clip_obs"]), meta["squash"] == "tanh"
        if env_id not in known:
            raise ValueError(f"policy {path}: made for {', '.join(known)}, got environment {env_id}")
        named = known[env_id]["obs_index"]
        indices = tensors[named] if named else np.arange(observation_dim)
        inputs = layers[0][0].shape[1]
        fits = indices.dtype.kind in "iu" and indices.shape == (inputs,) and bool((indices >= 0).all())
        if not fits or indices.max(initial=-1) >= observation_dim:
            raise ValueError(
                f"policy {path}: the network has {inputs} inputs, which do not fit the {observation_dim} observation "
                f"dimensions of {env_id}"
            )
        mean, std = tensors.get("obs_mean"), tensors.get("obs_std")
        _check_actor(tensors, layers, inputs)
        require(clip > 0, "clip_obs must be above 0", clip)
        action_std = _action_std(tensors) if sample else None

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
        x = observation[indices]
        if mean is not None:
            x = np.clip((x - mean) / std, -clip, clip).astype(np.float32)
        for weight, bias in layers[:-1]:
            x = activation(_matvec(weight, x) + bias)
        u = _matvec(layers[-1][0], x) + layers[-1][1]
        if action_std is not None:
            u = u + action_std(x) * rng.standard_normal(len(u), dtype=np.float32)
        action = low + 0.5 * (np.tanh(u) + 1) * (high - low) if squash else u
        return np.asarray(np.minimum(np.maximum(action, low), high), dtype=np.float32)

    return act


def _check_actor(
    tensors: dict[str, npt.NDArray[Any]], layers: list[tuple[FloatArray, FloatArray]], inputs: int
) -> None:
    """Refuse numbers that are not finite and shapes that do not fit each other."""
    for name, tensor in tensors.items():
        require(tensor.dtype.kind in "iuf" and bool(np.isfinite(tensor).all()), f"{name} must be finite", tensor.dtype)
    width, hidden = inputs, inputs
    for index, (weight, bias) in enumerate(layers):
        rows = len(bias)
        require(
            weight.shape == (rows, width) and bias.ndim == 1, f"layer {index} must have {width} inputs", weight.shape
        )
        width, hidden = rows, width
    expected: dict[str, tuple[int, ...]] = {"log_std_layer.weight": (width, hidden)}
    expected |= dict.fromkeys(("action_low", "action_high", "log_std", "log_std_layer.bias"), (width,))
    expected |= dict.fromkeys(("obs_mean", "obs_std"), (inputs,))
    for name, shape in expected.items():
        if name in tensors:
            require(tensors[name].shape == shape, f"{name} must have shape {shape}", tensors[name].shape)
    for one, other in (("obs_mean", "obs_std"), ("log_std_layer.weight", "log_std_layer.bias")):
        require((one in tensors) == (other in tensors), f"{one} and {other} belong together", "one of them")
    require(bool((tensors.get("obs_std", np.ones(1)) > 0).all()), "obs_std must be above 0", "others")
    require(bool((tensors["action_low"] <= tensors["action_high"]).all()), "action_low must not exceed action_high", "")


def _action_std(tensors: dict[str, FloatArray]) -> Callable[[FloatArray], FloatArray] | None:
    """Standard deviation [A] as a function of the last hidden layer; None for deterministic (linear) actors."""
    if "log_std_layer.weight" in tensors:
        weight, bias = tensors["log_std_layer.weight"], tensors["log_std_layer.bias"]
        return lambda x: np.exp(np.minimum(np.maximum(_matvec(weight, x) + bias, -20), 2))
    if "log_std" in tensors:
        std = np.exp(tensors["log_std"])
        return lambda x: std
    return None


def _matvec(weight: FloatArray, x: FloatArray) -> FloatArray:
    """Matrix-vector product: weight [out, in], x [in] -> [out].

    Not BLAS: its order of summation depends on the number of threads, and an episode must depend on its seed only.
    """
    return np.asarray(np.einsum("oi,i->o", weight, x))


def _stable_baselines(path: Path, deterministic: bool) -> Script:
    """A policy saved by Stable-Baselines3. The file contains pickles: load only files that you trust."""
    try:
        library = importlib.import_module("stable_baselines3")
    except ImportError as error:
        raise ImportError("Stable-Baselines3 policies need: pip install 'trajectory-transformer[sb3]'") from error
    import torch  # Stable-Baselines3 samples with torch's global generator

    try:
        with zipfile.ZipFile(path) as file:
            data = json.loads(file.read("data"))
        family = data["policy_class"]["__module__"].split(".")[1]
        algorithm = family.upper() if family != "common" else "PPO" if "clip_range" in data else "A2C"
        model = getattr(library, algorithm).load(path, device="cpu")
    except Exception as error:  # the library and its pickles raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"policy {path}: not a Stable-Baselines3 zip file ({reason})") from error
    # The exploration of DQN draws from generators that cannot be seeded here.
    deterministic = deterministic or algorithm == "DQN"

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> npt.NDArray[Any]:
        torch.manual_seed(int(rng.integers(2**62)))
        try:
            return np.asarray(model.predict(observation, deterministic=deterministic)[0])
        except Exception as error:
            raise ValueError(f"policy {path}: cannot act ({' '.join(str(error).split())[:200]})") from error

    return act


class RandomPolicy:
    """A batched policy of uniformly random actions."""

    def __init__(self, space: spaces.Space[Any], rng: np.random.Generator) -> None:
        """Sample from a bounded Box or a discrete space."""
        if isinstance(space, spaces.Box) and not space.is_bounded():
            raise ValueError(f"policy random: needs a bounded action space, got {space}")
        self._leaf = action_leaf(space)
        self._rng = rng

    def act(self, step: Step) -> FloatArray:
        """Random actions [E, A], categories counted from 0."""
        shape = (len(step.observations), self._leaf.dim)
        if isinstance(self._leaf.space, spaces.Box):
            low, high = self._leaf.space.low.ravel(), self._leaf.space.high.ravel()
            return self._rng.uniform(low, high, shape).astype(np.float32)
        return self._rng.integers(0, np.array(self._leaf.categories), shape).astype(np.float32)


class ScriptedPolicy:
    """A batched policy that calls a script once per environment."""

    def __init__(self, script: Script, rng: np.random.Generator) -> None:
        """Act by `script(observation [O], goal [G], rng) -> action [A]`."""
        self._script = script
        self._rng = rng

    def act(self, step: Step) -> FloatArray:
        """Actions [E, A]."""
        pairs = zip(step.observations, step.goals, strict=True)
        return np.stack([self._script(observation, goal, self._rng) for observation, goal in pairs])
