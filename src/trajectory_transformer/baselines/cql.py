"""Conservative Q-learning, CQL(H) (Kumar, Zhou, Tucker and Levine, 2020; arXiv 2006.04779), on top of SAC."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Preset, Settings, Sizes, TransitionAlgorithm, normal
from trajectory_transformer.baselines.data import Batch
from trajectory_transformer.baselines.distributions import squashed_log_prob
from trajectory_transformer.baselines.networks import (
    Copy,
    Group,
    HiddenLayers,
    Network,
    Tensors,
    frozen,
    hidden_layers,
    init_networks,
    mlp,
    rounded_twin_q,
    twin_q,
)
from trajectory_transformer.config import require

LOG_STD = (-20.0, 2.0)  # limits of the policy's log standard deviation


@dataclass(frozen=True, kw_only=True)
class CQLSettings(Settings):
    """Settings of the authors' code for locomotion (`cql_mujoco_new.py`): three hidden layers of 256, no Lagrange.

    The authors' command names a conservative weight of 5 or 10 and a policy rate of 1e-4 (the paper: 3e-5). 10 is also
    the weight of CORL's published scores.
    """

    hidden: tuple[int, ...] = (256, 256, 256)
    tf32: bool = True
    bfloat16: bool = False
    """Compute the hidden layers of Q for sampled actions, 30 of 31, in bfloat16: less memory to move on a GPU."""
    action_margin: float = 0.1
    actor_learning_rate: float = 1e-4
    """Learning rate of the policy and of the entropy temperature."""
    discount: float = 0.99
    """Discount of future rewards."""
    conservative_weight: float = 10.0
    """Weight of the conservative term against the squared Bellman error."""
    num_actions: int = 10
    """Actions sampled from each of three distributions for the log-sum-exp over actions."""
    clone_steps: int = 40_000
    """Steps at the start in which the policy is trained by behaviour cloning."""
    target_rate: float = 0.005
    """Share of the distance that target networks move in a step."""

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        super().__post_init__()
        require(0 <= self.discount <= 1, "discount must lie in [0, 1]", self.discount)
        require(self.num_actions >= 1, "num_actions must be at least 1", self.num_actions)
        require(self.conservative_weight >= 0, "conservative_weight must not be negative", self.conservative_weight)
        require(self.clone_steps >= 0, "clone_steps must not be negative", self.clone_steps)


class CQL(TransitionAlgorithm):
    """SAC whose critics are pushed down on sampled actions and up on those of the data."""

    settings: CQLSettings
    losses = ("critic_losses", "improve_terms", "clone_terms")

    def __init__(self, settings: CQLSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights; the policy has the mean and the log standard deviation of a Gaussian."""
        self.settings = settings
        o, a = sizes
        critics = {"q": Network((o + a, *settings.hidden, 1), per_learner=2)}
        policy = {"policy": Network((o, *settings.hidden, 2 * a))}
        rate = settings.actor_learning_rate
        self.critics = Group(init_networks(critics, seeds), settings.learning_rate, device=device)
        self.actor = Group(init_networks(policy, seeds), rate, device=device)
        self.temperature = Group({"log": torch.zeros(len(seeds), 1)}, rate, device=device)
        self.targets = Copy(self.critics)
        self.groups = {"critics": self.critics, "actor": self.actor, "temperature": self.temperature}
        self.copies = {"critics": self.targets}
        self.hidden_layers: HiddenLayers = hidden_layers
        self.action_dim = a
        self.noise = (2 + 3 * settings.num_actions) * a

    def compile(self) -> None:
        """Also compute hidden layers in bfloat16 by kernels of their own, if these support the widths."""
        fits = all(16 <= width <= 512 and width.bit_count() == 1 for width in self.settings.hidden)
        if self.settings.bfloat16 and fits:
            from trajectory_transformer.gpu.training import perceptrons  # needs triton

            self.hidden_layers = perceptrons.hidden_layers
        super().compile()

    def variant(self, step: int) -> str:
        """The policy is cloned from the data at first."""
        return "clone" if step < self.settings.clone_steps else "improve"

    def update(self, batch: Batch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step: critics, then temperature and policy, then the targets."""
        a, number = self.action_dim, self.settings.num_actions
        own, following, pair, unsquashed = torch.split(noise, [a, a, 2 * number * a, number * a], dim=-1)
        error, conservative = self.critic_losses(batch, following, pair, unsquashed)
        self.critics.minimize((error + conservative).sum())
        log_prob, gain = (self.clone_terms if variant == "clone" else self.improve_terms)(batch, own)  # each [S]
        log = self.temperature.tensors["log"][:, 0]
        self.temperature.minimize((log * (a - log_prob.detach())).sum())  # the target entropy is -A
        actor_loss = log.detach().exp() * log_prob - gain
        self.actor.minimize(actor_loss.sum())
        self.targets.follow(self.critics, self.settings.target_rate)
        return {
            "critic": error.detach(),
            "conservative": conservative.detach(),
            "actor": actor_loss.detach(),
            "temperature": log.detach().exp(),
        }

    def critic_losses(self, batch: Batch, following: Tensor, pair: Tensor, unsquashed: Tensor) -> tuple[Tensor, Tensor]:
        """Bellman errors and conservative terms of the two Q networks (their sums), each [S].

        The noise is for the next action [S, B, A], for the policy's actions in both states [S, B, 2 n A] and for
        uniform actions [S, B, n A].
        """
        settings, number = self.settings, self.settings.num_actions
        size, a = batch.rewards.shape[1], self.action_dim
        with torch.no_grad():
            both = torch.cat([batch.observations, batch.next_observations], dim=1)
            mean, log_std = self._gaussian(both)  # [S, 2 B, A]
            raw = mean[:, size:] + log_std[:, size:].exp() * normal(following)
            next_q = twin_q(self.targets.tensors, batch.next_observations, torch.tanh(raw)).amin(dim=1)
            target = batch.rewards + settings.discount * batch.continues * next_q  # [S, B]
            # Of the policy in the current state and in the next one: [S, B, 2, n, A].
            middle, spread = (
                torch.stack([part[:, :size], part[:, size:]], dim=2)[:, :, :, None] for part in (mean, log_std)
            )
            raw = middle + spread.exp() * normal(pair.reshape(*pair.shape[:2], 2, number, a))
            log_prob = squashed_log_prob(raw, middle, spread).flatten(2)  # [S, B, 2 n]
            uniform = 2.0 * unsquashed.reshape(*unsquashed.shape[:2], number, a) - 1.0
            sampled = torch.cat([torch.tanh(raw).flatten(2, 3), uniform], dim=2)  # [S, B, 3 n, A]
            density = torch.nn.functional.pad(log_prob, (0, number), value=-a * math.log(2.0))  # [S, B, 3 n]
            states = batch.observations[:, :, None].expand(-1, -1, sampled.shape[2], -1)
        recorded = twin_q(self.critics.tensors, batch.observations, batch.actions)  # [S, 2, B]
        inputs = states.flatten(1, 2), sampled.flatten(1, 2)
        if settings.bfloat16:
            q = rounded_twin_q(self.critics.tensors, *inputs, self.hidden_layers)
        else:
            q = twin_q(self.critics.tensors, *inputs)
        q = q.view(*recorded.shape, -1)  # [S, 2, B, 3 n]
        error = (recorded - target[:, None]).square().mean(dim=2).sum(dim=1)
        gap = torch.logsumexp(q - density[:, None], dim=3) - recorded
        return error, settings.conservative_weight * gap.mean(dim=2).sum(dim=1)

    def improve_terms(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean log-probability of the policy's actions, and their mean Q value, each [S]."""
        mean, log_std = self._gaussian(batch.observations)
        raw = mean + log_std.exp() * normal(noise)
        q = twin_q(frozen(self.critics.tensors), batch.observations, torch.tanh(raw)).amin(dim=1)
        return squashed_log_prob(raw, mean, log_std).mean(dim=1), q.mean(dim=1)

    def clone_terms(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same, with the log-likelihood of the recorded actions in place of Q values."""
        mean, log_std = self._gaussian(batch.observations)
        raw = mean + log_std.exp() * normal(noise)
        recorded = torch.atanh(batch.actions.clamp(-0.999999, 0.999999))
        likelihood = squashed_log_prob(recorded, mean, log_std)
        return squashed_log_prob(raw, mean, log_std).mean(dim=1), likelihood.mean(dim=1)

    def _gaussian(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing, each [S, B, A]."""
        return gaussian(self.actor.tensors, observations)

    def act(self, observations: Tensor) -> Tensor:
        """Squashed means of the policy [S, E, A] for observations [S, E, O]."""
        return torch.tanh(self._gaussian(observations)[0])

    def q_values(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Smaller of the two Q values [S, E]."""
        return twin_q(self.critics.tensors, observations, actions).amin(dim=1)


def gaussian(tensors: Tensors, observations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation of a Gaussian policy, each [S, B, A]."""
    mean, log_std = mlp(tensors, "policy", observations).chunk(2, dim=-1)
    return mean, log_std.clamp(*LOG_STD)


PRESETS = {
    "cql": Preset(CQL, CQLSettings()),
    # The authors' code for AntMaze (`cql_antmaze_new.py`), with the fixed weight that it names beside its Lagrange one.
    "cql-antmaze": Preset(CQL, CQLSettings(rewards="centered", conservative_weight=5.0)),
}
