"""Predictions of ensembles: hand-made ones by value, fitted ones against a linear system with a known answer."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pets.conftest import LinearSystem
from trajectory_transformer.checkpoint import DESCRIPTION
from trajectory_transformer.pets import Ensemble, EnsembleConfig, GaussianNetworks
from trajectory_transformer.pets.ensemble import Propagation


def log_density(x: float, mean: float, std: float) -> float:
    """Of a Gaussian."""
    return -0.5 * ((x - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))


def drifting(*drifts: float, std: float = 1e-3) -> Ensemble:
    """One network per drift: s' = s + drift with the given deviation, whatever the action; one dimension."""
    config = EnsembleConfig(num_networks=len(drifts), num_elites=len(drifts), num_layers=1, width=2)
    networks = GaussianNetworks(len(drifts), 2, 1, num_layers=1, width=2, generator=torch.Generator())
    with torch.no_grad():
        for weight in networks.weights:
            weight.zero_()
        networks.biases[-1].copy_(torch.tensor([[drift, 2 * math.log(std)] for drift in drifts])[:, None])
        networks.min_log_variance.fill_(-60.0)
        networks.max_log_variance.fill_(60.0)
    scales = {
        "input_mean": torch.zeros(2),
        "input_std": torch.ones(2),
        "target_mean": torch.zeros(1),
        "target_std": torch.ones(1),
    }
    return Ensemble(networks, scales, config, observation_dim=1)


def test_ts_infinity_keeps_the_network_of_each_sample() -> None:
    found = drifting(1.0, -1.0).predict(torch.zeros(1), torch.zeros(16, 1), 16, 10, propagation="ts-infinity")
    ends = found.states[:, -1, 0]
    assert sorted(ends.round().tolist()) == [-16.0] * 5 + [16.0] * 5
    assert torch.allclose(found.states[:, :, 0].abs(), torch.arange(1.0, 17.0).expand(10, -1), atol=0.05)


def test_ts1_draws_a_network_at_every_step() -> None:
    found = drifting(1.0, -1.0).predict(torch.zeros(1), torch.zeros(16, 1), 16, 4000, propagation="ts1")
    ends = found.states[:, -1, 0]
    # A random walk of 16 steps has a variance of 16; with one network for all steps it would be 256.
    assert float(ends.mean()) == pytest.approx(0.0, abs=0.25)
    assert float(ends.var()) == pytest.approx(16.0, rel=0.1)
    assert found.states[:, 0, 0].round().tolist().count(1.0) == 2000  # spread evenly over the networks


def test_every_start_has_the_same_number_of_samples_per_network() -> None:
    starts = torch.tensor([[0.0], [100.0], [200.0]])
    propagations: list[Propagation] = ["ts1", "ts-infinity"]
    for propagation in propagations:
        found = drifting(1.0, 2.0).predict(starts, torch.zeros(3, 1, 1), 1, 8, propagation=propagation)
        drift = (found.states[:, :, 0, 0] - starts[:, 0]).round()
        assert found.states.shape == (8, 3, 1, 1)
        assert ((drift == 1.0).sum(0) == 4).all() and ((drift == 2.0).sum(0) == 4).all()


def test_a_number_of_samples_that_the_networks_do_not_divide() -> None:
    found = drifting(0.0, 1.0, 2.0).predict(torch.zeros(1), torch.zeros(1, 1), 1, 4, propagation="ts-infinity")
    assert found.states[:, 0, 0].round().tolist() == [0.0, 1.0, 2.0, 0.0]


def test_samples_are_a_function_of_the_seed() -> None:
    ensemble = drifting(1.0, -1.0, std=0.5)
    first, again, other = (
        ensemble.predict(torch.zeros(1), torch.zeros(3, 1), 3, 6, seed=seed).states for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_log_prob_of_a_mixture_by_hand() -> None:
    ensemble = drifting(1.0, -3.0, std=2.0)
    pairs = [(log_density(x, 0.5 + 1.0, 2.0), log_density(x, 0.5 - 3.0, 2.0)) for x in (0.0, 2.5)]
    expected = [math.log(0.5 * math.exp(first) + 0.5 * math.exp(second)) for first, second in pairs]
    found = ensemble.log_prob(torch.tensor([0.5]), torch.zeros(1), torch.tensor([[0.0], [2.5]]))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_log_prob_is_in_units_of_the_data() -> None:
    ensemble = drifting(1.0, std=1.0)
    ensemble.scales["target_std"] = torch.tensor([10.0])
    ensemble.scales["target_mean"] = torch.tensor([3.0])
    expected = log_density(20.0, 2.0 + 10.0 * 1.0 + 3.0, 10.0)
    found = ensemble.log_prob(torch.tensor([2.0]), torch.zeros(1), torch.tensor([20.0]))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_mean_and_noise_of_a_linear_system(system: LinearSystem, ensemble: Ensemble) -> None:
    rng = np.random.default_rng(1)
    states, actions = 0.7 * rng.normal(size=(300, 2)), rng.uniform(-0.9, 0.9, size=(300, 1))
    means, stds = ensemble.gaussians(states.astype(np.float32), actions.astype(np.float32))
    assert means.shape == (5, 300, 3)
    error = means.mean(0).numpy()[:, :2] - system.mean(states, actions)
    assert np.abs(error).max() < 0.05 and (error.std(0) < 0.01).all()
    ratio = stds.mean(0).numpy()[:, :2] / system.std(actions)
    assert ratio.mean(0) == pytest.approx(1.0, abs=0.07)
    assert (np.abs(ratio - 1.0) < 0.25).all()
    rewards = means.mean(0).numpy()[:, 2]
    assert rewards == pytest.approx(states[:, 0] + actions[:, 0], abs=0.02)


@pytest.mark.parametrize("propagation", ["ts1", "ts-infinity"])
def test_mean_and_covariance_after_ten_steps(
    system: LinearSystem, ensemble: Ensemble, propagation: Propagation
) -> None:
    state, steps = np.array([0.8, -0.5]), 10
    found = ensemble.predict(state.astype(np.float32), torch.zeros(steps, 1), steps, 4000, propagation=propagation)
    mean, covariance = state, np.zeros((2, 2))
    for _ in range(steps):
        mean = system.transition @ mean
        covariance = system.transition @ covariance @ system.transition.T + np.diag(system.noise**2)
    ends = found.states[:, -1].numpy()
    assert ends.mean(0) == pytest.approx(mean, abs=0.05)
    assert np.sqrt(np.diag(np.cov(ends.T))) == pytest.approx(np.sqrt(np.diag(covariance)), rel=0.1)
    assert found.rewards is not None
    assert found.rewards[:, 0].numpy() == pytest.approx(state[0], abs=0.05)


def test_a_policy_acts_on_the_sampled_states(system: LinearSystem, ensemble: Ensemble) -> None:
    def feedback(states: Tensor) -> Tensor:
        return -0.5 * states[:, :1]

    found = ensemble.predict(torch.tensor([0.8, -0.5]), feedback, 5, 50)
    assert found.actions.shape == (50, 5, 1)
    torch.testing.assert_close(found.actions[:, 1:, 0], -0.5 * found.states[:, :-1, 0])
    assert (found.actions[:, 0] == -0.4).all()


def test_networks_disagree_away_from_the_data(ensemble: Ensemble) -> None:
    rng = np.random.default_rng(2)
    states, actions = rng.normal(size=(100, 2)).astype(np.float32), np.zeros((100, 1), dtype=np.float32)
    near, far = (ensemble.gaussians(scale * states, actions)[0].std(0).mean(0) for scale in (0.7, 7.0))
    assert (far > 4 * near).all()


def test_log_prob_is_near_that_of_the_system(system: LinearSystem, ensemble: Ensemble) -> None:
    rng = np.random.default_rng(3)
    states, actions = 0.7 * rng.normal(size=(2000, 2)), rng.uniform(-0.9, 0.9, size=(2000, 1))
    means, stds = system.mean(states, actions), system.std(actions)
    after = means + stds * rng.normal(size=means.shape)
    each = -0.5 * ((after - means) / stds) ** 2 - np.log(stds * np.sqrt(2 * np.pi))
    truth = float(each.sum(-1).mean())
    given = (states.astype(np.float32), actions.astype(np.float32), after.astype(np.float32))
    assert float(ensemble.log_prob(*given).mean()) == pytest.approx(truth, abs=0.02)


def test_saved_ensembles_predict_the_same(ensemble: Ensemble, tmp_path: Path) -> None:
    ensemble.save(tmp_path / "pets")
    loaded = Ensemble.load(tmp_path / "pets")
    given = (torch.tensor([0.8, -0.5]), torch.zeros(4, 1), 4, 20)
    assert torch.equal(loaded.predict(*given).states, ensemble.predict(*given).states)
    assert loaded.config == ensemble.config
    assert sorted(path.name for path in (tmp_path / "pets").iterdir()) == [DESCRIPTION, "weights.safetensors"]


def test_other_checkpoints_are_refused(ensemble: Ensemble, tmp_path: Path) -> None:
    ensemble.save(tmp_path / "pets")
    path = tmp_path / "pets" / DESCRIPTION
    stored = json.loads(path.read_text())
    stored["ensemble"]["config"]["width"] = 7
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="not the checkpoint of an ensemble"):
        Ensemble.load(tmp_path / "pets")


def test_wrong_arguments_state_the_rule(ensemble: Ensemble) -> None:
    with pytest.raises(ValueError, match="last dimension must have size 2"):
        ensemble.predict(torch.zeros(3), torch.zeros(4, 1), 4)
    with pytest.raises(ValueError, match="3 steps need as many actions"):
        ensemble.predict(torch.zeros(2), torch.zeros(4, 1), 3)
    with pytest.raises(ValueError, match="propagation must be ts1 or ts-infinity"):
        ensemble.predict(torch.zeros(2), torch.zeros(4, 1), 4, propagation="ds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fitted with masks"):
        ensemble.gaussians(torch.zeros(2), torch.zeros(1), torch.ones(2))
    with pytest.raises(ValueError, match="num_elites must be at most the 2 networks, got 5"):
        EnsembleConfig(num_networks=2)
