"""A trained baseline: networks of one or several training seeds, what scales their inputs, and the policy they make."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Algorithm, Settings, Sizes
from trajectory_transformer.baselines.data import Scaling
from trajectory_transformer.baselines.presets import changed, find_preset, settings_dict
from trajectory_transformer.checkpoint import check_finite, check_stored, load_checkpoint, save_checkpoint
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import FloatArray, Metadata
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import MAX_TIMES
from trajectory_transformer.rollout import Dims, Step
from trajectory_transformer.search.beam import Objective
from trajectory_transformer.search.objectives import QFunction, q_guided

KIND = "trajectory-transformer baseline"
_SCALING = "scaling."


def least_numbers(settings: Settings, dims: Dims, num_learners: int) -> int:
    """How many weights the networks have at least."""
    sizes = [max(dims.observation + dims.goal, dims.action), *settings.hidden]
    numbers = num_learners * sum(inputs * outputs for inputs, outputs in pairwise(sizes))
    return numbers * int(getattr(settings, "num_networks", 1))


class BaselinePolicy:
    """The policy of one training seed; plays in any number of environments."""

    def __init__(self, algorithm: Algorithm[Any], scaling: Scaling, dims: Dims, metadata: Metadata) -> None:
        """Act with an algorithm that has a single learner."""
        self.dims = dims
        self.metadata = metadata
        self.plan_seconds: deque[float] = deque(maxlen=MAX_TIMES)  # times of the last calls of `act`
        self._actor = algorithm.make_actor(scaling)

    def act(self, step: Step) -> FloatArray:
        """Return actions [E, A] in the units of the dataset."""
        started = time.perf_counter()
        actions = self._actor(step)
        self.plan_seconds.append(time.perf_counter() - started)
        return actions


@dataclass(frozen=True)
class Baseline:
    """What training a baseline gives: one learner per seed."""

    name: str  # of the preset
    algorithm: Algorithm[Any]
    scaling: Scaling
    dims: Dims
    seeds: tuple[int, ...]
    metadata: Metadata  # of the dataset it was trained on: environment id, origin

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.scaling.observation_mean.device

    def only(self, seed: int | None = None) -> "Baseline":
        """The learner of one training seed; None: the first."""
        if seed is not None and seed not in self.seeds:
            raise ValueError(f"this baseline was trained with the seeds {list(self.seeds)}, not with {seed}")
        return self.take([0 if seed is None else self.seeds.index(seed)])

    def take(self, learners: Sequence[int]) -> "Baseline":
        """Some of the learners, by index."""
        return self._copy(self.algorithm.settings, learners)

    def with_settings(self, values: Mapping[str, object]) -> "Baseline":
        """The same networks with other settings for acting, for example {"target_return": 1800.0} of a DT."""
        return self._copy(changed(self.algorithm.settings, values), range(len(self.seeds)))

    def _copy(self, settings: Settings, learners: Sequence[int]) -> "Baseline":
        """Some of the learners with settings that leave the shapes of their networks unchanged."""
        seeds = tuple(self.seeds[index] for index in learners)
        chosen = type(self.algorithm)(settings, sizes_of(self.dims), seeds, self.device)
        for name, group in self.algorithm.groups.items():
            for key, value in group.tensors.items():
                per_learner = value.detach().view(len(self.seeds), -1, *value.shape[1:])[list(learners)].flatten(0, 1)
                own = chosen.groups[name].tensors[key]
                require(own.shape == per_learner.shape, "settings must not change the networks", f"a new {name}.{key}")
                own.data.copy_(per_learner)
        return Baseline(self.name, chosen, self.scaling.take(learners), self.dims, seeds, self.metadata)

    def policy(self, seed: int | None = None) -> BaselinePolicy:
        """The policy of one training seed; None: the first."""
        one = self.only(seed)
        return BaselinePolicy(one.algorithm, one.scaling, self.dims, self.metadata)

    def q_function(self, seed: int | None = None) -> QFunction:
        """Q(observations [..., O], actions [..., A]) -> values [...] of one training seed; None: the first.

        Observations (followed by the goal, if the data has goals) and actions are in the units of the dataset. Values
        are divided by the factor that rewards were multiplied with; a reward shift (`minus-one`, `centered`) stays.
        """
        one = self.only(seed)

        @torch.no_grad()
        def q(observations: Tensor, actions: Tensor) -> Tensor:
            shape = observations.shape[:-1]
            states = one.scaling.observations(observations.reshape(1, -1, observations.shape[-1]))
            scaled = one.scaling.actions(actions.reshape(1, -1, actions.shape[-1]))
            return (one.algorithm.q_values(states, scaled) / one.scaling.reward_scale[:, None]).reshape(shape)

        return q

    def objective(self, model: TrajectoryModel, *, seed: int | None = None, discount: float | None = None) -> Objective:
        """Plan with a model for the Q function of one training seed, see `q_guided`; refuses what does not fit.

        `discount` is by default the one that Q was trained with. The weights must be on the model's device.
        """
        layout, metadata = model.layout, model.metadata
        if self.dims.goal or layout.goal_dim:
            raise ValueError(f"planning by the Q function of {self.name} is for data without goals")
        if (layout.observation_dim, layout.action_dim) != (self.dims.observation, self.dims.action):
            raise ValueError(
                f"the Q function of {self.name} has {self.dims.observation} observation and {self.dims.action} action "
                f"dimensions, the model {layout.observation_dim} and {layout.action_dim}"
            )
        # Other data of the same environment is fine, for example more of it, and so is data of an unknown one.
        known = "env" in self.metadata and "env" in metadata
        differs = next((key for key in ("env", "env_options") if self.metadata.get(key) != metadata.get(key)), "")
        if known and differs:
            raise ValueError(
                f"the Q function of {self.name} was trained for another environment than the model: "
                f"{differs} is {self.metadata.get(differs)!r} for Q and {metadata.get(differs)!r} for the model"
            )
        one = self.only(seed)
        q = one.q_function()
        q(*(torch.zeros(1, size, device=self.device) for size in (self.dims.observation, self.dims.action)))
        chosen = getattr(one.algorithm.settings, "discount", None) if discount is None else discount
        assert isinstance(chosen, float), "algorithms with a Q function have a discount"
        require(0.0 <= chosen <= 1.0, "the discount must lie in [0, 1]", chosen)
        shift = float(one.scaling.reward_shift[0] / one.scaling.reward_scale[0])
        return q_guided(q, chosen, reward_shift=shift)

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint folder."""
        tensors = {
            f"{name}.{key}": value
            for name, group in self.algorithm.groups.items()
            for key, value in group.tensors.items()
        }
        tensors |= {_SCALING + field.name: getattr(self.scaling, field.name) for field in fields(Scaling)}
        description = {
            "algorithm": {"name": self.name, "settings": settings_dict(self.algorithm.settings)},
            "dims": self.dims._asdict(),
            "seeds": list(self.seeds),
            "metadata": dict(self.metadata),
        }
        save_checkpoint(folder, tensors, description, KIND)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Baseline":
        """Read a checkpoint folder; needs neither the dataset nor the environment."""
        tensors, description = load_checkpoint(folder, KIND)
        device = torch.device(device)
        try:
            name, settings = description["algorithm"]["name"], description["algorithm"]["settings"]
            dims, seeds = Dims(**description["dims"]), tuple(int(seed) for seed in description["seeds"])
            preset = find_preset(name)
            chosen = changed(preset.settings, settings)
            check_stored(tensors, layers=len(chosen.hidden), numbers=least_numbers(chosen, dims, len(seeds)))
            check_finite(tensors)
            algorithm = preset.algorithm(chosen, sizes_of(dims), seeds, device)
            scaling = Scaling(**{field.name: tensors.pop(_SCALING + field.name) for field in fields(Scaling)})
            for key, group in algorithm.groups.items():
                for inner, value in group.tensors.items():
                    found = tensors.pop(f"{key}.{inner}")
                    if found.shape != value.shape:
                        raise ValueError(f"{key}.{inner} must have shape {tuple(value.shape)}, got {found.shape}")
                    value.data.copy_(found)
            if tensors:
                raise ValueError(f"unknown tensor {next(iter(tensors))}")
            if not isinstance(description["metadata"], dict):
                raise ValueError(f"metadata must be a mapping, got {description['metadata']!r}")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{folder}: weights and description do not match ({error})") from error
        return cls(name, algorithm, scaling.to(device), dims, seeds, description["metadata"])


def sizes_of(dims: Dims) -> Sizes:
    """Sizes of the networks' inputs and outputs: goals are appended to observations."""
    return Sizes(dims.observation + dims.goal, dims.action)
