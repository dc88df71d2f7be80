"""Model-based offline planning (Argenson and Dulac-Arnold, 2021; arXiv 2008.05556).

Three ensembles are trained by supervision: the dynamics with the reward (the networks of `pets`), the behaviour prior
b(state, previous action), and the truncated value: the sum of the next H rewards after (state, previous action). The
planner samples trajectories from the prior, and averages them with weights that grow with their predicted return.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trajectory_transformer.baselines.algorithm import Actor, Algorithm, Preset, Settings, Sizes
from trajectory_transformer.baselines.data import Learner, Scaling, States, StepTable, with_goal
from trajectory_transformer.baselines.networks import Group, Network, Tensors, init_networks, mlp, repeat
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, FloatArray
from trajectory_transformer.pets.networks import BOUND_WEIGHT, gaussian_loss, gaussian_outputs, swish_layers
from trajectory_transformer.randomness import STEP, logical_shift, mix, stream_seed
from trajectory_transformer.rollout import Step

_BOOTSTRAP = 0xB5  # the random stream of bootstrap samples
_NOISE = 0xE5  # that of the planner's noise


@dataclass(frozen=True, kw_only=True)
class MBOPSettings(Settings):
    """Ensembles of three networks of 500 x 500 and batches of 512 as in the paper, 3e-4 as in Acme's implementation.

    The paper tunes horizon, noise and temperature for every task; `GRID` has values for the last two.
    """

    steps: int = 80_000
    batch_size: int = 512
    hidden: tuple[int, ...] = (500, 500)
    states: States = "standard"
    tf32: bool = True
    num_networks: int = 3
    """Networks of each ensemble."""
    horizon: int = 8
    """Steps that are planned, and rewards that the truncated value adds up."""
    num_trajectories: int = 100
    """Trajectories that are sampled for a plan; rounded up to a multiple of the networks."""
    noise_std: float = 0.1
    """Standard deviation of the noise on the prior's actions, which lie in [-1, 1]."""
    mixing: float = 0.0
    """Share of the last plan in the sampled actions."""
    temperature: float = 1.0
    """Inverse temperature of the returns in the average. Returns are in standard deviations of a step's reward."""

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        super().__post_init__()
        for name in ("num_networks", "horizon", "num_trajectories"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        require(self.noise_std >= 0, "noise_std must not be negative", self.noise_std)
        require(0 <= self.mixing < 1, "mixing must lie in [0, 1)", self.mixing)
        require(self.temperature >= 0, "temperature must not be negative", self.temperature)


GRID = {"noise_std": (0.05, 0.1, 0.2), "temperature": (1.0, 3.0)}
"""Settings for acting to choose from on tuning seeds."""


@dataclass(frozen=True)
class MBOPBatch:
    """Transitions of N networks, K for each of S learners; all values are scaled."""

    observations: Tensor  # [N, B, O]
    previous: Tensor  # [N, B, A], the action before; 0 at the first step
    actions: Tensor  # [N, B, A]
    changes: Tensor  # [N, B, O], of the observation
    rewards: Tensor  # [N, B]
    returns: Tensor  # [N, B], sum of the next H rewards from this step on
    whole: Tensor  # [N, B], 0 where a truncated episode cuts that sum short, else 1


class BootstrapRows(StepTable):
    """All transitions, with another bootstrap sample of them for every network."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        learners: Sequence[Learner],
        scaling: Scaling,
        device: torch.device,
        settings: MBOPSettings,
    ) -> None:
        """Make the rows and send them to the device."""
        self.horizon = settings.horizon
        super().__init__(datasets, learners, scaling, device)
        keys = [stream_seed(each.seed, _BOOTSTRAP, k) for each in learners for k in range(settings.num_networks)]
        self._keys = torch.tensor(keys, device=device).view(len(learners), settings.num_networks, 1)

    def table(self, dataset: Dataset, scaling: Scaling) -> Tensor:
        """The fields of a batch in order."""
        rows = []
        for episode in dataset:
            assert episode.rewards is not None
            observations = scaling.observations(torch.from_numpy(with_goal(episode))[None])[0]
            actions = scaling.actions(torch.from_numpy(episode.actions)[None])[0].clamp(-1.0, 1.0)
            rewards = episode.rewards * float(scaling.reward_scale) + float(scaling.reward_shift)
            sums = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
            starts = np.arange(len(episode))
            ends = starts + self.horizon
            returns = sums[np.minimum(ends, len(episode))] - sums[starts]
            whole = (ends <= len(episode)) | episode.terminated
            rest = np.stack([rewards, returns, whole], axis=1).astype(np.float32)
            previous = torch.cat([torch.zeros_like(actions[:1]), actions[:-1]])
            changes = observations[1:] - observations[:-1]
            rows.append(torch.cat([observations[:-1], previous, actions, changes, torch.from_numpy(rest)], dim=1))
        return torch.cat(rows)

    def gather(self, index: Tensor) -> MBOPBatch:
        """Rows [S, B] of the bootstrap samples: row i of network k's sample is a random row, a function of i and k."""
        offsets, counts = self.offsets[:, None, None], self.counts[:, None, None]
        bits = mix(self._keys + (index[:, None] - offsets + 1) * STEP)  # [S, K, B]
        rows = self._table[(offsets + logical_shift(bits, 1) % counts).flatten(0, 1)]
        o, a = self.observation_dim, self.action_dim
        parts = torch.split(rows, [o, a, a, o, 1, 1, 1], dim=-1)
        return MBOPBatch(*parts[:4], *(part[..., 0] for part in parts[4:]))

    def scales(self) -> Tensors:
        """Mean and deviation of changes and rewards [S, 1, O + 1] and of whole returns [S, 1, 1]."""
        found: dict[str, list[Tensor]] = {}
        for start, count in zip(self.offsets.tolist(), self.counts.tolist(), strict=True):
            rows = self._table[start : start + count].double()
            changes, returns, whole = rows[:, -self.observation_dim - 3 : -2], rows[:, -2], rows[:, -1] > 0
            kept = returns[whole] if bool(whole.any()) else returns
            for name, values in (("target", changes), ("return", kept[:, None])):
                std = values.std(dim=0, correction=0)
                found.setdefault(f"{name}_mean", []).append(values.mean(dim=0))
                found.setdefault(f"{name}_std", []).append(torch.where(std > 1e-6, std, 1.0))
        return {name: torch.stack(values)[:, None].float() for name, values in found.items()}


class MBOP(Algorithm[MBOPBatch]):
    """Dynamics, behaviour prior and truncated value, and the planner on top of them."""

    settings: MBOPSettings
    losses = ("model_losses",)

    def __init__(self, settings: MBOPSettings, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """Networks with random weights."""
        self.settings = settings
        (o, a), number = sizes, settings.num_networks
        shapes = {"dynamics": (o + a, 2 * (o + 1)), "prior": (o + a, a), "value": (o + a, 1)}
        networks = {name: Network((i, *settings.hidden, out), per_learner=number) for name, (i, out) in shapes.items()}
        tensors = init_networks(networks, seeds)
        tensors["low"] = torch.full((len(seeds) * number, 1, o + 1), -10.0)
        tensors["high"] = torch.full((len(seeds) * number, 1, o + 1), 0.5)
        self.models = Group(tensors, settings.learning_rate, device=device)
        # Not trained, but saved with the weights: the scales of what the networks predict.
        ones, one = torch.ones(len(seeds), 1, o + 1), torch.ones(len(seeds), 1, 1)
        scales = {"target_mean": 0 * ones, "target_std": ones, "return_mean": 0 * one, "return_std": one}
        self.scales = Group(scales, 0.0, device=device)
        self.groups = {"models": self.models, "scales": self.scales}
        self.observation_dim, self.action_dim = o, a

    def rows(
        self, datasets: Sequence[Dataset], learners: Sequence[Learner], scaling: Scaling, device: torch.device
    ) -> BootstrapRows:
        """All transitions; fits the scales of changes, rewards and returns."""
        rows = BootstrapRows(datasets, learners, scaling, device, self.settings)
        for name, value in rows.scales().items():
            self.scales.tensors[name].data.copy_(value)
        return rows

    def update(self, batch: MBOPBatch, noise: Tensor, variant: str) -> dict[str, Tensor]:
        """Take one training step of all three ensembles."""
        losses = self.model_losses(batch)
        self.models.minimize(sum(losses.values(), start=torch.zeros_like(losses["dynamics"])).sum())
        learners = len(self.scales.tensors["return_std"])
        return {name: value.detach().view(learners, -1).mean(dim=1) for name, value in losses.items()}

    def model_losses(self, batch: MBOPBatch) -> Tensors:
        """Losses of every network, each [N]."""
        tensors, number = self.models.tensors, self.settings.num_networks
        scales = {name: repeat(value.detach(), number) for name, value in self.scales.tensors.items()}
        targets = torch.cat([batch.changes, batch.rewards[..., None]], dim=-1)
        targets = (targets - scales["target_mean"]) / scales["target_std"]
        likelihood = gaussian_loss(*self.dynamics(batch.observations, batch.actions), targets)
        distance = (tensors["high"] - tensors["low"]).mean(dim=(1, 2))
        before = torch.cat([batch.observations, batch.previous], dim=-1)
        prior = (mlp(tensors, "prior", before) - batch.actions).square().mean(dim=(1, 2))
        returns = (batch.returns[..., None] - scales["return_mean"]) / scales["return_std"]
        error = (mlp(tensors, "value", before) - returns)[..., 0].square() * batch.whole
        value = error.sum(dim=1) / batch.whole.sum(dim=1).clamp(min=1.0)
        return {"dynamics": likelihood + BOUND_WEIGHT * distance, "prior": prior, "value": value}

    def dynamics(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of scaled changes and rewards: [N, B, O] and [N, B, A] -> two of [N, B, O + 1]."""
        tensors = self.models.tensors
        layers = range(len(self.settings.hidden) + 1)
        outputs = swish_layers(
            [tensors[f"dynamics.{layer}.weight"] for layer in layers],
            [tensors[f"dynamics.{layer}.bias"] for layer in layers],
            torch.cat([observations, actions], dim=-1),
        )
        return gaussian_outputs(outputs, tensors["low"], tensors["high"])

    @torch.no_grad()
    def plan(self, observations: Tensor, previous: Tensor, last: Tensor, generator: torch.Generator) -> Tensor:
        """Plan for S learners and E environments.

        observations [S, E, O], previous actions [S, E, A], last plan [S, E, H, A] -> new plan [S, E, H, A].
        """
        settings, number = self.settings, self.settings.num_networks
        (learners, num_envs), rounds = observations.shape[:2], -(-settings.num_trajectories // number)

        def sampled(values: Tensor) -> Tensor:
            """The same for all trajectories, R for each network: [S, E, D] -> [N, E R, D]."""
            shape = (learners, number, num_envs, rounds, values.shape[-1])
            return values[:, None, :, None].expand(shape).reshape(learners * number, num_envs * rounds, -1)

        def of_all(values: Tensor) -> Tensor:
            """Give every network the trajectories of all of them: [N, M, D] -> [N, K M, D]."""
            return repeat(values.view(learners, -1, values.shape[-1]), number)

        scales = {name: value[:, None, None] for name, value in self.scales.tensors.items()}
        scales = {name: value.detach() for name, value in scales.items()}  # [S, 1, 1, 1, D]
        own = torch.arange(number, device=observations.device)
        states, before = sampled(observations), sampled(previous)
        total = states.new_zeros(learners, number, num_envs * rounds)  # [S, K, E R]
        chosen = []
        for step in range(settings.horizon):
            action = mlp(self.models.tensors, "prior", torch.cat([states, before], dim=-1))
            action = action + settings.noise_std * torch.randn(action.shape, device=action.device, generator=generator)
            kept = sampled(last[:, :, min(step + 1, settings.horizon - 1)])
            before = ((1.0 - settings.mixing) * action + settings.mixing * kept).clamp(-1.0, 1.0)
            mean, _ = self.dynamics(of_all(states), of_all(before))
            mean = mean.view(learners, number, number, -1, self.observation_dim + 1)  # [S, network, trajectory of, ...]
            mean = mean * scales["target_std"] + scales["target_mean"]
            # The state follows the trajectory's own network, the reward is the mean over all.
            states = states + mean[:, own, own, :, :-1].flatten(0, 1)
            total += mean[..., -1].mean(dim=1)
            chosen.append(before)
        value = mlp(self.models.tensors, "value", torch.cat([of_all(states), of_all(before)], dim=-1))
        value = value.view(learners, number, number, -1, 1) * scales["return_std"] + scales["return_mean"]
        total = (total + value[..., 0].mean(dim=1)) / scales["target_std"][:, 0, 0, :, -1:]
        weights = torch.softmax(
            settings.temperature * total.view(learners, number, num_envs, rounds).transpose(1, 2).flatten(2), dim=-1
        )  # [S, E, K R]
        actions = torch.stack(chosen, dim=2).view(learners, number, num_envs, rounds, settings.horizon, -1)
        actions = actions.transpose(1, 2).flatten(2, 3)  # [S, E, K R, H, A]
        return (weights[..., None, None] * actions).sum(dim=2)

    def act(self, observations: Tensor) -> Tensor:
        """Actions [S, E, A] of the first step of an episode, for observations [S, E, O]."""
        generator = torch.Generator(observations.device).manual_seed(stream_seed(_NOISE))
        last = observations.new_zeros(*observations.shape[:2], self.settings.horizon, self.action_dim)
        return self.plan(observations, last[:, :, 0], last, generator)[:, :, 0]

    def make_actor(self, scaling: Scaling) -> Actor:
        """Plan in every step, remembering the last plan of each environment."""
        return _Planner(self, scaling).act


class _Planner:
    """The last plans of E environments; a plan's first action is what was done last."""

    def __init__(self, model: MBOP, scaling: Scaling) -> None:
        self.model = model
        self.scaling = scaling
        self.generator = torch.Generator(scaling.observation_mean.device).manual_seed(stream_seed(_NOISE))
        self.plans: Tensor | None = None  # [1, E, H, A]

    @torch.no_grad()
    def act(self, step: Step) -> FloatArray:
        """Actions [E, A] in the units of the dataset."""
        mean = self.scaling.observation_mean
        seen = np.concatenate([step.observations, step.goals], axis=1)[:, : mean.shape[1]]
        observations = self.scaling.observations(torch.from_numpy(seen)[None].to(mean.device))
        plans = self.plans
        if plans is None or plans.shape[1] != len(step.first):
            shape = (1, len(step.first), self.model.settings.horizon, self.model.action_dim)
            plans = torch.zeros(shape, device=mean.device)
        first = torch.from_numpy(step.first).to(mean.device)[None, :, None, None]
        plans = torch.where(first, 0.0, plans)
        self.plans = self.model.plan(observations, plans[:, :, 0], plans, self.generator)
        actions: FloatArray = self.scaling.real_actions(self.plans[:, :, 0])[0].cpu().numpy()
        return actions


PRESETS = {"mbop": Preset(MBOP, MBOPSettings())}
