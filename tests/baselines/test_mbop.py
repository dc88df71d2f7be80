"""MBOP: returns, bootstrap samples and models by value, the batched planner against a plain one, and a known system."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.baselines.conftest import SMALL, point_episodes
from trajectory_transformer.baselines import Baseline, train_baseline
from trajectory_transformer.baselines.algorithm import Sizes
from trajectory_transformer.baselines.data import Learner, fit_scaling
from trajectory_transformer.baselines.mbop import MBOP, BootstrapRows, MBOPSettings
from trajectory_transformer.baselines.networks import mlp
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.rollout import Step

CPU = torch.device("cpu")


def counting(*, terminated: bool) -> Dataset:
    """Six steps with observations t, actions t / 10 and rewards 2^t."""
    times = np.arange(7, dtype=np.float32)
    actions = (times[:-1, None] / 10).astype(np.float32)
    return Dataset((Episode(times[:, None], actions, (2 ** times[:-1]).astype(np.float32), terminated),))


def rows_of(data: Dataset, settings: MBOPSettings, seeds: tuple[int, ...] = (0,)) -> BootstrapRows:
    learners = [Learner(seed) for seed in seeds]
    scaling = fit_scaling([data], learners, "raw", "raw")
    return BootstrapRows([data], learners, scaling, CPU, settings)


@pytest.mark.parametrize("terminated", [True, False])
def test_truncated_returns_and_previous_actions_by_value(terminated: bool) -> None:
    rows = rows_of(counting(terminated=terminated), MBOPSettings(horizon=3))
    table = rows._table
    assert table[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert table[:, 1].tolist() == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4])  # the action before
    assert table[:, 2].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert table[:, 3].tolist() == [1.0] * 6
    assert table[:, 4].tolist() == [1, 2, 4, 8, 16, 32]
    assert table[:, 5].tolist() == [7, 14, 28, 56, 48, 32]
    # Nothing follows a task that has ended, but an episode that was cut off would have gone on.
    assert table[:, 6].tolist() == [1, 1, 1, 1, float(terminated), float(terminated)]
    scales = rows.scales()
    returns = np.array([7, 14, 28, 56, 48, 32] if terminated else [7, 14, 28, 56])
    assert float(scales["return_mean"]) == pytest.approx(returns.mean())
    assert float(scales["return_std"]) == pytest.approx(returns.std())
    assert scales["target_mean"][0, 0].tolist() == pytest.approx([1.0, 10.5])
    assert float(scales["target_std"][0, 0, 0]) == 1.0  # of a constant


def test_every_network_has_its_own_bootstrap_sample() -> None:
    data = point_episodes(100)  # 2,000 transitions
    rows = rows_of(data, MBOPSettings(num_networks=3), seeds=(0, 1))
    index = torch.arange(2000).expand(2, -1)
    batch = rows.gather(index)
    assert batch.observations.shape == (6, 2000, 1)
    for position in batch.rewards:
        distinct = len(set(position.tolist())) / len(set(batch.rewards.flatten().tolist()))
        assert distinct == pytest.approx(1 - math.exp(-1), abs=0.03)
    assert not torch.equal(batch.rewards[0], batch.rewards[1])
    assert not torch.equal(batch.rewards[0], batch.rewards[3])
    assert torch.equal(rows.gather(index[:, 5:10]).rewards, batch.rewards[:, 5:10])


def test_losses_by_value() -> None:
    mbop = MBOP(MBOPSettings(hidden=(8,), num_networks=2, horizon=3, states="raw"), Sizes(1, 1), (0,), CPU)
    data = counting(terminated=False)
    rows = mbop.rows([data], [Learner(0)], fit_scaling([data], [Learner(0)], "raw", "raw"), CPU)
    batch = rows.gather(torch.arange(6)[None])
    tensors, scales = mbop.models.tensors, {name: value[0] for name, value in mbop.scales.tensors.items()}
    losses = mbop.model_losses(batch)
    before = torch.cat([batch.observations, batch.previous], dim=-1)
    for k in range(2):
        kept = batch.whole[k] > 0
        returns = (batch.returns[k] - scales["return_mean"][0]) / scales["return_std"][0]
        value = (mlp(tensors, "value", before)[k, :, 0] - returns)[kept].square().mean()
        torch.testing.assert_close(losses["value"][k], value)
        prior = (mlp(tensors, "prior", before)[k] - batch.actions[k]).square().mean()
        torch.testing.assert_close(losses["prior"][k], prior)
        mean, log_variance = (part[k] for part in mbop.dynamics(batch.observations, batch.actions))
        targets = torch.stack([batch.changes[k, :, 0], batch.rewards[k]], dim=-1)
        targets = (targets - scales["target_mean"]) / scales["target_std"]
        likelihood = ((mean - targets) ** 2 / log_variance.exp() + log_variance).mean()
        torch.testing.assert_close(losses["dynamics"][k], likelihood + 0.01 * 10.5)
    assert (batch.whole == 0).any() and (batch.whole == 1).any()


def noisy_system(count: int = 60, steps: int = 50) -> Dataset:
    """A system s' = 0.8 s + a + noise of 0.1 with r = -s; actions are -0.5 times the action before + noise of 0.2."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(count):
        states, actions = [rng.normal()], [rng.uniform(-1, 1)]
        for _ in range(steps):
            states.append(0.8 * states[-1] + actions[-1] + 0.1 * rng.normal())
            actions.append(float(np.clip(-0.5 * actions[-1] + 0.2 * rng.normal(), -1, 1)))
        parts = [np.array(states, np.float32)[:, None], np.array(actions[:-1], np.float32)[:, None]]
        episodes.append(Episode(parts[0], parts[1], -parts[0][:-1, 0], False))
    return Dataset(tuple(episodes))


def test_models_of_a_known_system() -> None:
    settings = {**SMALL, "steps": 600, "batch_size": 128, "learning_rate": 5e-3, "horizon": 2, "states": "raw"}
    baseline = train_baseline(noisy_system(), algorithm="mbop", settings=settings, device="cpu")
    mbop = baseline.algorithm
    assert isinstance(mbop, MBOP)
    states, actions = torch.linspace(-0.4, 0.4, 9)[:, None], torch.linspace(0.3, -0.3, 9)[:, None]
    with torch.no_grad():
        mean, log_variance = mbop.dynamics(states.expand(3, -1, -1), actions.expand(3, -1, -1))
        scales = {name: value[0] for name, value in mbop.scales.tensors.items()}
        mean = mean * scales["target_std"] + scales["target_mean"]
        std = torch.exp(0.5 * log_variance) * scales["target_std"]
        inputs = torch.cat([states, actions], dim=1).expand(3, -1, -1)
        prior = mlp(mbop.models.tensors, "prior", inputs)
        value = mlp(mbop.models.tensors, "value", inputs) * scales["return_std"] + scales["return_mean"]
    torch.testing.assert_close(mean.mean(0)[:, :1], -0.2 * states + actions, atol=0.05, rtol=0.0)
    torch.testing.assert_close(mean.mean(0)[:, 1:], -states, atol=0.05, rtol=0.0)
    torch.testing.assert_close(std.mean(0)[:, 0], torch.full((9,), 0.1), atol=0.02, rtol=0.0)
    torch.testing.assert_close(prior.mean(0), -0.5 * actions, atol=0.08, rtol=0.0)
    # Two rewards from here on: -s and -(0.8 s + a), with a = -0.5 times the action before.
    torch.testing.assert_close(value.mean(0), -1.8 * states + 0.5 * actions, atol=0.12, rtol=0.0)


def plain_plan(mbop: MBOP, observation: torch.Tensor, previous: torch.Tensor, last: torch.Tensor, noise: Any) -> Any:
    """Algorithm 2 of the paper for one environment, one trajectory and one network at a time; noise [K, R, H, A]."""
    settings, tensors = mbop.settings, mbop.models.tensors
    scales = {name: value.detach()[0, 0] for name, value in mbop.scales.tensors.items()}

    def network(name: str, index: int, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        chosen = {key: value[index : index + 1] for key, value in tensors.items()}
        return mlp(chosen, name, torch.cat([state, action])[None, None])[0, 0]

    def change(index: int, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        every = mbop.dynamics(*(each.expand(settings.num_networks, 1, -1) for each in (state, action)))[0]
        return every[index, 0] * scales["target_std"] + scales["target_mean"]

    trajectories, returns = [], []
    for member in range(settings.num_networks):
        for number in range(noise.shape[1]):
            state, action, total, taken = observation, previous, 0.0, []
            for step in range(settings.horizon):
                prior = network("prior", member, state, action) + settings.noise_std * noise[member, number, step]
                kept = last[min(step + 1, settings.horizon - 1)]
                action = ((1 - settings.mixing) * prior + settings.mixing * kept).clamp(-1, 1)
                changes = [change(index, state, action) for index in range(settings.num_networks)]
                total += float(torch.stack(changes)[:, -1].mean())
                state = state + changes[member][:-1]
                taken.append(action)
            values = [network("value", index, state, action) for index in range(settings.num_networks)]
            total += float(torch.stack(values).mean() * scales["return_std"] + scales["return_mean"])
            trajectories.append(torch.stack(taken))
            returns.append(total / float(scales["target_std"][-1]))
    weights = torch.softmax(settings.temperature * torch.tensor(returns), dim=0)
    return (weights[:, None, None] * torch.stack(trajectories)).sum(0)


@torch.no_grad()
def test_batched_plans_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MBOPSettings(
        hidden=(8,), num_networks=2, horizon=3, num_trajectories=5, noise_std=0.4, mixing=0.3, temperature=2.0
    )
    mbop = MBOP(settings, Sizes(2, 1), (0,), CPU)
    generator = torch.Generator().manual_seed(0)
    mbop.models.flat += 0.3 * torch.randn(mbop.models.flat.shape, generator=generator)
    mbop.scales.flat += torch.rand(mbop.scales.flat.shape, generator=generator)
    observations, previous = torch.randn(1, 2, 2, generator=generator), torch.rand(1, 2, 1, generator=generator)
    last = torch.rand(1, 2, 3, 1, generator=generator)
    # Two networks with three trajectories each in two environments: noise of each step [K, E R, A].
    noise = torch.randn(3, 2, 6, 1, generator=generator)
    draws = iter(noise)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: next(draws))
    found = mbop.plan(observations, previous, last, generator)[0]
    for env in range(2):
        own = noise.view(3, 2, 2, 3, 1)[:, :, env].permute(1, 2, 0, 3)  # [K, R, H, A]
        expected = plain_plan(mbop, observations[0, env], previous[0, env], last[0, env], own)
        torch.testing.assert_close(found[env], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_learners_plan_for_themselves() -> None:
    settings = MBOPSettings(hidden=(8,), num_networks=2, horizon=3, num_trajectories=4, noise_std=0.0)
    together = MBOP(settings, Sizes(2, 1), (0, 1), CPU)
    observations = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0))
    for index, seed in enumerate((0, 1)):
        alone = MBOP(settings, Sizes(2, 1), (seed,), CPU)
        torch.testing.assert_close(together.act(observations)[index], alone.act(observations[index : index + 1])[0])


def test_planning_improves_on_the_data_and_imitates_it_without_temperature() -> None:
    settings = {**SMALL, "steps": 300, "learning_rate": 3e-3, "horizon": 4, "num_trajectories": 60}
    settings |= {"noise_std": 0.5, "temperature": 3.0}
    baseline = train_baseline(point_episodes(100), algorithm="mbop", settings=settings, seeds=[1, 2], device="cpu")

    def play(trained: Baseline, seed: int) -> float:
        policy = trained.policy(seed)
        positions = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]
        for time in range(10):
            first = np.full(50, time == 0)
            step = Step(positions, np.zeros(50, np.float32), first, np.zeros((50, 0), np.float32), ~first)
            positions = np.clip(positions + 0.4 * policy.act(step), -2, 2).astype(np.float32)
        return float(np.abs(positions).mean())

    assert max(play(baseline, seed) for seed in (1, 2)) < 0.15
    # The mean of random actions is to stand still.
    unweighted = baseline.with_settings({"temperature": 0})
    assert min(play(unweighted, seed) for seed in (1, 2)) > 0.3
    with pytest.raises(ValueError, match="settings must not change the networks"):
        baseline.with_settings({"hidden": [16]})


def test_plans_are_forgotten_when_an_episode_starts() -> None:
    settings = MBOPSettings(hidden=(8,), num_networks=2, horizon=3, num_trajectories=4, noise_std=0.0, mixing=0.5)
    mbop = MBOP(settings, Sizes(1, 1), (0,), CPU)
    act = mbop.make_actor(fit_scaling([counting(terminated=True)], [Learner(0)], "raw", "raw"))

    def step(*first: bool) -> Step:
        ones = np.ones((2, 1), np.float32)
        return Step(ones, ones[:, 0], np.array(first), np.zeros((2, 0), np.float32), np.ones(2, np.bool_))

    begun = act(step(True, True))
    assert begun[0] == begun[1]
    later = act(step(False, True))
    assert later[1] == begun[1] and later[0] != later[1]
