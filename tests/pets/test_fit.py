"""Fitting: a function of data and seed, resumable, with masks, early stopping and choice of elites."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.pets.conftest import LinearSystem
from trajectory_transformer.checkpoint import read_tensors
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.gpu.training.captured import CapturedCalls
from trajectory_transformer.pets import Ensemble, EnsembleConfig, EnsembleMetrics, fit
from trajectory_transformer.pets.ensemble import build_networks
from trajectory_transformer.pets.fit import RESUME, _prepare, _Training

fit_module = importlib.import_module("trajectory_transformer.pets.fit")  # the package exports a function of that name
SMALL = EnsembleConfig(num_networks=3, num_elites=2, num_layers=1, width=8, batch_size=32, epochs=4)


@pytest.fixture
def few(system: LinearSystem) -> Dataset:
    """Three hundred transitions."""
    return system.play(10, 30, np.random.default_rng(0))


def weights(ensemble: Ensemble) -> dict[str, torch.Tensor]:
    return ensemble.networks.state_dict()


def same(first: Ensemble, second: Ensemble) -> bool:
    return all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


def test_a_fit_is_a_function_of_its_seed(few: Dataset) -> None:
    first, again, other = (fit(few, SMALL, seed=seed, device="cpu") for seed in (3, 3, 4))
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize(("seconds", "left"), [(0.0, [3, 4]), (1000.0, [2, 3, 4])])
def test_a_stopped_fit_resumes_to_the_same_weights(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, left: list[int]
) -> None:
    monkeypatch.setattr(fit_module, "SAVE_SECONDS", seconds)  # with many, only the first and the last pass are saved

    def stop(metrics: EnsembleMetrics) -> None:
        if metrics.epoch == 2:
            raise KeyboardInterrupt

    expected = fit(few, SMALL, seed=3, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        fit(few, SMALL, seed=3, device="cpu", out=tmp_path / "pets", on_metrics=stop)
    seen: list[int] = []
    resumed = fit(
        few, SMALL, seed=3, device="cpu", out=tmp_path / "pets", resume=True, on_metrics=lambda m: seen.append(m.epoch)
    )
    assert seen == left
    assert same(resumed, expected)
    assert same(Ensemble.load(tmp_path / "pets"), expected)


def test_only_the_same_fit_is_resumed(few: Dataset, system: LinearSystem, tmp_path: Path) -> None:
    fit(few, SMALL, seed=3, device="cpu", out=tmp_path / "pets")
    with pytest.raises(ValueError, match="exists already"):
        fit(few, SMALL, seed=3, device="cpu", out=tmp_path / "pets")
    with pytest.raises(ValueError, match=r"other settings \(expected seed 3, got 4\)"):
        fit(few, SMALL, seed=4, device="cpu", out=tmp_path / "pets", resume=True)
    with pytest.raises(ValueError, match=r"other settings \(expected ensemble\.epochs \d+, got 5\); resume"):
        fit(few, replace(SMALL, epochs=5), seed=3, device="cpu", out=tmp_path / "pets", resume=True)
    other = system.play(10, 30, np.random.default_rng(1))
    with pytest.raises(ValueError, match="different data"):
        fit(other, SMALL, seed=3, device="cpu", out=tmp_path / "pets", resume=True)
    assert (tmp_path / "pets" / RESUME).is_file()


@pytest.mark.parametrize(("tf32", "expected"), [(True, "high"), (False, "highest")])
def test_steps_run_in_the_precision_of_the_settings_and_leave_that_of_the_caller(
    few: Dataset, monkeypatch: pytest.MonkeyPatch, tf32: bool, expected: str
) -> None:
    take_step, seen = _Training._take_step, set()

    def noted(training: _Training) -> None:
        seen.add(torch.get_float32_matmul_precision())
        take_step(training)

    monkeypatch.setattr(_Training, "_take_step", noted)
    before = torch.get_float32_matmul_precision()
    fit(few, replace(SMALL, tf32=tf32), device="cpu")
    assert seen == {expected} and torch.get_float32_matmul_precision() == before


def test_networks_train_on_different_samples(few: Dataset) -> None:
    ensemble = fit(few, replace(SMALL, num_elites=3), device="cpu")
    means = ensemble.gaussians(torch.zeros(2), torch.zeros(1))[0]
    assert (means.std(0) > 1e-4).all()


def test_fitting_stops_when_the_held_out_loss_is_flat_and_keeps_the_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "SAVE_SECONDS", 0.0)
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(101, 2)), rng.normal(size=(100, 1))
    noise = Dataset((Episode(states.astype(np.float32), actions.astype(np.float32), None, False),))
    losses: list[tuple[float, ...]] = []
    weights_after: list[torch.Tensor] = []

    def note(metrics: EnsembleMetrics) -> None:
        losses.append(metrics.held_out)
        weights_after.append(read_tensors(tmp_path / "pets" / RESUME)[0]["weights.weights.1"])

    # Nothing can be learnt from noise but its variance; more passes fit the training data alone.
    config = EnsembleConfig(num_networks=5, num_elites=3, num_layers=2, width=64, batch_size=16, held_out=0.3)
    ensemble = fit(noise, config, seed=2, device="cpu", out=tmp_path / "pets", on_metrics=note)
    assert 6 <= len(losses) < 100
    best, last = np.min(losses, axis=0), np.array(losses[-1])
    assert (last > best + 0.02).all()
    order = np.argsort(best)
    assert order.tolist() != [0, 1, 2, 3, 4], "choose another seed: the order would be right without sorting"
    for elite, network in enumerate(order[:3].tolist()):
        epoch = int(np.argmin([each[network] for each in losses]))
        assert torch.equal(ensemble.networks.weights[1][elite], weights_after[epoch][network])


def test_a_pass_takes_every_row_of_the_bootstrap_samples_once_in_a_new_order(few: Dataset) -> None:
    config = replace(SMALL, held_out=0.1, batch_size=27)  # ten batches of the 270 transitions that are not held out
    scales, data = _prepare(few, config, None, torch.device("cpu"))
    training = _Training(build_networks(3, config, scales, 0, seed=0), data, config, seed=0)
    orders = []
    for _ in range(2):
        training.run_epoch()
        orders.append(training._batches.transpose(0, 1).flatten(1).clone())
        assert torch.equal(orders[-1].sort(1).values, training.bootstrap.sort(1).values)
    assert not torch.equal(orders[0], orders[1])
    distinct = [len(row.unique()) / 270 for row in training.bootstrap]
    assert distinct == pytest.approx([1 - math.exp(-1)] * 3, abs=0.08)
    assert not set(training.bootstrap.flatten().tolist()) & set(training.held_out.tolist())


def test_without_held_out_data_the_last_weights_are_kept(few: Dataset) -> None:
    records: list[EnsembleMetrics] = []
    fit(few, replace(SMALL, held_out=0.0, patience=1), device="cpu", on_metrics=records.append)
    assert [record.epoch for record in records] == [1, 2, 3, 4]
    assert all(record.held_out == () for record in records)


def masked_shift() -> tuple[Dataset, list[npt.NDArray[np.bool_]]]:
    """s'[0] = s[1], and s[1] is uniform noise with mean 4 and deviation 2; half of all entries are masked."""
    rng = np.random.default_rng(0)
    drawn = 4.0 + 2.0 * np.sqrt(12.0) * (rng.random(size=4001) - 0.5)
    states = np.stack([np.concatenate([[4.0], drawn[:-1]]), drawn], axis=1).astype(np.float32)
    masks = rng.random(size=states.shape) < 0.5
    hidden = np.where(masks, states, 1e3).astype(np.float32)  # what is not observed must not be read
    return Dataset((Episode(hidden, np.zeros((4000, 1), dtype=np.float32), None, False),)), [masks]


def test_a_masked_entry_is_predicted_from_its_distribution() -> None:
    dataset, masks = masked_shift()
    config = EnsembleConfig(num_networks=3, num_elites=3, num_layers=2, width=32, learning_rate=5e-3, epochs=40)
    ensemble = fit(dataset, config, masks=masks, device="cpu")
    state = torch.tensor([[5.0, 6.0], [5.0, 6.0], [5.0, -1e3]])
    mask = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    means, stds = (values.mean(0) for values in ensemble.gaussians(state, torch.zeros(3, 1), mask))
    assert means[:, 0].tolist() == pytest.approx([6.0, 6.0, 4.0], abs=0.2)
    assert (stds[:2, 0] < 0.4).all()
    assert float(stds[2, 0]) == pytest.approx(2.0, rel=0.15)
    assert stds[:, 1].tolist() == pytest.approx([2.0, 2.0, 2.0], rel=0.1)
    log_prob = ensemble.log_prob(state[2], torch.zeros(1), torch.tensor([5.0, 1e3]), mask=mask[2], next_mask=mask[2])
    expected = -0.5 * ((5.0 - 4.0) / 2.0) ** 2 - math.log(2.0 * math.sqrt(2 * math.pi))
    assert float(log_prob) == pytest.approx(expected, abs=0.1)
    reads = torch.stack([mask[2], mask[0]])
    found = ensemble.predict(state[2], torch.zeros(2, 1), 2, 600, masks=reads)
    assert float(found.states[:, 0, 0].std()) == pytest.approx(2.0, rel=0.15)
    spread = found.states[:, 1, 0] - found.states[:, 0, 1]
    assert float(spread.std()) < 0.4


def test_data_that_no_gaussian_fits_is_refused(few: Dataset) -> None:
    discrete = Episode(np.zeros((4, 1), dtype=np.float32), np.zeros((3, 1), dtype=np.float32), None, False)
    with pytest.raises(ValueError, match="continuous dimensions, gear has categories"):
        fit(Dataset((discrete,), {}, (), (Dimension("gear", 3),)), SMALL, device="cpu")
    with pytest.raises(ValueError, match="needs rewards"):
        fit(Dataset((discrete,)), replace(SMALL, rewards=True), device="cpu")
    with pytest.raises(ValueError, match="shapes of the observations"):
        fit(few, SMALL, masks=[np.ones((3, 2), dtype=np.bool_)], device="cpu")


@pytest.mark.gpu
def test_captured_steps_equal_eager_steps(few: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = fit(few, SMALL, seed=3, device="cuda")
    monkeypatch.setattr(CapturedCalls, "__call__", lambda self, key, function: function())
    eager = fit(few, SMALL, seed=3, device="cuda")
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(captured)[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
def test_fits_on_a_gpu_resume_and_load_on_a_cpu(few: Dataset, tmp_path: Path) -> None:
    def stop(metrics: EnsembleMetrics) -> None:
        if metrics.epoch == 2:
            raise KeyboardInterrupt

    expected = fit(few, SMALL, seed=3, device="cuda")
    with pytest.raises(KeyboardInterrupt):
        fit(few, SMALL, seed=3, device="cuda", out=tmp_path / "pets", on_metrics=stop)
    fit(few, SMALL, seed=3, device="cuda", out=tmp_path / "pets", resume=True)
    loaded = Ensemble.load(tmp_path / "pets")
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(loaded)[name], value.cpu(), rtol=1e-4, atol=1e-5, msg=name)
    given = (torch.tensor([0.8, -0.5]), torch.zeros(4, 1), 4, 5)
    assert expected.predict(*given).states.is_cuda and not loaded.predict(*given).states.is_cuda
    likelihoods = [each.log_prob(torch.zeros(2), torch.zeros(1), torch.ones(2)).cpu() for each in (expected, loaded)]
    torch.testing.assert_close(likelihoods[0], likelihoods[1], rtol=1e-3, atol=1e-3)
