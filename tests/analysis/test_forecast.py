"""Bands and calibration, by value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory_transformer.analysis.forecast import Calibration, bands_of, calibration, compared, share_inside
from trajectory_transformer.analysis.held_out import held_out_losses
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.predict import Prediction


def test_bands_are_quantiles_of_the_samples_that_go_on() -> None:
    samples = np.arange(101.0)[:, None, None]
    bands = bands_of(np.concatenate([samples, np.full((7, 1, 1), np.nan)]))
    assert [float(part[0, 0]) for part in vars(bands).values()] == [5.0, 25.0, 50.0, 75.0, 95.0]
    assert np.isnan(bands_of(np.full((3, 1, 1), np.nan)).middle).all()


@pytest.mark.parametrize(
    ("samples", "truth", "level", "inside"),
    [
        ([1.0, 2.0, 3.0, 4.0], 2.0, 0.5, 1.0),  # quantiles 0.25 to 0.5
        ([1.0, 2.0, 3.0, 4.0], 1.0, 0.5, 0.0),  # quantiles 0 to 0.25
        ([1.0, 2.0, 3.0, 4.0], 1.0, 0.9, 0.8),  # of 0 to 0.25, 0.05 to 0.25 lies inside
        ([2.0, 2.0, 2.0, 2.0], 2.0, 0.5, 0.5),  # certain and right: quantiles 0 to 1
        ([2.0, 2.0, 2.0, 2.0], 3.0, 0.9, 0.0),
        ([1.0, 1.0, 3.0, 3.0], 2.0, 0.5, 1.0),  # between the samples
        ([1.0, 3.0, np.nan, np.nan], 2.0, 0.5, 1.0),
    ],
)
def test_the_truth_counts_with_the_part_of_its_quantiles_inside(
    samples: list[float], truth: float, level: float, inside: float
) -> None:
    assert share_inside(np.array(samples), np.array(truth), level) == pytest.approx(inside)


def test_without_samples_there_is_no_share() -> None:
    assert np.isnan(share_inside(np.array([np.nan, np.nan]), np.array(1.0), 0.5))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([0.5, 0.9]))
def test_a_truth_drawn_like_the_samples_lies_inside_as_often_as_the_level_says(values: list[int], level: float) -> None:
    samples = np.array(values, dtype=np.float64)
    shares = [float(share_inside(samples, np.array(truth), level)) for truth in samples]
    assert np.mean(shares) == pytest.approx(level)


def test_trust_ends_at_a_large_error_or_where_nothing_changes_is_better() -> None:
    def trusted(error: list[float], unchanged: list[float]) -> int:
        return Calibration((0,), {}, np.array(error), np.array(unchanged)).trusted_steps

    assert trusted([0.1, 0.2, 0.6, 0.1], [1.0, 1.0, 1.0, 1.0]) == 2
    assert trusted([0.1, 0.2, 0.3], [1.0, 0.1, 1.0]) == 1
    assert trusted([0.1, 0.2], [1.0, 1.0]) == 2
    assert trusted([np.nan], [1.0]) == 0
    assert trusted([0.01, 0.02], [0.0, 0.0]) == 2  # below the width of a bin


def walk() -> Episode:
    states = np.array([[0.0, 7.0], [1.0, 7.0], [2.0, 7.0], [3.0, 7.0]], np.float32)
    return Episode(states, np.zeros((3, 1), np.float32), np.zeros(3, np.float32), False)


def test_errors_are_in_standard_deviations_and_constant_dimensions_do_not_count() -> None:
    episode = walk()
    model = TrajectoryModel.create(
        Dataset((episode,)), TokenConfig(num_bins=4), ModelConfig(window=2, num_layers=1, num_heads=1, width=8), seed=0
    )
    exact = np.repeat(episode.observations[None, 1:3].astype(np.float64), 5, axis=0)
    off = exact + np.array([2.0, 100.0])
    found = compared(model, episode, [0, 0], [Prediction(exact, exact[..., :1]), Prediction(off, off[..., :1])])
    deviation = float(np.std([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_allclose(found.error, [1.0 / deviation] * 2)  # the mean of 0 and 2
    np.testing.assert_allclose(found.unchanged, [1.0 / deviation, 2.0 / deviation])
    np.testing.assert_allclose(found.inside[0.5], 0.25)  # certain: half of a right one, none of a wrong one
    assert found.share(0.9) == pytest.approx(0.45)


def test_calibration_starts_are_spread_over_the_episode(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    episode = tiny_dataset.episodes[4]
    found = calibration(tiny_model, episode, horizon=3, num_starts=3, num_samples=8)
    assert found.starts == (0, 3, 6)
    assert found.error.shape == (3,) and all(0 <= found.share(level) <= 1 for level in (0.5, 0.9))
    assert calibration(tiny_model, episode, horizon=9, num_samples=2).starts == (0,)
    with pytest.raises(ValueError, match="9 steps, got a horizon of 10"):
        calibration(tiny_model, episode, horizon=10)


def test_an_untrained_model_has_the_loss_of_a_guess(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    losses = held_out_losses(tiny_model, tiny_dataset)
    assert list(losses) == ["observation", "action", "reward", "value"]
    for loss in losses.values():
        assert loss == pytest.approx(np.log(11), abs=0.4)


def test_batches_do_not_change_the_loss(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    whole, parts = (held_out_losses(tiny_model, tiny_dataset, batch_size=size) for size in (64, 5))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_data_of_another_shape_is_refused(tiny_model: TrajectoryModel) -> None:
    with pytest.raises(
        ValueError, match="trained on 3 observation and 2 action dimensions with rewards, the dataset has 2"
    ):
        held_out_losses(tiny_model, Dataset((walk(),)))
