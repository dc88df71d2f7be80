"""Summaries of datasets: discounts that rank episodes differently from returns, actions at their limits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, save_npz
from trajectory_transformer.report.dataset import (
    dataset_figure,
    discount_advice,
    discount_agreement,
    summarize_dimensions,
)

LIMIT = 100


def walk(steps: int, reward: float, *, falls: bool) -> Episode:
    """An episode with a constant state, action and reward."""
    zeros = np.zeros((steps + 1, 1), np.float32)
    return Episode(zeros, zeros[1:], np.full(steps, reward, np.float32), terminated=falls)


def hares_and_tortoises(more: int = 0) -> Dataset:
    """20 fast episodes that fall soon, 20 slow ones that reach the time limit, and `more` truncated before it."""
    rng = np.random.default_rng(0)
    hares = [walk(int(rng.integers(28, 33)), 1.5, falls=True) for _ in range(20)]
    tortoises = [walk(LIMIT, float(rng.uniform(0.95, 1.05)), falls=False) for _ in range(20)]
    truncated = [walk(5 + index, 1.0, falls=False) for index in range(more)]
    return Dataset((*hares, *tortoises, *truncated))


def test_low_discounts_rank_episodes_differently_and_high_discounts_do_not() -> None:
    dataset = hares_and_tortoises()
    agreements = [
        discount_agreement(dataset, TokenConfig(discount=discount, truncated="stop")) for discount in (0.9, 0.99, 1.0)
    ]
    assert agreements[0] is not None and agreements[0] < -0.9
    assert agreements[1] is not None and agreements[1] > 0.9
    assert agreements[2] == pytest.approx(1.0)


def test_agreement_uses_the_rewards_that_the_model_learns() -> None:
    # At a discount of 0.97 the result depends on the end: a penalty, or rewards after the time limit.
    dataset = hares_and_tortoises()
    plain = TokenConfig(discount=0.97, truncated="stop")
    known = [discount_agreement(dataset, each) for each in (plain, replace(plain, termination_penalty=-50))]
    going_on = discount_agreement(dataset, TokenConfig(discount=0.97, truncated="continue"))
    assert None not in known and going_on is not None
    earned = [episode.total_reward for episode in dataset]
    by_hand = [
        sum(0.97**step * reward for step, reward in enumerate(episode.rewards))
        + (0 if episode.terminated else 0.97**LIMIT * episode.rewards.mean() / 0.03)
        for episode in dataset
        if episode.rewards is not None
    ]
    assert going_on == pytest.approx(np.corrcoef(earned, by_hand)[0, 1])
    assert known[0] is not None and known[1] is not None and known[1] > known[0]


def test_episodes_truncated_early_are_ignored_and_too_many_of_them_give_none() -> None:
    config = TokenConfig(discount=0.9)
    assert discount_agreement(hares_and_tortoises(10), config) == discount_agreement(hares_and_tortoises(), config)
    assert discount_agreement(hares_and_tortoises(90), config) is None


def test_few_episodes_or_equal_returns_give_none() -> None:
    alike = Dataset(tuple(walk(LIMIT, 1.0, falls=False) for _ in range(30)))
    assert discount_agreement(alike, TokenConfig()) is None
    assert discount_agreement(Dataset(hares_and_tortoises().episodes[:10]), TokenConfig()) is None


def test_advice_names_the_first_discount_that_fits_and_is_none_if_not_needed() -> None:
    dataset = hares_and_tortoises()
    advice = discount_advice(dataset, TokenConfig(discount=0.9))
    assert advice is not None and "correlation -" in advice
    proposed = float(advice.split("--tokens.discount ")[1].split()[0])
    fitting = discount_agreement(dataset, TokenConfig(discount=proposed, truncated="continue"))
    assert fitting is not None and fitting >= 0.95
    assert discount_advice(dataset, TokenConfig(discount=proposed, truncated="continue")) is None
    assert discount_advice(dataset, TokenConfig()) is None
    assert discount_advice(dataset, TokenConfig(discount=0.9, rewards=False)) is None  # no planning by return


def test_actions_at_their_limits_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    wide = np.clip(rng.normal(0.0, 1.0, (400, 1)), -1.0, 1.0)  # a third is clipped
    actions = np.concatenate([wide, rng.uniform(-1.0, 1.0, (400, 1)), rng.integers(2, size=(400, 1))], axis=1)
    observations = np.repeat(wide, 2, axis=1)[[0, *range(400)]].astype(np.float32)
    dataset = Dataset((Episode(observations, actions.astype(np.float32), None, terminated=False),))
    notes = {each.name: each.note for each in summarize_dimensions(dataset, TokenConfig(rewards=False))}
    share = 100 * np.mean(np.abs(wide) == 1.0)
    assert notes["action 0"] == f"{share:.0f} % at limits"
    assert notes["action 1"] == notes["action 2"] == ""  # two values are a switch, not clipped
    assert "limits" not in notes["observation 0"]
    for first, said in ((0, True), (1, False)):
        episode = Episode(observations, actions[:, first:].astype(np.float32), None, terminated=False)
        save_npz(Dataset((episode,)), tmp_path / "x.npz")
        assert main(["data", "show", str(tmp_path / "x.npz"), "--tokens.rewards", "false"]) == 0
        assert ("search.action.middle, which is the default" in capsys.readouterr().out) == said


def test_data_show_and_train_print_the_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_npz(hares_and_tortoises(), tmp_path / "x.npz")
    assert main(["data", "show", "x.npz", "--tokens.discount", "0.9"]) == 0
    assert "--tokens.truncated continue" in " ".join(capsys.readouterr().out.split())
    small = ["--model.num_layers", "1", "--model.width", "8", "--model.window", "2", "--train.steps", "1"]
    assert main(["train", "x.npz", "--out", "short", "--tokens.discount", "0.9", *small]) == 0
    assert "note: with tokens.discount 0.9, discounted returns rank" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "x.npz", "--out", "long", *small]) == 0
    assert "rank these episodes" not in " ".join(capsys.readouterr().out.split())


def test_the_figure_shows_observations_and_actions_of_the_same_name() -> None:
    episode = Episode(np.zeros((4, 1), np.float32), np.ones((3, 1), np.float32), None, terminated=False)
    dataset = Dataset((episode,), {}, (Dimension("elbow"),), (Dimension("elbow"),))
    titles = [panel.get_title() for panel in dataset_figure(dataset).axes]
    assert titles[:3] == ["steps per episode", "elbow", "elbow"]
