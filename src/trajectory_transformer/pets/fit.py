"""Fit a probabilistic ensemble to a dataset: bootstrap samples, early stopping per network, choice of the elites."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajectory_transformer.checkpoint import read_tensors, write_tensors
from trajectory_transformer.config import EnsembleConfig, differences, require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.files import OutputFolder
from trajectory_transformer.gpu.backends import find_device, matmul_precision
from trajectory_transformer.gpu.training.captured import CapturedCalls
from trajectory_transformer.pets.ensemble import (
    Ensemble,
    Scales,
    build_networks,
    known_state,
    network_inputs,
)
from trajectory_transformer.pets.networks import GaussianNetworks
from trajectory_transformer.randomness import stream_seed

Masks = Sequence[npt.NDArray[np.bool_]]
"""Which entries of the states were observed: one array [T + 1, O] per episode."""

RESUME = "resume.safetensors"
SAVE_SECONDS = 10.0  # between two saves, at least: a pass may be shorter than a save
IMPROVEMENT = 0.01  # a held-out loss smaller by less than this counts as flat
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EnsembleMetrics:
    """One pass over the data. Losses: twice the mean negative log-likelihood of normalised targets, less log 2 pi."""

    epoch: int
    loss: float  # mean over networks and steps; includes the weight of the bounds
    held_out: tuple[float, ...]  # of each network; empty without held-out data


@dataclass(frozen=True)
class Transitions:
    """Rows for the networks, on the device."""

    inputs: Tensor  # [N, I]
    targets: Tensor  # [N, T], normalised
    weights: Tensor | None  # [N, T], 1 where the target is known; None if all are

    def __getitem__(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Some rows."""
        return self.inputs[index], self.targets[index], None if self.weights is None else self.weights[index]


def fit(
    dataset: Dataset,
    config: EnsembleConfig | None = None,
    *,
    masks: Masks | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    on_metrics: Callable[[EnsembleMetrics], None] | None = None,
) -> Ensemble:
    """Fit an ensemble to the transitions of a dataset and return its elites.

    Args:
        dataset: episodes; all dimensions must be continuous.
        config: sizes and training.
        masks: which entries of the states were observed. The networks read 0 and the mask for the others, and are not
            trained to predict them.
        seed: of the weights, the bootstrap samples and the batches.
        out: folder to write: the checkpoint, and what is needed to resume. None keeps nothing.
        resume: continue the fit in `out` if it exists; data, config and seed must be the same.
        device: auto, cpu or cuda. On a GPU the data is kept there and a step is one CUDA graph.
        on_metrics: called after every pass over the data.
    """
    config = config or EnsembleConfig()
    folder = None if out is None else Path(out)
    require(not resume or folder is not None, "resume needs the folder to resume, out", out)
    with OutputFolder(folder, resume=resume) as output:
        scales, data = _prepare(dataset, config, masks, find_device(device))
        mask_dim = 0 if masks is None else dataset.observation_dim
        networks = build_networks(config.num_networks, config, scales, mask_dim, seed=seed).to(data.inputs.device)
        elites = fit_networks(networks, data, scales, config, seed=seed, output=output, on_metrics=on_metrics)
        ensemble = Ensemble(elites, scales, config, observation_dim=dataset.observation_dim, masked=masks is not None)
        if folder is not None:
            ensemble.save(folder)
    return ensemble


def fit_networks(
    networks: GaussianNetworks,
    data: Transitions,
    scales: Scales,
    config: EnsembleConfig,
    *,
    seed: int,
    output: OutputFolder,
    on_metrics: Callable[[EnsembleMetrics], None] | None,
) -> GaussianNetworks:
    """Train networks on rows and return the elites; the state after a pass is kept in `output`, see `fit`."""
    folder = output.path
    training = _Training(networks, data, config, seed)
    state = {"ensemble": json.dumps(asdict(config)), "seed": str(seed)}
    if folder is not None and (folder / RESUME).is_file():
        training.load(folder / RESUME, scales, state)
    saved = float("-inf")
    while not training.finished:
        metrics = training.run_epoch()
        if folder is not None and (training.finished or time.monotonic() - saved >= SAVE_SECONDS):
            output.prepare()
            write_tensors(folder / RESUME, training.state() | scales, state | training.progress())
            saved = time.monotonic()
        if on_metrics is not None:
            on_metrics(metrics)
    return training.elites()


class _Training:
    """A fit in progress. Each pass over the data is a function of the state before it, the seed and its number."""

    def __init__(self, networks: GaussianNetworks, data: Transitions, config: EnsembleConfig, seed: int) -> None:
        self.networks = networks
        self.data = data
        self.config = config
        self.seed = seed
        self.epoch = 0
        self.flat = 0  # passes since the held-out loss of any network improved
        device = data.inputs.device
        generator = torch.Generator().manual_seed(stream_seed(seed, 0))
        shuffled = torch.randperm(len(data.inputs), generator=generator)
        num_held_out = min(max(round(config.held_out * len(shuffled)), config.held_out > 0), len(shuffled) - 1)
        self.held_out, rows = shuffled[:num_held_out].to(device), shuffled[num_held_out:]
        draws = torch.randint(len(rows), (config.num_networks, len(rows)), generator=generator)
        self.bootstrap = rows[draws].to(device)  # [K, N], rows of each network
        self.best_loss = torch.full((config.num_networks,), torch.inf, device=device)
        self.best = {name: value.clone() for name, value in networks.state_dict().items()}

        self._parameters = list(networks.parameters())
        self._optimizer = torch.optim.Adam(
            networks.parameter_groups(config.weight_decay),
            lr=config.learning_rate,
            fused=True,
            capturable=device.type == "cuda",
        )
        batch_size = min(config.batch_size, len(rows))
        self.num_steps = len(rows) // batch_size
        # A captured step reads its batch and writes its loss at the position of a counter on the device.
        self._batches = torch.zeros(self.num_steps, config.num_networks, batch_size, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._losses = torch.zeros(self.num_steps, device=device)
        self._captured = CapturedCalls() if device.type == "cuda" else None

    @property
    def finished(self) -> bool:
        """Whether the last pass is done, or the held-out loss is flat."""
        return self.epoch >= self.config.epochs or self.flat >= self.config.patience

    def run_epoch(self) -> EnsembleMetrics:
        """Pass once over the bootstrap sample of each network, then evaluate on the held-out transitions."""
        generator = torch.Generator(self.bootstrap.device).manual_seed(stream_seed(self.seed, 1, self.epoch))
        keys = torch.rand(self.bootstrap.shape, device=self.bootstrap.device, generator=generator)
        order = self.bootstrap.gather(1, keys.argsort(1))[:, : self._batches[:, 0].numel()].contiguous()
        self._batches.copy_(order.view(len(order), self.num_steps, -1).transpose(0, 1))
        self._position.zero_()
        with matmul_precision(self.config.tf32):
            for _ in range(self.num_steps):
                if self._captured is None:
                    self._take_step()
                else:
                    self._captured("step", self._take_step)
        self.epoch += 1
        loss = float(self._losses.mean())
        require(np.isfinite(loss), f"the loss must be finite, lower learning_rate (epoch {self.epoch})", loss)
        return EnsembleMetrics(self.epoch, loss, self._evaluate())

    def _take_step(self) -> None:
        batch = self.data[self._batches.index_select(0, self._position)[0]]
        loss = self.networks.loss(*batch).sum()
        for parameter, gradient in zip(self._parameters, torch.autograd.grad(loss, self._parameters), strict=True):
            parameter.grad = gradient.contiguous()
        self._optimizer.step()
        self._losses.index_copy_(0, self._position, loss.detach()[None] / self.config.num_networks)
        self._position += 1

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, ...]:
        """Held-out loss of each network; remembers the weights of those that have their smallest."""
        if not len(self.held_out):
            self.best = {name: value.clone() for name, value in self.networks.state_dict().items()}
            return ()
        parts = torch.split(self.held_out, 65536)
        losses = torch.zeros_like(self.best_loss)
        for part in parts:
            inputs, targets, weights = self.data[part]
            shape = (self.config.num_networks, -1, -1)
            each = self.networks.negative_log_likelihood(
                inputs.expand(*shape), targets.expand(*shape), None if weights is None else weights.expand(*shape)
            )
            losses += each * (len(part) / len(self.held_out))
        self.flat = 0 if bool((losses < self.best_loss - IMPROVEMENT).any()) else self.flat + 1
        better = losses < self.best_loss
        for name, value in self.networks.state_dict().items():
            self.best[name] = torch.where(better[:, None, None], value, self.best[name])
        self.best_loss = torch.where(better, losses, self.best_loss)
        return tuple(losses.tolist())

    def elites(self) -> GaussianNetworks:
        """The networks with the smallest held-out loss, best first, each with its best weights."""
        chosen = self.best_loss.argsort(stable=True)[: self.config.num_elites]
        return self.networks.with_weights({name: value[chosen] for name, value in self.best.items()})

    def state(self) -> dict[str, Tensor]:
        """Weights, moments of the optimizer, best weights and best losses, to resume from."""
        tensors = {f"weights.{name}": value for name, value in self.networks.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for name, parameter in self.networks.named_parameters():
            tensors |= {f"{moment}.{name}": self._optimizer.state[parameter][moment] for moment in _MOMENTS}
        return tensors | {"best_loss": self.best_loss}

    def progress(self) -> dict[str, str]:
        """Numbers to resume from."""
        return {"epoch": str(self.epoch), "flat": str(self.flat)}

    def load(self, path: Path, scales: Scales, expected: dict[str, str]) -> None:
        """Restore `state` and `progress` from a file of a fit with the same data, settings and seed."""
        tensors, metadata = read_tensors(path)
        for name, value in expected.items():
            if metadata.get(name) != value:
                known, given = json.loads(metadata.get(name, "null")), json.loads(value)
                raise ValueError(
                    f"{path} was started with other settings ({differences(name, known, given)}); resume with its own"
                )
        if any(not torch.equal(tensors[name], value.cpu()) for name, value in scales.items()):
            raise ValueError(f"{path} was started on different data: means and deviations differ")
        self.networks.load_state_dict(_under("weights.", tensors))
        device = self.bootstrap.device
        self.best = {name: value.to(device) for name, value in _under("best.", tensors).items()}
        self.best_loss = tensors["best_loss"].to(device)
        for name, parameter in self.networks.named_parameters():
            for moment in _MOMENTS:
                self._optimizer.state[parameter][moment] = tensors[f"{moment}.{name}"].to(device)
        self.epoch, self.flat = int(metadata["epoch"]), int(metadata["flat"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _prepare(
    dataset: Dataset, config: EnsembleConfig, masks: Masks | None, device: torch.device
) -> tuple[Scales, Transitions]:
    """Scales and normalised rows of all transitions."""
    for dimension in (*dataset.observation_dimensions, *dataset.action_dimensions):
        if dimension.categories:
            raise ValueError(f"an ensemble of Gaussians needs continuous dimensions, {dimension.name} has categories")
    require(dataset.has_rewards or not config.rewards, "predicting rewards needs rewards in the dataset", "none")
    require(dataset.num_steps >= 2, "an ensemble needs at least 2 transitions", dataset.num_steps)

    def joined(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32))

    episodes = dataset.episodes
    states = joined([episode.observations[:-1] for episode in episodes])
    next_states = joined([episode.observations[1:] for episode in episodes])
    actions = joined([episode.actions for episode in episodes])
    known = known_next = None
    if masks is not None:
        shapes = [mask.shape for mask in masks]
        expected = [episode.observations.shape for episode in episodes]
        require(shapes == expected, "masks must have the shapes of the observations of the episodes", shapes[:3])
        known, known_next = joined([mask[:-1] for mask in masks]), joined([mask[1:] for mask in masks])
    scales: Scales = {}
    moments = [column_moments(states, known), column_moments(actions, None)]
    scales["input_mean"], scales["input_std"] = (torch.cat(part) for part in zip(*moments, strict=True))
    targets = next_states - known_state(scales, states, known)
    weights = known_next
    if config.rewards:
        rewards = joined([episode.rewards for episode in episodes if episode.rewards is not None])[:, None]
        targets = torch.cat([targets, rewards], dim=1)
        weights = None if weights is None else torch.cat([weights, torch.ones_like(rewards)], dim=1)
    scales["target_mean"], scales["target_std"] = column_moments(targets, weights)
    targets = (targets - scales["target_mean"]) / scales["target_std"]
    scales = {name: value.to(device) for name, value in scales.items()}
    inputs = network_inputs({name: v.cpu() for name, v in scales.items()}, states, actions, known)
    return scales, Transitions(inputs.to(device), targets.to(device), None if weights is None else weights.to(device))


def column_moments(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column over the rows that count; 1 for columns that do not vary: [N, D] -> [D]."""
    values = rows.double()
    counts = torch.ones_like(values) if weights is None else weights.double()
    total = counts.sum(0).clamp(min=1.0)
    mean = (values * counts).sum(0) / total
    std = ((values - mean).square() * counts).sum(0).div(total).sqrt()
    return mean.float(), torch.where(std > 1e-12, std, 1.0).float()
