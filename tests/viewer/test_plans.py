"""An opened plan has the probabilities and scores of the search that made it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trajectory_transformer.analysis.names import slot_names
from trajectory_transformer.config import Sampler, SearchConfig
from trajectory_transformer.data.episode import Dataset, Dimension
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanKind, Planner
from trajectory_transformer.search.sampling import filtered
from trajectory_transformer.tokens.discretizer import TokenArray
from trajectory_transformer.viewer.plans import OpenedPlan, open_plan

SEARCH = SearchConfig(beam_width=4, horizon=3, context=1, action=Sampler(nucleus=0.6))


@pytest.fixture
def sharp(tiny_model: TrajectoryModel) -> TrajectoryModel:
    """A model whose predictions are far from uniform."""
    with torch.no_grad():
        for parameter in tiny_model.gpt.parameters():
            parameter.mul_(3.0)
    return tiny_model


def opened(model: TrajectoryModel, dataset: Dataset, kind: PlanKind, search: SearchConfig = SEARCH) -> OpenedPlan:
    planner = Planner(model, kind=kind, search=search)
    rows = model.tokenizer.encode(dataset.episodes[1])
    prompt: TokenArray = np.concatenate([rows[0], rows[1, :3]])
    plan = planner.plan(prompt[None], np.array([5]))
    return open_plan(planner, prompt, plan.tokens[0].numpy(), plan.scores[0].numpy())


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kind", ["return", "imitate"])
def test_scores_after_the_last_transition_are_those_of_the_search(
    sharp: TrajectoryModel, tiny_dataset: Dataset, kind: PlanKind, window: int | None
) -> None:
    found = opened(sharp, tiny_dataset, kind, replace(SEARCH, window=window))
    assert found.score_paths.shape == (4, 3)
    np.testing.assert_allclose(found.score_paths[:, -1], found.scores, rtol=1e-4, atol=1e-4)
    if kind == "imitate":
        np.testing.assert_allclose(found.log_probs.sum(axis=1), found.scores, rtol=1e-4, atol=1e-4)


def test_rows_name_step_slot_value_and_probability_of_the_winner(sharp: TrajectoryModel, tiny_dataset: Dataset) -> None:
    found = opened(sharp, tiny_dataset, "return")
    assert [(row.step, row.slot) for row in found.rows[:6]] == [(0, 3), (0, 4), (0, 5), (0, 6), (1, 0), (1, 1)]
    values = sharp.tokenizer.discretizer.values
    for row in found.rows:
        assert row.token == found.tokens[0, row.index]
        assert row.probability == pytest.approx(float(np.exp(found.log_probs[0, row.index])), rel=1e-5)
        if row.token < 10:
            assert row.value == values[row.slot, row.token]
        else:
            assert np.isnan(row.value)
    np.testing.assert_allclose(found.distributions.sum(axis=1), 1.0, rtol=1e-5)


def test_kept_tokens_are_those_that_the_filter_kept(sharp: TrajectoryModel, tiny_dataset: Dataset) -> None:
    found = opened(sharp, tiny_dataset, "return")
    log_probs = torch.from_numpy(found.distributions).log()
    later_action = 7 + 1  # the second slot of the second action, after the states of step 1
    kept = filtered(Sampler(nucleus=0.6), log_probs[later_action]).isfinite().numpy()
    np.testing.assert_array_equal(found.kept[later_action], kept)
    assert 1 <= kept.sum() < 11
    first_state = 4
    assert found.kept[first_state].sum() == 1  # top_k 1
    assert found.kept[first_state, found.distributions[first_state].argmax()]
    assert not found.kept[0, 10], "the first action cannot be a stop token"
    for row in found.rows:
        assert found.kept[row.index, row.token]


def test_without_a_filter_the_beam_keeps_what_follows_the_prefix(sharp: TrajectoryModel, tiny_dataset: Dataset) -> None:
    found = opened(sharp, tiny_dataset, "imitate")
    np.testing.assert_array_equal(np.flatnonzero(found.kept[0]), np.unique(found.tokens[:, 0]))
    same = (found.tokens[:, :5] == found.tokens[0, :5]).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(found.kept[5]), np.unique(found.tokens[same, 5]))


def test_names_come_from_the_dataset(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    assert slot_names(tiny_model) == [
        "observation 0", "observation 1", "observation 2", "action 0", "action 1", "reward", "return to go",
    ]  # fmt: skip
    named = replace(tiny_dataset, observation_dimensions=tuple(map(Dimension, "xyz")))
    assert slot_names(tiny_model, named)[:3] == ["x", "y", "z"]
