"""A fitted probabilistic ensemble: samples futures and evaluates likelihoods, in the units of the data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import log, pi
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import check_finite, check_stored, load_checkpoint, save_checkpoint
from trajectory_transformer.config import EnsembleConfig, require
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.files import settings_from
from trajectory_transformer.pets.networks import GaussianNetworks
from trajectory_transformer.randomness import stream_seed

KIND = "trajectory-transformer ensemble"
Values = Tensor | FloatArray
Act = Callable[[Tensor], Tensor]
"""A policy: states [P, O] -> actions [P, A]."""
Propagation = Literal["ts1", "ts-infinity"]

Scales = dict[str, Tensor]
"""Mean and deviation of inputs (state, action) and targets (change of the state, reward), by the names below."""
_SCALES = ("input_mean", "input_std", "target_mean", "target_std")


@dataclass(frozen=True)
class EnsemblePrediction:
    """N sampled futures of H steps; `...` are the dimensions of the states they start from."""

    states: Tensor  # [N, ..., H, O], after each action
    actions: Tensor  # [N, ..., H, A]
    rewards: Tensor | None  # [N, ..., H]; None if the ensemble predicts none


class Ensemble:
    """A fitted ensemble: samples futures and evaluates likelihoods, in the units of the data."""

    def __init__(
        self,
        networks: GaussianNetworks,
        scales: Scales,
        config: EnsembleConfig,
        *,
        observation_dim: int,
        masked: bool = False,
    ) -> None:
        """Join the elites and the scaling of their inputs and targets; `masked`: the mask of the state is an input."""
        self.networks = networks
        self.scales = scales
        self.config = config
        self.observation_dim = observation_dim
        self.action_dim = len(scales["input_mean"]) - observation_dim
        self.masked = masked

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.networks.min_log_variance.device

    @torch.no_grad()
    def gaussians(self, state: Values, action: Values, mask: Values | None = None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation that each elite predicts of the next state, followed by the reward if predicted.

        state [..., O], action [..., A], mask [..., O] (1: observed) -> two of [K, ..., T].
        """
        given = [self._tensor(state, self.observation_dim), self._tensor(action, self.action_dim)]
        if mask is not None:
            given.append(self._tensor(mask, self.observation_dim))
        leading = np.broadcast_shapes(*(values.shape[:-1] for values in given))
        flat = [values.expand(*leading, -1).reshape(1, -1, values.shape[-1]) for values in given]
        networks = self.config.num_elites
        mean, std = self.apply(*(values.expand(networks, -1, -1) for values in flat))
        return mean.view(networks, *leading, -1), std.view(networks, *leading, -1)

    def log_prob(
        self,
        state: Values,
        action: Values,
        next_state: Values,
        reward: Values | None = None,
        *,
        mask: Values | None = None,
        next_mask: Values | None = None,
    ) -> Tensor:
        """Log-density of the next state (and reward) under the mixture of the elites' Gaussians: [..., O] -> [...].

        `mask` and `next_mask` [..., O] say which entries of the two states are observed (1); the others do not count.
        """
        found = self._tensor(next_state, self.observation_dim)
        # Every elite evaluates every next state, so the leading dimensions are broadcast before that of the elites.
        states = self._tensor(state, self.observation_dim)
        states = states.expand(*np.broadcast_shapes(states.shape[:-1], found.shape[:-1]), -1)
        mean, std = self.gaussians(states, action, mask)
        counts = torch.ones_like(found) if next_mask is None else self._tensor(next_mask, self.observation_dim)
        if reward is not None:
            require(self.config.rewards, "the ensemble must have been fitted with rewards", self.config.rewards)
            rewards = torch.as_tensor(reward, dtype=torch.float32, device=self.device)[..., None]
            found, counts = torch.cat([found, rewards], -1), torch.cat([counts, torch.ones_like(rewards)], -1)
        mean, std = mean[..., : found.shape[-1]], std[..., : found.shape[-1]]
        each = -0.5 * ((found - mean) / std).square() - std.log() - 0.5 * log(2 * pi)
        return torch.logsumexp((each * counts).sum(-1), dim=0) - log(self.config.num_elites)

    @torch.no_grad()
    def predict(
        self,
        state: Values,
        actions: Values | Act,
        steps: int,
        samples: int = 20,
        *,
        propagation: Propagation = "ts1",
        seed: int = 0,
        masks: Values | None = None,
    ) -> EnsemblePrediction:
        """Sample futures from states [..., O].

        Args:
            state: states to start from.
            actions: actions [..., H, A] that all samples take, or a policy.
            steps: actions to take, H.
            samples: futures of each state, N.
            propagation: ts1 draws a new network for each sample at every step, ts-infinity keeps the first one. The
                samples of a state are spread evenly over the networks.
            seed: of the samples.
            masks: which entries of the state before each action the networks read (1) [..., H, O]; all by default.
        """
        require(steps >= 1 and samples >= 1, "steps and samples must be at least 1", (steps, samples))
        require(propagation in ("ts1", "ts-infinity"), "propagation must be ts1 or ts-infinity", repr(propagation))
        start = self._tensor(state, self.observation_dim)
        leading, networks = start.shape[:-1], self.config.num_elites
        rows = -(-samples // networks)  # rounds of samples, one per network in each
        generator = torch.Generator(self.device).manual_seed(stream_seed(seed))

        def of_all(values: Values, dim: int) -> Tensor:
            """The same for all samples, step by step: [..., H, D] -> [H, N', S, D]."""
            given = self._tensor(values, dim)
            require(given.shape[-2] == steps, f"{steps} steps need as many actions and masks", given.shape[-2])
            flat = given.expand(*leading, steps, dim).reshape(-1, steps, dim).transpose(0, 1)
            return flat[:, None].expand(-1, rows * networks, -1, -1)

        def by_network(values: Tensor) -> Tensor:
            """Sample r K + k belongs to network k: [N', S, D] -> [K, R S, D]."""
            return values.reshape(rows, networks, -1, values.shape[-1]).transpose(0, 1).flatten(1, 2)

        recorded = None if callable(actions) else of_all(actions, self.action_dim)
        reads = None if masks is None else of_all(masks, self.observation_dim)
        states = start.reshape(1, -1, self.observation_dim).repeat(rows * networks, 1, 1)  # [N', S, O]
        order = torch.arange(rows * networks, device=self.device)[:, None, None].expand(-1, states.shape[1], -1)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(steps):
            if callable(actions):
                action = actions(states.flatten(0, 1)).view(*states.shape[:2], self.action_dim)
            else:
                assert recorded is not None
                action = recorded[step]
            if propagation == "ts1":
                order = torch.rand(order.shape, device=self.device, generator=generator).argsort(0)
            given = [states, action] if reads is None else [states, action, reads[step]]
            mean, std = self.apply(*(by_network(values.take_along_dim(order, dim=0)) for values in given))
            drawn = mean + std * torch.randn(mean.shape, device=self.device, generator=generator)  # [K, R S, T]
            drawn = drawn.view(networks, rows, -1, drawn.shape[-1]).transpose(0, 1).flatten(0, 1)
            drawn = drawn.take_along_dim(order.argsort(0), dim=0)
            states = drawn[..., : self.observation_dim]
            found.append((states, action, drawn[..., self.observation_dim :]))
        parts = [torch.stack(values, dim=2)[:samples] for values in zip(*found, strict=True)]
        parts = [values.reshape(samples, *leading, steps, values.shape[-1]) for values in parts]
        return EnsemblePrediction(parts[0], parts[1], parts[2][..., 0] if self.config.rewards else None)

    def apply(self, states: Tensor, actions: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next state and reward, each elite for its own rows.

        states [K, B, O], actions [K, B, A], masks [K, B, O] -> two of [K, B, T].
        """
        require(masks is None or self.masked, "masks need an ensemble that was fitted with masks", "one without")
        if self.masked and masks is None:
            masks = torch.ones_like(states)
        mean, log_variance = self.networks(network_inputs(self.scales, states, actions, masks))
        mean = mean * self.scales["target_std"] + self.scales["target_mean"]
        next_states = known_state(self.scales, states, masks) + mean[..., : self.observation_dim]
        std = torch.exp(0.5 * log_variance) * self.scales["target_std"]
        return torch.cat([next_states, mean[..., self.observation_dim :]], dim=-1), std

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint folder: safetensors and JSON."""
        description = {
            "config": asdict(self.config),
            "observation_dim": self.observation_dim,
            "masked": self.masked,
        }
        save_checkpoint(folder, self.networks.state_dict() | self.scales, {"ensemble": description}, KIND)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Ensemble":
        """Read a checkpoint folder that `save` wrote."""
        tensors, description = load_checkpoint(folder, KIND)
        try:
            stored = description["ensemble"]
            config = settings_from(EnsembleConfig, stored["config"], "config")
            observation_dim, masked = int(stored["observation_dim"]), bool(stored["masked"])
            scales = {name: tensors.pop(name).to(device) for name in _SCALES}
            check_network(tensors, config)
            networks = build_networks(config.num_elites, config, scales, observation_dim * masked, seed=0)
            networks.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{folder}: not the checkpoint of an ensemble ({str(error).splitlines()[0]})") from error
        return cls(networks.to(device), scales, config, observation_dim=observation_dim, masked=masked)

    def _tensor(self, values: Values, dim: int) -> Tensor:
        """Values as float32 on the device, with a last dimension of the given size."""
        found = torch.as_tensor(values, dtype=torch.float32, device=self.device)
        require(
            found.ndim >= 1 and found.shape[-1] == dim, f"the last dimension must have size {dim}", tuple(found.shape)
        )
        return found


def check_network(tensors: Mapping[str, Tensor], config: EnsembleConfig) -> None:
    """Refuse sizes and weights of a checkpoint that cannot be right."""
    hidden = config.num_elites * (config.num_layers - 1) * config.width**2
    check_stored(tensors, layers=config.num_layers, numbers=max(hidden, config.num_elites * config.width))
    check_finite(tensors)


def known_state(scales: Scales, states: Tensor, masks: Tensor | None) -> Tensor:
    """What the predicted change is added to: the state, or the mean of the data where the state is masked."""
    return states if masks is None else torch.where(masks > 0, states, scales["input_mean"][: states.shape[-1]])


def network_inputs(scales: Scales, states: Tensor, actions: Tensor, masks: Tensor | None) -> Tensor:
    """Normalised states and actions; masked entries are 0, and the mask follows."""
    rows = torch.cat([known_state(scales, states, masks), actions], dim=-1)
    rows = (rows - scales["input_mean"]) / scales["input_std"]
    return rows if masks is None else torch.cat([rows, masks], dim=-1)


def build_networks(count: int, config: EnsembleConfig, scales: Scales, mask_dim: int, *, seed: int) -> GaussianNetworks:
    """Networks with random weights for the sizes of the scales."""
    return GaussianNetworks(
        count,
        len(scales["input_mean"]) + mask_dim,
        len(scales["target_mean"]),
        num_layers=config.num_layers,
        width=config.width,
        generator=torch.Generator().manual_seed(stream_seed(seed)),
    )
