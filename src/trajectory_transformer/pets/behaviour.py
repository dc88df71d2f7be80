"""A Gaussian policy cloned from data with the networks of the ensemble: what acts in predicted futures.

An ensemble predicts states given actions. To predict what the policy that recorded the data will do, it needs that
policy as a function of predicted states. This one has the same kind of networks, is fitted to the same episodes, and
reads masked states the same way.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import load_checkpoint, save_checkpoint
from trajectory_transformer.config import EnsembleConfig, require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.files import OutputFolder, settings_from
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.pets.ensemble import Scales, build_networks, check_network, network_inputs
from trajectory_transformer.pets.fit import EnsembleMetrics, Masks, Transitions, column_moments, fit_networks
from trajectory_transformer.pets.networks import GaussianNetworks

KIND = "trajectory-transformer cloned policy"
_SCALES = ("input_mean", "input_std", "target_mean", "target_std", "low", "high")


class Behaviour:
    """A cloned policy: a mixture of Gaussians over actions, clipped to the range of the recorded actions."""

    def __init__(
        self, networks: GaussianNetworks, scales: Scales, config: EnsembleConfig, *, masked: bool = False
    ) -> None:
        """Join the elites and the scaling of states and actions; `masked`: the mask of the state is an input."""
        self.networks = networks
        self.scales = scales
        self.config = config
        self.masked = masked

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.networks.min_log_variance.device

    @torch.no_grad()
    def sample(self, states: Tensor, generator: torch.Generator, masks: Tensor | None = None) -> Tensor:
        """Actions of one elite each, drawn at random: states and masks (1: observed) [P, O] -> [P, A]."""
        require(masks is None or self.masked, "masks need a policy that was fitted with masks", "one without")
        if self.masked and masks is None:
            masks = torch.ones_like(states)
        inputs = network_inputs(self.scales, states, states[:, :0], masks)
        mean, log_variance = self.networks(inputs.expand(self.config.num_elites, -1, -1))  # [K, P, A]
        rows = torch.arange(len(states), device=self.device)
        elite = torch.randint(len(mean), (len(states),), device=self.device, generator=generator)
        noise = torch.randn(mean.shape[1:], device=self.device, generator=generator)
        drawn = mean[elite, rows] + torch.exp(0.5 * log_variance[elite, rows]) * noise
        drawn = drawn * self.scales["target_std"] + self.scales["target_mean"]
        return torch.minimum(torch.maximum(drawn, self.scales["low"]), self.scales["high"])

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint folder: safetensors and JSON."""
        description = {"config": asdict(self.config), "masked": self.masked}
        save_checkpoint(folder, self.networks.state_dict() | self.scales, {"behaviour": description}, KIND)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Behaviour":
        """Read a checkpoint folder that `save` wrote."""
        tensors, description = load_checkpoint(folder, KIND)
        try:
            stored = description["behaviour"]
            config, masked = settings_from(EnsembleConfig, stored["config"], "config"), bool(stored["masked"])
            scales = {name: tensors.pop(name).to(device) for name in _SCALES}
            check_network(tensors, config)
            networks = _build(config.num_elites, config, scales, masked=masked, seed=0)
            networks.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{folder}: not the checkpoint of a cloned policy ({reason})") from error
        return cls(networks.to(device), scales, config, masked=masked)


def fit_behaviour(
    dataset: Dataset,
    config: EnsembleConfig | None = None,
    *,
    masks: Masks | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    on_metrics: Callable[[EnsembleMetrics], None] | None = None,
) -> Behaviour:
    """Clone the policy of a dataset; arguments as those of `fit`."""
    config = config or EnsembleConfig()
    folder = None if out is None else Path(out)
    require(not resume or folder is not None, "resume needs the folder to resume, out", out)
    require(dataset.num_steps >= 2, "a cloned policy needs at least 2 transitions", dataset.num_steps)
    states = torch.from_numpy(np.concatenate([episode.observations[:-1] for episode in dataset]))
    actions = torch.from_numpy(np.concatenate([episode.actions for episode in dataset]))
    known = None
    if masks is not None:
        known = torch.from_numpy(np.concatenate([mask[:-1] for mask in masks]).astype(np.float32))
        require(known.shape == states.shape, "masks must have the shapes of the observations", tuple(known.shape))
    scales: Scales = {"low": actions.amin(0), "high": actions.amax(0)}
    scales["input_mean"], scales["input_std"] = column_moments(states, known)
    scales["target_mean"], scales["target_std"] = column_moments(actions, None)
    targets = (actions - scales["target_mean"]) / scales["target_std"]
    inputs = network_inputs(scales, states, states[:, :0], known)
    place = find_device(device)
    scales = {name: value.to(place) for name, value in scales.items()}
    networks = _build(config.num_networks, config, scales, masked=masks is not None, seed=seed).to(place)
    data = Transitions(inputs.to(place), targets.to(place), None)
    with OutputFolder(folder, resume=resume) as output:
        elites = fit_networks(networks, data, scales, config, seed=seed, output=output, on_metrics=on_metrics)
        behaviour = Behaviour(elites, scales, config, masked=masks is not None)
        if folder is not None:
            behaviour.save(folder)
    return behaviour


def _build(count: int, config: EnsembleConfig, scales: Scales, *, masked: bool, seed: int) -> GaussianNetworks:
    """Networks with random weights from states, and their masks, to actions."""
    return build_networks(count, config, scales, len(scales["input_mean"]) * masked, seed=seed)
