"""TD3+BC (Fujimoto and Gu, 2021; arXiv 2106.06860): TD3 with a behaviour cloning term."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Preset, Settings, Sizes, TransitionAlgorithm, normal
from trajectory_transformer.baselines.data import Batch, States
from trajectory_transformer.baselines.networks import Copy, Group, Network, Tensors, frozen, init_networks, mlp, twin_q
from trajectory_transformer.config import require


@dataclass(frozen=True, kw_only=True)
class TD3BCSettings(Settings):
    """Settings of the paper (table 3 of its appendix), for all tasks: TD3's own, alpha 2.5, standardised states."""

    states: States = "standard"
    discount: float = 0.99
    """Discount of future rewards."""
    alpha: float = 2.5
    """Weight of the Q value against behaviour cloning, after division by the mean magnitude of Q."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    noise_limit: float = 0.5
    """Limit of that noise."""
    actor_every: int = 2
    """Steps between updates of the policy and of all target networks."""
    target_rate: float = 0.005
    """Share of the distance that target networks move in an update."""

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        super().__post_init__()
        require(0 <= self.discount <= 1, "discount must lie in [0, 1]", self.discount)
        require(self.actor_every >= 1, "actor_every must be at least 1", self.actor_every)


class TD3BC(TransitionAlgorithm):
    """Clipped double Q-learning with a deterministic policy that stays near the data."""

    settings: TD3BCSettings
    losses = ("critic_loss", "actor_loss")

    def __init__(self, settings: TD3BCSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights, initialised as in the authors' code (the default of PyTorch)."""
        self.settings = settings
        o, a = sizes
        critics = {"q": Network((o + a, *settings.hidden, 1), per_learner=2)}
        policy = {"policy": Network((o, *settings.hidden, a))}
        self.critics = Group(init_networks(critics, seeds), settings.learning_rate, device=device)
        self.actor = Group(init_networks(policy, seeds), settings.learning_rate, device=device)
        self.target_critics, self.target_actor = Copy(self.critics), Copy(self.actor)
        self.groups = {"critics": self.critics, "actor": self.actor}
        self.copies = {"critics": self.target_critics, "actor": self.target_actor}
        self.noise = a

    def variant(self, step: int) -> str:
        """The policy is updated in the last of every `actor_every` steps."""
        return "actor" if (step + 1) % self.settings.actor_every == 0 else "critics"

    def update(self, batch: Batch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step."""
        critic_loss = self.critic_loss(batch, noise)
        self.critics.minimize(critic_loss.sum())
        if variant == "critics":
            return {"critic": critic_loss.detach()}
        actor_loss, clone_loss = self.actor_loss(batch)
        self.actor.minimize(actor_loss.sum())
        self.target_critics.follow(self.critics, self.settings.target_rate)
        self.target_actor.follow(self.actor, self.settings.target_rate)
        return {"critic": critic_loss.detach(), "actor": actor_loss.detach(), "clone": clone_loss.detach()}

    def critic_loss(self, batch: Batch, noise: Tensor) -> Tensor:
        """Squared errors of the two Q networks (their sum) [S]."""
        settings = self.settings
        with torch.no_grad():
            jitter = (settings.target_noise * normal(noise)).clamp(-settings.noise_limit, settings.noise_limit)
            actions = (policy(self.target_actor.tensors, batch.next_observations) + jitter).clamp(-1.0, 1.0)
            next_q = twin_q(self.target_critics.tensors, batch.next_observations, actions).amin(dim=1)
            target = batch.rewards + settings.discount * batch.continues * next_q  # [S, B]
        error = twin_q(self.critics.tensors, batch.observations, batch.actions) - target[:, None]
        return error.square().mean(dim=2).sum(dim=1)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of the policy, and its behaviour cloning term, each [S]."""
        actions = policy(self.actor.tensors, batch.observations)
        first = {name: value[::2] for name, value in frozen(self.critics.tensors).items()}  # of each pair
        q = mlp(first, "q", torch.cat([batch.observations, actions], dim=-1))[..., 0]  # [S, B]
        clone = (actions - batch.actions).square().mean(dim=(1, 2))
        weight = self.settings.alpha / q.abs().mean(dim=1).detach()
        return clone - weight * q.mean(dim=1), clone

    def act(self, observations: Tensor) -> Tensor:
        """Actions [S, E, A] for observations [S, E, O]."""
        return policy(self.actor.tensors, observations)

    def q_values(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Smaller of the two Q values [S, E]."""
        return twin_q(self.critics.tensors, observations, actions).amin(dim=1)


def policy(tensors: Tensors, observations: Tensor) -> Tensor:
    """Actions of a deterministic policy."""
    return torch.tanh(mlp(tensors, "policy", observations))


PRESETS = {"td3bc": Preset(TD3BC, TD3BCSettings())}
