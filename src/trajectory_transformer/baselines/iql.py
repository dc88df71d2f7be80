"""Implicit Q-learning (Kostrikov, Nair and Levine, 2022; arXiv 2110.06169)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Preset, Settings, Sizes, TransitionAlgorithm
from trajectory_transformer.baselines.data import Batch, Rewards
from trajectory_transformer.baselines.distributions import gaussian_log_prob
from trajectory_transformer.baselines.networks import Copy, Group, Network, Tensors, cosine, init_networks, mlp, twin_q
from trajectory_transformer.config import require

LOG_STD = (-5.0, 2.0)  # limits of the policy's log standard deviation
WAVE_PERIODS = (3.0, 1.5, 0.75)  # in the units that networks see: standard deviations with `states: standard`


@dataclass(frozen=True, kw_only=True)
class IQLSettings(Settings):
    """Settings of the paper for locomotion (section 5.2 and appendix B, and the authors' `mujoco_config`)."""

    rewards: Rewards = "return-range"
    discount: float = 0.99
    """Discount of future rewards."""
    expectile: float = 0.7
    """Expectile of Q that V estimates: 0.5 is the mean, near 1 the maximum over actions in the data."""
    temperature: float = 3.0
    """Inverse temperature of the advantages in the policy's weights: 0 clones the data."""
    max_weight: float = 100.0
    """Largest weight of a transition in the policy's loss."""
    target_rate: float = 0.005
    """Share of the distance that the target network moves in a step."""
    critic_decay: bool = False
    """Decay the learning rate of Q and V to 0 along a cosine, as that of the policy. Not in the paper; the values then
    end without the noise of the last updates."""
    layer_norm: bool = False
    """Normalise the hidden layers of Q and V. Not in the paper; keeps values from growing where data is rare. Use it
    with `states: standard`: large raw states that are multiples of each other look almost the same to Q and V."""
    wave_dims: tuple[int, ...] = ()
    """Observation dimensions that the networks also read as sines and cosines, for example the position in a maze. Not
    in the paper; without them Q and V vary too little over distances that are short compared with the range."""
    initial_value: float = 0.0
    """Initial bias of the outputs of Q and V, in units of the scaled rewards. Not in the paper, which starts at 0: with
    rewards of -1 until the goal that is the best possible value. The worst possible one is -1 / (1 - discount)."""

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        super().__post_init__()
        require(0 < self.expectile < 1, "expectile must lie in (0, 1)", self.expectile)
        require(0 <= self.discount <= 1, "discount must lie in [0, 1]", self.discount)
        require(self.temperature >= 0, "temperature must not be negative", self.temperature)
        require(min(self.wave_dims, default=0) >= 0, "wave_dims must not be negative", self.wave_dims)


class IQL(TransitionAlgorithm):
    """Expectile regression of V, bootstrapped twin Q, and a policy weighted by exponentiated advantages."""

    settings: IQLSettings
    losses = ("target_q", "critic_losses", "actor_loss")

    def __init__(self, settings: IQLSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights: two Q networks and V in one group, the policy in the other."""
        self.settings = settings
        o, a = sizes
        require(
            max(settings.wave_dims, default=-1) < o,
            f"wave_dims must lie below the {o} observation dimensions",
            settings.wave_dims,
        )
        o += 2 * len(settings.wave_dims) * len(WAVE_PERIODS)
        critics = {
            "q": Network((o + a, *settings.hidden, 1), per_learner=2, orthogonal=True),
            "v": Network((o, *settings.hidden, 1), orthogonal=True),
        }
        policy = init_networks({"policy": Network((o, *settings.hidden, a), orthogonal=True)}, seeds)
        policy["log_std"] = torch.zeros(len(seeds), 1, a)
        rate = settings.learning_rate
        networks = init_networks(critics, seeds)
        for name in critics:
            networks[f"{name}.{len(settings.hidden)}.bias"] += settings.initial_value
        decay = cosine(settings.steps)
        self.critics = Group(networks, rate, device=device, schedule=decay if settings.critic_decay else None)
        self.actor = Group(policy, rate, device=device, schedule=decay)
        self.targets = Copy(self.critics)  # V is copied along and not used
        self.groups = {"critics": self.critics, "actor": self.actor}
        self.copies = {"targets": self.targets}

    def update(self, batch: Batch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step: critics, then the policy with the new V, then the targets."""
        target_q = self.target_q(batch)
        q_loss, v_loss = self.critic_losses(batch, target_q)
        self.critics.minimize((q_loss + v_loss).sum())
        actor_loss = self.actor_loss(batch, target_q)
        self.actor.minimize(actor_loss.sum())
        self.targets.follow(self.critics, self.settings.target_rate)
        return {"q": q_loss.detach(), "v": v_loss.detach(), "actor": actor_loss.detach()}

    def critic_losses(self, batch: Batch, target_q: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the two Q networks (their sum) and of V, each [S]."""
        settings = self.settings
        size = batch.rewards.shape[1]
        values = self._value(torch.cat([batch.observations, batch.next_observations], dim=1))
        value, next_value = values[:, :size], values[:, size:].detach()
        advantage = target_q - value
        weight = torch.where(advantage > 0, settings.expectile, 1.0 - settings.expectile)
        v_loss = (weight * advantage.square()).mean(dim=1)
        target = batch.rewards + settings.discount * batch.continues * next_value  # [S, B]
        error = self._twin_q(self.critics.tensors, batch.observations, batch.actions) - target[:, None]  # [S, 2, B]
        return error.square().mean(dim=2).sum(dim=1), v_loss

    def actor_loss(self, batch: Batch, target_q: Tensor) -> Tensor:
        """Negative log-likelihood of the data, weighted by exponentiated advantages [S]."""
        with torch.no_grad():
            weight = torch.exp(self.settings.temperature * (target_q - self._value(batch.observations)))
            weight = weight.clamp(max=self.settings.max_weight)
        log_std = self.actor.tensors["log_std"].clamp(*LOG_STD)
        return -(weight * gaussian_log_prob(batch.actions, self.act(batch.observations), log_std)).mean(dim=1)

    @torch.no_grad()
    def target_q(self, batch: Batch) -> Tensor:
        """Smaller of the two target networks' values of the recorded actions [S, B]."""
        return self._twin_q(self.targets.tensors, batch.observations, batch.actions).amin(dim=1)

    def act(self, observations: Tensor) -> Tensor:
        """Means of the policy [S, E, A] for observations [S, E, O]."""
        return torch.tanh(mlp(self.actor.tensors, "policy", self._with_waves(observations)))

    def q_values(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Smaller of the two Q values [S, E]."""
        return self._twin_q(self.critics.tensors, observations, actions).amin(dim=1)

    def _twin_q(self, tensors: Tensors, observations: Tensor, actions: Tensor) -> Tensor:
        """Values of both Q networks [S, 2, B]."""
        return twin_q(tensors, self._with_waves(observations), actions, layer_norm=self.settings.layer_norm)

    def _value(self, observations: Tensor) -> Tensor:
        """V of observations [S, B]."""
        inputs = self._with_waves(observations)
        return mlp(self.critics.tensors, "v", inputs, layer_norm=self.settings.layer_norm)[..., 0]

    def _with_waves(self, observations: Tensor) -> Tensor:
        """Observations followed by sines and cosines of the `wave_dims`: [S, B, O] -> [S, B, O + 2 W]."""
        if not self.settings.wave_dims:
            return observations
        # Slices, because a list as an index would be copied to the device, which a CUDA graph cannot capture.
        places = torch.cat([observations[..., dim : dim + 1] for dim in self.settings.wave_dims], dim=-1)
        angles = torch.cat([places * (2 * math.pi / period) for period in WAVE_PERIODS], dim=-1)
        return torch.cat([observations, angles.sin(), angles.cos()], dim=-1)


_ANTMAZE = IQLSettings(rewards="minus-one", expectile=0.9, temperature=10.0)
PRESETS = {
    "iql": Preset(IQL, IQLSettings()),
    "iql-antmaze": Preset(IQL, _ANTMAZE),  # the authors' `antmaze_config`
    # Ours, for plans by Q: accurate where data is rare, and over the hundreds of steps to a goal (docs/antmaze.md). The
    # first two observations must be the position; -500 is -1 / (1 - discount).
    "iql-antmaze-wide": Preset(
        IQL,
        replace(
            _ANTMAZE,
            hidden=(512, 512, 512),
            layer_norm=True,
            states="standard",
            wave_dims=(0, 1),
            initial_value=-500.0,
            discount=0.998,
            target_rate=0.02,
            critic_decay=True,
            steps=300_000,
            tf32=True,
        ),
    ),
}
