"""The episode of the Control tab is the episode of an evaluation, step by step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.config import Sampler, SearchConfig
from trajectory_transformer.evaluate import evaluate
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.viewer.control import Control, candidate_strengths, make_control_env, with_search


@pytest.mark.parametrize("name", ["rooms_run", "pendulum_run"])
def test_steps_are_those_of_an_evaluation(name: str, request: pytest.FixtureRequest) -> None:
    model = TrajectoryModel.load(request.getfixturevalue(name))
    planner = Planner(model, search=SearchConfig(beam_width=3, horizon=2, context=2), seed=4)
    control = Control(make_control_env(model), planner, seed=11)
    played = evaluate(planner, episodes=1, num_envs=1, seed=11).episodes[0]
    for _ in range(12):
        control.step()
    steps = control.moment.step
    np.testing.assert_array_equal(control.moment.observations, played.observations[: steps + 1])
    np.testing.assert_array_equal(control.moment.actions, played.actions[:steps])
    assert played.rewards is not None
    np.testing.assert_array_equal(control.moment.rewards, played.rewards[:steps])


def rooms(run: Path, **search: object) -> Control:
    model = TrajectoryModel.load(run)
    return Control(make_control_env(model), Planner(model, search=SearchConfig(context=0, **search)))  # type: ignore[arg-type]


def test_a_start_and_a_goal_are_set_and_a_wall_is_refused(rooms_run: Path) -> None:
    control = rooms(rooms_run, beam_width=4, horizon=3)
    control.restart(options={"start": (0.2, 0.3), "goal": (0.8, 0.7)})
    np.testing.assert_allclose(control.moment.observations, [[0.2, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(control.moment.goal, [0.8, 0.7], rtol=1e-6)
    before, plan = control.moment, control.plan
    with pytest.raises(ValueError, match="goal must lie in the unit square"):
        control.restart(options={"start": (0.2, 0.3), "goal": (0.5, 0.3)})
    assert control.moment is before and control.plan is plan


def test_candidates_start_in_the_current_state_best_first(rooms_run: Path) -> None:
    control = rooms(rooms_run, beam_width=4, horizon=3)
    plan = control.plan
    assert plan.states.shape == (4, 3, 2) and plan.actions.shape == (4, 3, 2)
    assert (np.diff(plan.scores) <= 0).all()
    tokenizer = control.planner.model.tokenizer
    decoded = tokenizer.discretizer.decode(tokenizer.encode_states(control.moment.observations), slice(0, 2))
    np.testing.assert_array_equal(plan.states[:, 0], np.repeat(decoded, 4, axis=0))


def test_replanning_does_not_move_the_agent_and_settings_change_the_plan(rooms_run: Path) -> None:
    control = rooms(rooms_run, beam_width=4, horizon=3)
    control.step()
    before = control.moment
    control.replan(with_search(control.planner, beam_width=7, horizon=2))
    assert control.moment is before
    assert control.plan.states.shape[:2] == (7, 2) and control.plan.step == 1


def test_a_filter_and_a_seed_change_sampled_plans(pendulum_run: Path) -> None:
    model = TrajectoryModel.load(pendulum_run)
    planner = Planner(
        model, search=SearchConfig(beam_width=6, horizon=2, context=1, action=Sampler(nucleus=0.9), first_action=None)
    )
    control = Control(make_control_env(model), planner)
    first = control.plan
    control.replan(with_search(planner, seed=1))
    assert not np.array_equal(control.plan.tokens, first.tokens)
    control.replan(with_search(planner, share=0.05))
    assert len(np.unique(control.plan.tokens[:, 0])) == 1  # a narrow filter keeps the most likely action
    control.replan(planner)
    np.testing.assert_array_equal(control.plan.tokens, first.tokens)


def test_the_share_is_that_of_the_filter_in_use(pendulum_run: Path) -> None:
    planner = Planner(TrajectoryModel.load(pendulum_run), search=SearchConfig(beam_width=2, horizon=1, context=1))
    assert with_search(planner, share=0.2).search.action == Sampler(middle=0.2)
    nucleus = with_search(planner, action=Sampler(nucleus=0.9))
    assert with_search(nucleus, share=0.2).search.action == Sampler(nucleus=0.2)
    assert with_search(planner, beam_width=3).search == replace(planner.search, beam_width=3)


def test_nothing_happens_after_the_end(rooms_run: Path) -> None:
    control = rooms(rooms_run, beam_width=1, horizon=1)
    for _ in range(201):
        control.step()
    assert control.moment.over and control.moment.step <= 200 and control.moment.success is not None
    last = control.moment
    control.step()
    assert control.moment is last


def test_strengths_rise_with_the_score() -> None:
    np.testing.assert_allclose(candidate_strengths(np.array([4.0, 2.0, 0.0])), [0.8, 0.45, 0.1])
    np.testing.assert_allclose(candidate_strengths(np.array([1.0, 1.0])), [0.8, 0.8])
    np.testing.assert_allclose(candidate_strengths(np.array([1.0, 0.0, -np.inf])), [0.8, 0.1, 0.1])


def test_another_environment_must_fit(rooms_run: Path) -> None:
    model = TrajectoryModel.load(rooms_run)
    with pytest.raises(ValueError, match="does not fit the model"):
        make_control_env(model, "Pendulum-v1")
    with pytest.raises(ValueError, match="cannot be made"):
        make_control_env(model, "Nowhere-v0")
