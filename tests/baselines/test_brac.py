"""BRAC-v: its divergence and targets by value, and a bandit with a known answer."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.baselines.conftest import SMALL, point_episodes
from trajectory_transformer.baselines import train_baseline
from trajectory_transformer.baselines.algorithm import Sizes, normal
from trajectory_transformer.baselines.brac import BRAC, BRACSettings, gaussian
from trajectory_transformer.baselines.data import Batch
from trajectory_transformer.baselines.distributions import gaussian_kl, squashed_log_prob
from trajectory_transformer.baselines.networks import twin_q
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.rollout import Step

CPU = torch.device("cpu")
TINY = BRACSettings(hidden=(8,), actor_hidden=(8,), clone_steps=2, warmup_steps=1, penalty=0.7, discount=0.9)


def random_batch(learners: int = 2, size: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        torch.randn(learners, size, 3, generator=generator),
        torch.rand(learners, size, 2, generator=generator) * 2 - 1,
        torch.randn(learners, size, generator=generator),
        torch.randn(learners, size, 3, generator=generator),
        (torch.rand(learners, size, generator=generator) > 0.3).float(),
    )


def test_divergence_in_closed_form_is_that_of_samples_of_the_squashed_policies() -> None:
    mean, log_std = torch.tensor([0.3, -0.8]), torch.tensor([-0.7, 0.1])
    other_mean, other_log_std = torch.tensor([-0.2, -0.5]), torch.tensor([-0.1, -0.2])
    raw = mean + log_std.exp() * torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0))
    sampled = squashed_log_prob(raw, mean, log_std) - squashed_log_prob(raw, other_mean, other_log_std)
    found = float(gaussian_kl(mean, log_std, other_mean, other_log_std))
    assert found == pytest.approx(float(sampled.mean()), rel=0.01)
    by_hand = sum(
        math.log(t / s) + (s * s + (m - n) ** 2) / (2 * t * t) - 0.5
        for m, s, n, t in zip(
            mean.tolist(), log_std.exp().tolist(), other_mean.tolist(), other_log_std.exp().tolist(), strict=True
        )
    )
    assert found == pytest.approx(by_hand, rel=1e-5)
    assert float(gaussian_kl(mean, log_std, mean, log_std)) == pytest.approx(0.0, abs=1e-6)


def test_targets_pay_for_the_divergence_of_the_next_state() -> None:
    brac, batch = BRAC(TINY, Sizes(3, 2), (0, 1), CPU), random_batch()
    brac.behaviour.flat += 0.3
    noise = torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(1))
    mean, log_std = gaussian(brac.actor.tensors, "policy", batch.next_observations)
    other = gaussian(brac.behaviour.tensors, "behaviour", batch.next_observations)
    actions = torch.tanh(mean + log_std.exp() * normal(noise))
    q = twin_q(brac.targets.tensors, batch.next_observations, actions)
    smaller = torch.minimum(q[:, 0], q[:, 1])
    expected = batch.rewards + 0.9 * batch.continues * (smaller - 0.7 * gaussian_kl(mean, log_std, *other))
    torch.testing.assert_close(brac.target(batch, noise), expected.detach())
    assert (gaussian_kl(mean, log_std, *other) > 0.01).all()


def test_the_behaviour_policy_is_cloned_first_and_then_left_alone() -> None:
    brac, batch = BRAC(TINY, Sizes(3, 2), (0, 1), CPU), random_batch()
    noise = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(1))
    assert [brac.variant(step) for step in range(5)] == ["clone", "clone", "follow", "improve", "improve"]

    def changes(variant: str) -> set[str]:
        before = {name: group.flat.clone() for name, group in brac.groups.items()}
        brac.update(batch, noise, variant)
        return {name for name, group in brac.groups.items() if not torch.equal(group.flat, before[name])}

    assert changes("clone") == {"behaviour", "temperature"}
    assert changes("follow") == {"critics", "actor"}
    assert changes("improve") == {"critics", "actor"}


def test_the_policy_only_follows_the_behaviour_policy_at_first() -> None:
    settings = replace(TINY, actor_learning_rate=1e-2, penalty=1.0)
    brac, batch = BRAC(settings, Sizes(3, 2), (0, 1), CPU), random_batch()
    brac.actor.flat += 0.3 * torch.randn(brac.actor.flat.shape, generator=torch.Generator().manual_seed(1))
    noise = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(600):
        divergence = brac.update(batch, noise, "follow")["divergence"]
    assert (divergence < 0.01).all()


def bandit(count: int = 4000) -> Dataset:
    """One state; the arms are the halves of [-1, 1], and the right one pays 1. Actions are tanh(N(-0.3, 0.5))."""
    rng = np.random.default_rng(0)
    actions = np.tanh(rng.normal(-0.3, 0.5, size=count)).astype(np.float32)
    zeros = np.zeros((2, 1), np.float32)
    rewards = (actions > 0).astype(np.float32)
    return Dataset(
        tuple(
            Episode(zeros, action.reshape(1, 1), reward.reshape(1), True)
            for action, reward in zip(actions, rewards, strict=True)
        )
    )


def best_gaussian(penalty: float) -> tuple[float, float]:
    """Probability of the right arm and KL of the Gaussian that maximises P(right) - penalty * KL, by a fine grid."""
    means, stds = np.meshgrid(np.linspace(-0.5, 2.5, 601), np.linspace(0.1, 0.9, 401), indexing="ij")
    right = 0.5 * (1 + np.vectorize(math.erf)(means / stds / math.sqrt(2)))
    kl = np.log(0.5 / stds) + (stds**2 + (means + 0.3) ** 2) / (2 * 0.5**2) - 0.5
    best = np.argmax(right - penalty * kl)
    return float(right.flat[best]), float(kl.flat[best])


@pytest.mark.parametrize("penalty", [0.3, 3.0])
def test_a_two_armed_bandit_has_the_known_answer(penalty: float) -> None:
    settings = {
        **SMALL,
        "actor_hidden": [16],
        "batch_size": 128,
        "steps": 1300,
        "clone_steps": 650,  # the temperature needs 200 of them to fall to 0
        "warmup_steps": 250,
        "learning_rate": 5e-3,
        "clone_learning_rate": 5e-3,
        "actor_learning_rate": 5e-3,
        "penalty": penalty,
        "action_margin": 0.0,  # the answer below is for tanh up to the limits
    }
    baseline = train_baseline(bandit(), algorithm="brac", settings=settings, device="cpu")
    brac = baseline.algorithm
    assert isinstance(brac, BRAC)
    state = torch.zeros(1, 1, 1)
    behaviour = [float(value.detach()) for value in gaussian(brac.behaviour.tensors, "behaviour", state)]
    assert behaviour == pytest.approx([-0.3, math.log(0.5)], abs=0.06)
    mean, log_std = (float(value.detach()) for value in gaussian(brac.actor.tensors, "policy", state))
    right = 0.5 * (1 + math.erf(mean / math.exp(log_std) / math.sqrt(2)))
    kl = math.log(0.5) - log_std + (math.exp(2 * log_std) + (mean + 0.3) ** 2) / (2 * 0.5**2) - 0.5
    expected_right, expected_kl = best_gaussian(penalty)
    assert right == pytest.approx(expected_right, abs=0.06)
    assert kl == pytest.approx(expected_kl, rel=0.25, abs=0.02)


def test_the_cloned_policy_keeps_an_entropy_of_minus_its_dimensions() -> None:
    """Actions are N(0, 0.05), but log(2 pi e s^2) / 2 = -1 is the smallest entropy: a deviation s of 0.089."""
    brac = BRAC(replace(TINY, clone_learning_rate=3e-3, action_margin=0.0), Sizes(3, 2), (0, 1), CPU)
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(size=128)
    batch = replace(batch, observations=torch.zeros_like(batch.observations))
    found = []
    for step in range(1600):
        batch = replace(batch, actions=0.05 * torch.randn(2, 128, 2, generator=generator))
        losses = brac.update(batch, torch.rand(2, 128, 4, generator=generator), "clone")
        if step >= 1200:
            found.append(gaussian(brac.behaviour.tensors, "behaviour", batch.observations[:, :1])[1].detach())
    assert (losses["temperature"] > 0.3).all()
    log_std = torch.stack(found).mean(dim=0)
    expected = -1 - 0.5 * math.log(2 * math.pi * math.e)
    torch.testing.assert_close(log_std, torch.full_like(log_std, expected), atol=0.15, rtol=0.0)


def test_the_temperature_of_cloning_stops_at_zero_and_rises_again() -> None:
    brac = BRAC(replace(TINY, clone_learning_rate=1e-2), Sizes(3, 2), (0, 1), CPU)
    batch = random_batch()
    noise = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(1))
    weights = brac.behaviour.flat.clone()
    bias = brac.behaviour.tensors["behaviour.1.bias"].data  # of the means and of the deviations
    found = []
    for spread, steps in ((3.0, 150), (-3.0, 100)):  # a wide policy, then a narrow one
        for _ in range(steps):
            brac.behaviour.flat.data.copy_(weights)
            bias[..., 2:] = spread
            losses = brac.update(batch, noise, "clone")
        found.append(losses["temperature"].clone())
    assert found[0].tolist() == [0.0, 0.0] and (found[1] > 0.2).all()


def test_brac_learns_to_hold_a_point() -> None:
    settings = {**SMALL, "actor_hidden": [32, 32], "steps": 700, "clone_steps": 150, "warmup_steps": 50}
    settings |= {"learning_rate": 3e-3, "actor_learning_rate": 3e-3, "clone_learning_rate": 3e-3, "discount": 0.8}
    baseline = train_baseline(point_episodes(100), algorithm="brac", settings=settings, seeds=[1, 2], device="cpu")
    for seed in (1, 2):
        policy = baseline.policy(seed)
        positions = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]
        for time in range(10):
            first = np.full(50, time == 0)
            step = Step(positions, np.zeros(50, np.float32), first, np.zeros((50, 0), np.float32), ~first)
            positions = np.clip(positions + 0.4 * policy.act(step), -2, 2).astype(np.float32)
        assert float(np.abs(positions).mean()) < 0.15
