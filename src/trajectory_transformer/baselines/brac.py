"""Behaviour regularised actor-critic with a value penalty, BRAC-v (Wu, Tucker and Nachum, 2019; arXiv 1911.11361).

The divergence is KL(policy, behaviour) in its primal form: the behaviour policy is cloned first, and the penalty is
computed from both densities (the dual form trains a discriminator instead). Both policies are Gaussians squashed by the
same tanh, which leaves the KL unchanged, so it is that of two Gaussians in closed form instead of a mean over samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Preset, Settings, Sizes, TransitionAlgorithm, normal
from trajectory_transformer.baselines.data import Batch
from trajectory_transformer.baselines.distributions import gaussian_kl, squashed_log_prob
from trajectory_transformer.baselines.networks import Copy, Group, Network, Tensors, frozen, init_networks, mlp, twin_q
from trajectory_transformer.config import require

LOG_STD = (-5.0, 0.0)  # limits of the log standard deviation of both policies
MAX_ACTION = 0.999  # recorded actions beyond this would have an unbounded density before squashing

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Weights of the penalty that the paper tunes over."""
ACTOR_RATES = (3e-5, 1e-4, 3e-4)
"""Learning rates of the policy that the paper tunes over."""


@dataclass(frozen=True, kw_only=True)
class BRACSettings(Settings):
    """Settings of the authors' scripts `run_bc.sh` and `run_primal.sh`: 300,000 steps of cloning, then 500,000 of BRAC.

    `hidden` and `learning_rate` are those of the critics.
    """

    steps: int = 800_000
    learning_rate: float = 1e-3
    hidden: tuple[int, ...] = (300, 300)
    action_margin: float = 0.1
    actor_hidden: tuple[int, ...] = (200, 200)
    """Sizes of the hidden layers of the policy and of the behaviour policy."""
    actor_learning_rate: float = 3e-4
    """Learning rate of the policy."""
    clone_learning_rate: float = 5e-4
    """Learning rate of the behaviour policy."""
    clone_steps: int = 300_000
    """Steps at the start in which the behaviour policy is cloned and nothing else is trained."""
    warmup_steps: int = 20_000
    """Steps after that in which the policy follows the behaviour policy alone, while the critics learn."""
    penalty: float = 0.1
    """Weight of the divergence from the behaviour policy, in the policy's objective and in the values."""
    discount: float = 0.99
    """Discount of future rewards."""
    target_rate: float = 0.005
    """Share of the distance that target networks move in a step."""

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        super().__post_init__()
        require(min(self.actor_hidden, default=0) >= 1, "actor_hidden must be sizes of at least 1", self.actor_hidden)
        require(0 <= self.discount <= 1, "discount must lie in [0, 1]", self.discount)
        for name in ("clone_steps", "warmup_steps", "penalty"):
            require(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name))


class BRAC(TransitionAlgorithm):
    """Twin critics whose targets pay for the divergence of the next state, and a policy that pays for its own."""

    settings: BRACSettings
    losses = ("clone_terms", "critic_loss", "actor_losses")

    def __init__(self, settings: BRACSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights; policies have the mean and the log standard deviation of a Gaussian."""
        self.settings = settings
        o, a = sizes
        critics = {"q": Network((o + a, *settings.hidden, 1), per_learner=2)}
        policy, behaviour = ({name: Network((o, *settings.actor_hidden, 2 * a))} for name in ("policy", "behaviour"))
        self.critics = Group(init_networks(critics, seeds), settings.learning_rate, device=device)
        self.actor = Group(init_networks(policy, seeds), settings.actor_learning_rate, device=device)
        self.behaviour = Group(init_networks(behaviour, seeds), settings.clone_learning_rate, device=device)
        self.temperature = Group({"value": torch.ones(len(seeds), 1)}, settings.clone_learning_rate, device=device)
        self.targets = Copy(self.critics)
        self.groups = {
            "critics": self.critics,
            "actor": self.actor,
            "behaviour": self.behaviour,
            "temperature": self.temperature,
        }
        self.copies = {"critics": self.targets}
        self.action_dim = a
        self.noise = 2 * a

    def variant(self, step: int) -> str:
        """First the behaviour policy, then critics with a policy that follows it, then all of BRAC."""
        if step < self.settings.clone_steps:
            return "clone"
        return "follow" if step < self.settings.clone_steps + self.settings.warmup_steps else "improve"

    def update(self, batch: Batch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step: the behaviour policy, or critics, policy and targets."""
        following, own = torch.split(noise, self.action_dim, dim=-1)
        if variant == "clone":
            recorded, sampled = self.clone_terms(batch, own)
            temperature = self.temperature.tensors["value"][:, 0]
            self.behaviour.minimize((temperature.detach() * sampled - recorded).sum())
            self.temperature.minimize((temperature * (self.action_dim - sampled.detach())).sum())
            self.temperature.flat.clamp_(min=0.0)
            return {"behaviour": -recorded.detach(), "temperature": temperature.detach()}
        critic_loss = self.critic_loss(batch, following)
        self.critics.minimize(critic_loss.sum())
        value, divergence = self.actor_losses(batch, own)
        penalty = self.settings.penalty * divergence
        self.actor.minimize((penalty - value if variant == "improve" else penalty).sum())
        self.targets.follow(self.critics, self.settings.target_rate)
        return {"critic": critic_loss.detach(), "value": value.detach(), "divergence": divergence.detach()}

    def clone_terms(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean log-probabilities of the recorded actions and of own actions under the behaviour policy, each [S].

        The second one times the temperature is a penalty that keeps the entropy above -A: a behaviour policy that is
        narrower would make the divergence of almost every other policy huge.
        """
        mean, log_std = gaussian(self.behaviour.tensors, "behaviour", batch.observations)
        raw = torch.atanh(batch.actions.clamp(-MAX_ACTION, MAX_ACTION))
        own = mean + log_std.exp() * normal(noise)
        recorded, sampled = (squashed_log_prob(each, mean, log_std).mean(dim=1) for each in (raw, own))
        return recorded, sampled

    def critic_loss(self, batch: Batch, noise: Tensor) -> Tensor:
        """Squared errors of the two Q networks (their sum) [S]."""
        target = self.target(batch, noise)
        error = twin_q(self.critics.tensors, batch.observations, batch.actions) - target[:, None]  # [S, 2, B]
        return error.square().mean(dim=2).sum(dim=1)

    @torch.no_grad()
    def target(self, batch: Batch, noise: Tensor) -> Tensor:
        """Reward plus the discounted value of the next state, less its penalty [S, B]."""
        actions, divergence = self._sample(batch.next_observations, noise)
        value = twin_q(self.targets.tensors, batch.next_observations, actions).amin(dim=1)
        value = value - self.settings.penalty * divergence
        return batch.rewards + self.settings.discount * batch.continues * value

    def actor_losses(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean value of the policy's actions, and its mean divergence from the behaviour policy, each [S]."""
        actions, divergence = self._sample(batch.observations, noise)
        value = twin_q(frozen(self.critics.tensors), batch.observations, actions).amin(dim=1)
        return value.mean(dim=1), divergence.mean(dim=1)

    def _sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of the policy [S, B, A], and its divergence from the behaviour policy [S, B]."""
        mean, log_std = gaussian(self.actor.tensors, "policy", observations)
        behaviour = gaussian(frozen(self.behaviour.tensors), "behaviour", observations)
        actions = torch.tanh(mean + log_std.exp() * normal(noise))
        return actions, gaussian_kl(mean, log_std, *behaviour)

    def act(self, observations: Tensor) -> Tensor:
        """Squashed means of the policy [S, E, A] for observations [S, E, O]."""
        return torch.tanh(gaussian(self.actor.tensors, "policy", observations)[0])

    def q_values(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Smaller of the two Q values [S, E]."""
        return twin_q(self.critics.tensors, observations, actions).amin(dim=1)


def gaussian(tensors: Tensors, name: str, observations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation before squashing, each [S, B, A]."""
    mean, spread = mlp(tensors, name, observations).chunk(2, dim=-1)
    low, high = LOG_STD
    return mean, low + 0.5 * (high - low) * (torch.tanh(spread) + 1.0)


PRESETS = {"brac": Preset(BRAC, BRACSettings())}
