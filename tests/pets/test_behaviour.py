"""A cloned policy: mean, noise and limits of the policy that recorded the data; masked states; its checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.pets import Behaviour, EnsembleConfig, fit_behaviour

SMALL = EnsembleConfig(
    num_networks=3, num_elites=2, num_layers=2, width=32, learning_rate=5e-3, epochs=30, patience=30, batch_size=128
)
NOISE = 0.1


def linear_policy(rng: np.random.Generator, num_steps: int = 6000) -> Dataset:
    """One episode of independent states with actions 0.5 s_0 - 0.2 s_1 + noise, clipped to [-0.6, 0.6]."""
    states = rng.normal(size=(num_steps + 1, 2)).astype(np.float32)
    actions = states[:-1] @ [[0.5], [-0.2]] + NOISE * rng.normal(size=(num_steps, 1))
    return Dataset((Episode(states, np.clip(actions, -0.6, 0.6).astype(np.float32), None, False),))


def samples_at(behaviour: Behaviour, state: list[float], mask: list[float] | None = None) -> torch.Tensor:
    many = 20_000
    masks = None if mask is None else torch.tensor([mask]).expand(many, -1)
    generator = torch.Generator().manual_seed(0)
    return behaviour.sample(torch.tensor([state]).expand(many, -1), generator, masks)[:, 0]


def test_samples_have_mean_noise_and_limits_of_the_recorded_policy(rng: np.random.Generator, tmp_path: Path) -> None:
    behaviour = fit_behaviour(linear_policy(rng), SMALL, device="cpu", out=tmp_path / "policy")
    found = samples_at(behaviour, [0.4, 0.2])
    # Over five seeds, the small networks have means of 0.18 to 0.19 and deviations of 0.11 to 0.12 here.
    assert float(found.mean()) == pytest.approx(0.16, abs=0.06)
    assert float(found.std()) == pytest.approx(NOISE, rel=0.3)
    assert float(samples_at(behaviour, [3.0, 0.0]).max()) == pytest.approx(0.6)
    again = Behaviour.load(tmp_path / "policy")
    torch.testing.assert_close(samples_at(again, [0.4, 0.2]), found)
    with pytest.raises(ValueError, match="exists already"):
        fit_behaviour(linear_policy(rng), SMALL, device="cpu", out=tmp_path / "policy")


def test_a_masked_entry_does_not_change_the_action(rng: np.random.Generator) -> None:
    dataset = linear_policy(rng)
    masks = [rng.random(episode.observations.shape) < 0.5 for episode in dataset]
    behaviour = fit_behaviour(dataset, SMALL, masks=masks, device="cpu")
    hidden = [samples_at(behaviour, [0.4, other], [1.0, 0.0]) for other in (0.2, -5.0)]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=0)
    # What is not observed adds to the noise: 0.2 s_1 has a deviation of 0.2.
    assert float(hidden[0].mean()) == pytest.approx(0.2, abs=0.06)
    assert float(hidden[0].std()) == pytest.approx(np.hypot(NOISE, 0.2), rel=0.2)
    with pytest.raises(ValueError, match="fitted with masks"):
        unmasked = Behaviour(behaviour.networks, behaviour.scales, behaviour.config)
        samples_at(unmasked, [0.4, 0.2], [1.0, 0.0])
