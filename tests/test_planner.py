"""The planner: what it plans for, what its prompts hold, and which actions it takes from plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trajectory_transformer import planner as planner_module
from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, FloatArray, MapArray
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanKind, Planner, PlanTrace
from trajectory_transformer.rollout import Step
from trajectory_transformer.search.beam import Plan, beam_search
from trajectory_transformer.search.decoder import Candidates, Decoder
from trajectory_transformer.search.objectives import discounted_return, log_likelihood
from trajectory_transformer.search.sampling import filtered


def make_model(*, rewards: bool, goal: bool, window: int = 4, **tokens: Any) -> TrajectoryModel:
    """An untrained model of random episodes with 2 observation and 1 action dimensions."""
    rng = np.random.default_rng(0)
    episodes = tuple(
        Episode(
            rng.uniform(-1, 1, (9, 2)).astype(np.float32),
            rng.uniform(-1, 1, (8, 1)).astype(np.float32),
            rng.uniform(-1, 1, 8).astype(np.float32),
            terminated=True,
        )
        for _ in range(6)
    )
    goal_dims = (1,) if goal else ()
    config = TokenConfig(num_bins=8, discretizer="uniform", rewards=rewards, goal_dims=goal_dims, **tokens)
    sizes = ModelConfig(window=window, num_layers=1, num_heads=2, width=16)
    return TrajectoryModel.create(Dataset(episodes), config, sizes, seed=0)


def step_of(
    observations: list[list[float]], *, first: bool = False, reward: float = 0.0, active: list[bool] | None = None
) -> Step:
    num_envs = len(observations)
    return Step(
        observations=np.array(observations, dtype=np.float32),
        rewards=np.full(num_envs, reward, dtype=np.float32),
        first=np.full(num_envs, first),
        goals=np.full((num_envs, 1), 0.5, dtype=np.float32),
        active=np.array(active if active is not None else [True] * num_envs),
    )


class Prompts:
    """Replaces the search: stores prompts and returns a fixed plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: list[int]) -> None:
        self.seen: list[list[list[int]]] = []
        self.answer = answer
        monkeypatch.setattr(planner_module, "likelihood_search", self)

    def __call__(
        self,
        decoder: Decoder,
        prompt: Tensor,
        *,
        num_tokens: int,
        beam_width: int,
        min_tokens: int,
        map_embedding: Tensor | None,
        deadline: object = None,
    ) -> Plan:
        del decoder, beam_width
        assert min_tokens == 1
        assert map_embedding is None
        self.seen.append(prompt.tolist())
        tokens = (self.answer * num_tokens)[:num_tokens]
        return Plan(torch.tensor(tokens).repeat(len(prompt), 1, 1), torch.zeros(len(prompt), 1))


def encoded(model: TrajectoryModel, observation: list[float]) -> list[int]:
    tokens: list[int] = model.tokenizer.encode_states(np.array(observation)).tolist()
    return tokens


def test_prompt_is_goal_past_transitions_with_rewards_and_the_current_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=True, goal=True)
    prompts = Prompts(monkeypatch, answer=[3, 0, 0, 1, 1])
    policy = Planner(model, search=SearchConfig(horizon=1, context=2)).policy()
    states = [[-0.9, 0.1], [0.2, -0.5], [0.7, 0.7], [0.0, 0.9]]
    for index, state in enumerate(states):
        action = policy.act(step_of([state], first=index == 0, reward=0.3 * index))
        np.testing.assert_allclose(action, model.tokenizer.decode_action(np.array([[3]])), rtol=1e-6)
    discretizer = model.tokenizer.discretizer
    goal = discretizer.encode(np.array([0.5]), slice(1, 2)).tolist()
    rewards = [discretizer.encode(np.array([0.3 * index]), slice(3, 4)).tolist() for index in range(4)]
    s = [encoded(model, state) for state in states]
    top = [discretizer.num_bins - 1]
    assert prompts.seen[0] == [goal + s[0]]
    assert prompts.seen[1] == [goal + s[0] + [3] + rewards[1] + top + s[1]]
    # At most two past transitions: the first state is no longer part of the prompt.
    assert prompts.seen[3] == [goal + s[1] + [3] + rewards[2] + top + s[2] + [3] + rewards[3] + top + s[3]]


def test_a_first_step_clears_the_past_of_its_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[2, 0, 0])
    policy = Planner(model, search=SearchConfig(horizon=1)).policy()
    policy.act(step_of([[0.1, 0.1], [0.2, 0.2]], first=True))
    step = step_of([[0.3, 0.3], [0.4, 0.4]])
    policy.act(Step(step.observations, step.rewards, np.array([False, True]), step.goals, step.active))
    # Prompts of different lengths are searched separately, shortest first.
    assert prompts.seen[1] == [encoded(model, [0.4, 0.4])]
    assert prompts.seen[2] == [[*encoded(model, [0.1, 0.1]), 2, *encoded(model, [0.3, 0.3])]]


def test_context_leaves_room_for_the_current_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False, window=2)
    prompts = Prompts(monkeypatch, answer=[2, 0, 0])
    policy = Planner(model, search=SearchConfig(horizon=1, context=5)).policy()
    for index in range(4):
        policy.act(step_of([[0.1 * index, 0.0]], first=index == 0))
    assert [len(prompt[0]) for prompt in prompts.seen] == [2, 5, 5, 5]


def test_replanning_every_second_step_takes_two_actions_from_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[1, 0, 0, 6, 0, 0])
    policy = Planner(model, search=SearchConfig(horizon=2, replan_every=2)).policy()
    actions = [policy.act(step_of([[0.0, 0.0]], first=index == 0))[0, 0] for index in range(4)]
    values = model.tokenizer.discretizer.values[model.layout.action][0]
    np.testing.assert_allclose(actions, [values[1], values[6], values[1], values[6]], rtol=1e-6)
    assert len(prompts.seen) == 2


def test_a_plan_is_not_followed_past_a_predicted_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    stop = model.tokenizer.stop
    prompts = Prompts(monkeypatch, answer=[1, stop, stop, stop, stop, stop])
    policy = Planner(model, search=SearchConfig(horizon=2, replan_every=2)).policy()
    for index in range(3):
        policy.act(step_of([[0.0, 0.0]], first=index == 0))
    assert len(prompts.seen) == 3


def test_inactive_environments_are_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[1, 0, 0])
    policy = Planner(model, search=SearchConfig(horizon=1)).policy()
    policy.act(step_of([[0.1, 0.1], [np.nan, 0.2]], first=True, active=[True, False]))
    assert prompts.seen == [[encoded(model, [0.1, 0.1])]]


@pytest.mark.parametrize(
    ("rewards", "goal", "kind"),
    [
        (False, False, "imitate"),
        (True, False, "imitate"),
        (True, False, "return"),
        (False, True, "goal"),
        (True, True, "goal"),
        (True, True, "return"),
    ],
)
def test_plans_of_many_environments_equal_those_of_each_alone(rewards: bool, goal: bool, kind: PlanKind) -> None:
    model = make_model(rewards=rewards, goal=goal, window=3)
    planner = Planner(model, kind=kind, search=SearchConfig(beam_width=5, horizon=4, context=2))
    rng = np.random.default_rng(1)
    states = rng.uniform(-1, 1, (4, 3, 2)).astype(np.float32)  # [T, E, O]
    together = planner.policy()
    alone = [planner.policy() for _ in range(3)]
    for index, state in enumerate(states):
        actions = together.act(step_of(state.tolist(), first=index == 0, reward=0.1))
        singles: list[FloatArray] = [
            policy.act(step_of([state[env].tolist()], first=index == 0, reward=0.1)) for env, policy in enumerate(alone)
        ]
        np.testing.assert_array_equal(actions, np.concatenate(singles))


@pytest.mark.parametrize("kind", ["goal", "return"])
def test_naive_and_cached_backends_take_the_same_actions(kind: PlanKind) -> None:
    model = make_model(rewards=True, goal=True, window=3)
    rng = np.random.default_rng(2)
    search = SearchConfig(beam_width=6, horizon=5, backend="cached")
    cached = Planner(model, kind=kind, search=search).policy()
    naive = Planner(model, kind=kind, search=replace(search, backend="naive")).policy()
    for index in range(4):
        step = step_of(rng.uniform(-1, 1, (2, 2)).tolist(), first=index == 0, reward=0.2)
        np.testing.assert_array_equal(cached.act(step), naive.act(step))


def test_medians_are_planned_as_far_as_actions_are_taken() -> None:
    model = make_model(rewards=True, goal=True, window=4)
    traces: list[PlanTrace] = []
    search = SearchConfig(horizon=3, replan_every=2, imitate="median")
    policy = Planner(model, search=search, on_plan=traces.append).policy()
    for index in range(4):
        policy.act(step_of([[0.1, -0.1]], first=index == 0, reward=0.1))
    assert [trace.step for trace in traces] == [0, 2]
    assert all(trace.tokens.shape == (1, model.layout.size + 1) for trace in traces)  # one candidate
    with pytest.raises(ValueError, match="search.imitate median is for imitation and goals"):
        Planner(model, kind="return", search=search)
    with pytest.raises(ValueError, match="search.imitate median is for imitation and goals"):
        Planner(model, objective=discounted_return(0.99), search=search)


@pytest.mark.parametrize(
    ("rewards", "goal", "kind"),
    [(True, True, "goal"), (False, True, "goal"), (True, False, "return"), (False, False, "imitate")],
)
def test_the_default_kind_follows_from_the_model(rewards: bool, goal: bool, kind: PlanKind) -> None:
    planner = Planner(make_model(rewards=rewards, goal=goal))
    assert planner.kind == kind
    assert (planner.objective is not None) == (kind == "return")
    assert planner.search == SearchConfig()


def test_kinds_that_the_model_cannot_plan_for_are_refused() -> None:
    plain = make_model(rewards=False, goal=False)
    with pytest.raises(ValueError, match="planning for a goal needs a model with a goal: train with tokens.goal_dims"):
        Planner(plain, kind="goal")
    with pytest.raises(ValueError, match="planning for return needs a model with rewards"):
        Planner(plain, kind="return")


def test_an_objective_excludes_kind_and_discount() -> None:
    model = make_model(rewards=True, goal=False)
    with pytest.raises(ValueError, match="an objective replaces kind and discount"):
        Planner(model, kind="return", objective=log_likelihood)
    with pytest.raises(ValueError, match="an objective replaces kind and discount"):
        Planner(model, discount=0.9, objective=log_likelihood)
    planner = Planner(model, objective=log_likelihood)
    assert planner.kind is None and planner.objective is log_likelihood


@pytest.mark.parametrize(
    ("kind", "discount", "message"),
    [
        ("imitate", 0.9, "a discount is for planning for return, not for imitate"),
        ("goal", 0.9, "a discount is for planning for return, not for goal"),
        ("return", 1.5, r"the discount must lie in \[0, 1\], got 1.5"),
        ("return", -0.1, r"the discount must lie in \[0, 1\], got -0.1"),
    ],
)
def test_discounts_without_a_meaning_are_refused(kind: PlanKind, discount: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Planner(make_model(rewards=True, goal=True), kind=kind, discount=discount)


def two_candidates() -> Candidates:
    """One that earns 5 at once, and one that earns 20 a step later."""
    return Candidates(
        tokens=torch.zeros(1, 2, 8, dtype=torch.long),
        log_prob=torch.zeros(1, 2),
        rewards=torch.tensor([[[5.0, 0.0], [0.0, 20.0]]]),
        value=torch.tensor([[1.0, 2.0]]),
        ended=torch.zeros(1, 2, dtype=torch.bool),
        identity=torch.tensor([[0, 1]]),
    )


def test_the_discount_reaches_the_objective() -> None:
    model = make_model(rewards=True, goal=False, discount=0.5)

    def scores(**settings: float) -> list[float]:
        objective = Planner(model, **settings).objective  # type: ignore[arg-type]
        assert objective is not None
        found: list[float] = objective(two_candidates())[0].tolist()
        return found

    assert scores(discount=0.1) == pytest.approx([5 + 0.01, 2 + 0.02])
    assert scores(discount=1.0) == pytest.approx([6.0, 22.0])
    assert scores(discount=0.0) == pytest.approx([5.0, 0.0])
    assert scores() == pytest.approx([5 + 0.25, 10 + 0.5])  # that of training


def test_a_value_that_includes_its_reward_replaces_the_last_reward() -> None:
    objective = Planner(make_model(rewards=True, goal=False, value_includes_reward=True), discount=0.5).objective
    assert objective is not None
    assert objective(two_candidates())[0].tolist() == pytest.approx([5 + 0.5, 1.0])


def test_the_percentile_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    percentiles: list[float | None] = []

    def watched(*args: Any, percentile: float | None, **others: Any) -> Plan:
        percentiles.append(percentile)
        return beam_search(*args, percentile=percentile, **others)

    monkeypatch.setattr(planner_module, "beam_search", watched)
    model, search = make_model(rewards=True, goal=False), SearchConfig(beam_width=2, horizon=1)
    for percentile in (None, 0.3):
        Planner(model, percentile=percentile, search=search).act([0.0, 0.0])
    assert percentiles == [None, 0.3]
    for wrong in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"the percentile must lie in \(0, 1\), got {wrong}"):
            Planner(model, percentile=wrong)
    with pytest.raises(ValueError, match="a percentile is for planning for return or an objective, not for imitate"):
        Planner(model, kind="imitate", percentile=0.3)


def test_a_custom_objective_decides_the_plan() -> None:
    # Rank by the action itself, in real units: the planner takes the largest or the smallest of all actions.
    model = make_model(rewards=False, goal=False)
    search = SearchConfig(beam_width=64, horizon=1, action=Sampler(), expansion=4)
    largest = Planner(model, objective=lambda candidates: candidates.actions[:, :, 0, 0], search=search)
    smallest = Planner(model, objective=lambda candidates: -candidates.actions[:, :, 0, 0], search=search)
    values = model.tokenizer.discretizer.values[model.layout.action][0]
    assert largest.act([0.1, 0.2])[0] == pytest.approx(values.max())
    assert smallest.act([0.1, 0.2])[0] == pytest.approx(values.min())


@pytest.mark.parametrize("kind", ["goal", "return"])
def test_acting_equals_the_policy_of_one_environment(kind: PlanKind) -> None:
    model = make_model(rewards=True, goal=True)
    planner = Planner(model, kind=kind, search=SearchConfig(beam_width=4, horizon=3), seed=5)
    policy = planner.policy()
    states = np.random.default_rng(3).uniform(-1, 1, (6, 2)).astype(np.float32)
    for index, state in enumerate(states):
        expected = policy.act(step_of([state.tolist()], first=index == 0, reward=0.1 * index))
        found = planner.act(state, reward=0.1 * index, goal=[0.5])
        assert found.shape == (1,) and found.dtype == np.float32
        np.testing.assert_array_equal(found, expected[0])


def test_a_reset_clears_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=True, goal=False)
    prompts = Prompts(monkeypatch, answer=[2, 0, 0, 0, 0])
    planner = Planner(model, kind="imitate", search=SearchConfig(horizon=1))
    planner.act([0.1, 0.1])
    planner.act([0.2, 0.2], reward=1.0)
    planner.reset()
    planner.act([0.1, 0.1], reward=1.0)
    assert [len(prompt[0]) for prompt in prompts.seen] == [2, 7, 2]
    assert prompts.seen[2] == prompts.seen[0] == [encoded(model, [0.1, 0.1])]


def test_a_model_may_be_given_as_a_folder(tmp_path: Path) -> None:
    model = make_model(rewards=True, goal=False)
    model.save(tmp_path / "run")
    search = SearchConfig(beam_width=4, horizon=2)
    expected = Planner(model, search=search).act([0.3, -0.3])
    for folder in (tmp_path / "run", str(tmp_path / "run")):
        np.testing.assert_array_equal(Planner(folder, search=search).act([0.3, -0.3]), expected)


def test_the_noise_of_a_plan_depends_on_step_prompt_and_seed() -> None:
    # Without context, all prompts are equal: only the step tells plans apart.
    model = make_model(rewards=True, goal=False)
    search = SearchConfig(beam_width=8, horizon=2, context=0, action=Sampler(), observation=Sampler())

    def plans(seed: int, num_steps: int) -> list[list[list[int]]]:
        traces: list[PlanTrace] = []
        planner = Planner(model, search=search, seed=seed, on_plan=traces.append)
        for _ in range(num_steps):
            planner.act([0.1, 0.1])
        assert all(trace.prompt.tolist() == encoded(model, [0.1, 0.1]) for trace in traces)
        return [trace.tokens.tolist() for trace in traces]

    first, second, third = plans(0, 3)
    assert first != second and second != third and first != third
    assert plans(0, 2) == [first, second]  # a function of seed, step and prompt
    assert plans(1, 1) != [first]


def test_bad_observations_are_refused() -> None:
    model = make_model(rewards=False, goal=True)
    policy = Planner(model, search=SearchConfig(horizon=1)).policy()
    with pytest.raises(ValueError, match="observations must be finite, got nan in dimension 1"):
        policy.act(step_of([[0.0, np.nan]], first=True))
    with pytest.raises(ValueError, match="observations of 2 and goals of 1 dimensions, got 3 and 1"):
        policy.act(step_of([[0.0, 0.0, 0.0]], first=True))


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_bad_rewards_are_refused(reward: float) -> None:
    policy = Planner(make_model(rewards=True, goal=False), search=SearchConfig(beam_width=2, horizon=1)).policy()
    policy.act(step_of([[0.0, 0.0], [0.0, 0.0]], first=True))
    bad = replace(step_of([[0.0, 0.0], [0.0, 0.0]], first=False), rewards=np.array([0.0, reward], np.float32))
    with pytest.raises(ValueError, match=f"rewards must be finite, got {reward} in environment 1"):
        policy.act(bad)
    policy.act(replace(bad, active=np.array([True, False])))  # nobody reads it
    planner = Planner(make_model(rewards=True, goal=False), search=SearchConfig(beam_width=2, horizon=1))
    planner.act([0.0, 0.0], reward=reward)  # the first action has no reward before it
    with pytest.raises(ValueError, match=f"rewards must be finite, got {reward}"):
        planner.act([0.0, 0.0], reward=reward)


def model_of_maps() -> tuple[TrajectoryModel, npt.NDArray[np.uint8]]:
    """An untrained model that reads maps, and three maps [3, 1, 4, 4]."""
    rng = np.random.default_rng(0)
    maps = rng.integers(2, size=(3, 1, 4, 4)).astype(np.uint8)
    episodes = tuple(
        Episode(rng.normal(size=(5, 2)).astype(np.float32), np.zeros((4, 1), np.float32), None, True, map=each)
        for each in maps
    )
    sizes = ModelConfig(window=4, num_layers=1, num_heads=2, width=16, map_channels=2)
    model = TrajectoryModel.create(Dataset(episodes), TokenConfig(num_bins=8, rewards=False), sizes, seed=0)
    return model, maps


def test_a_map_is_encoded_once_per_episode_and_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model, maps = model_of_maps()
    encoded_maps = model.encode_maps(maps)
    assert encoded_maps is not None
    given: list[Tensor] = []
    reads: list[int] = []

    def search(decoder: Decoder, prompt: Tensor, *, map_embedding: Tensor, num_tokens: int, **_: int) -> Plan:
        given.append(map_embedding)
        return Plan(torch.zeros(len(prompt), 1, num_tokens, dtype=torch.long), torch.zeros(len(prompt), 1))

    encode = TrajectoryModel.encode_maps

    def count(self: TrajectoryModel, maps: MapArray | None) -> Tensor | None:
        reads.append(0 if maps is None else len(maps))
        return encode(self, maps)

    monkeypatch.setattr(planner_module, "likelihood_search", search)
    monkeypatch.setattr(TrajectoryModel, "encode_maps", count)
    policy = Planner(model, search=SearchConfig(horizon=1, context=0)).policy()
    states = [[0.1, 0.1], [0.2, 0.2]]
    policy.act(replace(step_of(states, first=True), maps=maps[:2]))
    policy.act(replace(step_of(states), maps=maps[1:]))  # not encoded: no episode starts
    second = replace(step_of(states), maps=maps[1:], first=np.array([False, True]))
    policy.act(second)
    policy.act(replace(step_of(states, active=[False, True]), maps=maps[1:]))
    assert reads == [2, 1]
    expected = [encoded_maps[:2], encoded_maps[:2], encoded_maps[[0, 2]], encoded_maps[[2]]]
    for map_embedding, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(map_embedding, wanted)
    with pytest.raises(ValueError, match="the model reads a map"):
        policy.act(step_of(states, first=True))


def test_a_map_is_needed_at_the_first_step_only() -> None:
    model, maps = model_of_maps()
    planner = Planner(model, search=SearchConfig(horizon=1, beam_width=2))
    assert planner.act([0.0, 0.1], map=maps[0]).shape == (1,)
    assert planner.act([0.1, 0.1]).shape == (1,)  # the map is known
    planner.reset()
    with pytest.raises(ValueError, match="the model reads a map"):
        planner.act([0.0, 0.1])


def test_only_the_first_plan_of_an_episode_is_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first_steps: list[bool] = []

    def watched(*args: Any, first_step: bool, **others: Any) -> Plan:
        first_steps.append(first_step)
        return beam_search(*args, first_step=first_step, **others)

    monkeypatch.setattr(planner_module, "beam_search", watched)
    search = SearchConfig(beam_width=2, horizon=1, context=2, first_action=Sampler(nucleus=0.9))
    policy = Planner(make_model(rewards=True, goal=False), search=search).policy()
    for first in (True, False, False, True):
        policy.act(step_of([[0.0, 0.0]], first=first))
    assert first_steps == [True, False, False, True]


@pytest.mark.parametrize(("context", "window"), [(0, None), (2, 1)])
def test_without_past_transitions_the_first_action_is_sampled_like_all_others(
    tiny_model: TrajectoryModel, context: int, window: int | None
) -> None:
    search = SearchConfig(first_action=Sampler(nucleus=0.9), context=context, window=window)
    assert Planner(tiny_model, search=search).search == replace(search, first_action=None)


def test_actions_with_categories_are_sampled_from_a_nucleus_instead_of_the_middle() -> None:
    model = make_model(rewards=True, goal=False)
    search = SearchConfig(
        action=Sampler(temperature=0.5, top_k=3, middle=0.3),
        first_action=Sampler(middle=0.7),
        observation=Sampler(middle=0.6),
    )
    assert Planner(model, search=search).search == search
    discrete = replace(model, tokenizer=replace(model.tokenizer, action_dimensions=(Dimension("action", 8),)))
    nucleus = replace(search, action=Sampler(temperature=0.5, nucleus=0.3), first_action=Sampler(nucleus=0.7))
    assert Planner(discrete, search=search).search == nucleus
    plain = SearchConfig(action=Sampler(top_k=3), first_action=None)
    assert Planner(discrete, search=plain).search == plain


def test_the_middle_of_categories_keeps_the_most_likely_ones_wherever_they_are() -> None:
    model = make_model(rewards=True, goal=False)
    discrete = replace(model, tokenizer=replace(model.tokenizer, action_dimensions=(Dimension("action", 8),)))
    logits = torch.tensor([0.42, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.46]).log()
    kept = [filtered(Planner(each).search.action, logits).isfinite().tolist() for each in (model, discrete)]
    assert kept[0] == [True] * 8  # from the 30th to the 70th percentile
    assert kept[1] == [False] * 7 + [True]  # the most likely one holds 0.4 of the mass


@pytest.mark.parametrize(
    ("observation", "options", "message"),
    [
        (None, {}, "must be an array of 3 numbers .*got None"),
        (1.5, {}, "must be an array of 3 numbers .*got 1.5"),
        ("abc", {}, "must be an array of numbers .*got 'abc'"),
        ([1.0, None, "x"], {}, "must be an array of numbers"),
        ([1.0, 2.0], {}, "observations of 3 .* got 2"),
        ([[1.0, 2.0, 3.0]], {}, "must be an array of 3 numbers|one row per system"),
        ({}, {}, "must have 3 numbers .*got 0"),
        ({"a": None, "b": 1, "c": 2}, {}, "must be a number, got None"),
        ({"a": "x", "b": 1, "c": 2}, {}, "must be a number, got 'x'"),
        (np.zeros(3), {"reward": "x"}, "the reward must hold numbers, got 'x'"),
        (np.zeros(3), {"reward": [1.0, 2.0]}, "must be one number"),
        (np.zeros(3), {"reward": {}}, "the reward must hold numbers"),
        (np.zeros(3), {"goal": 1.0}, "this model has no goal"),
    ],
)
def test_observations_and_rewards_that_cannot_be_used_get_one_sentence(
    tiny_model: TrajectoryModel, observation: Any, options: dict[str, Any], message: str
) -> None:
    planner = Planner(tiny_model, search=SearchConfig(beam_width=2, horizon=1))
    planner.act(np.zeros(3))
    with pytest.raises(ValueError, match=message) as caught:
        planner.act(observation, **options)
    assert "\n" not in str(caught.value)
    assert planner.act({"a": 0.1, "b": np.float32(0.2), "c": [0.3]}, reward=1.0).shape == (2,)


def test_the_times_of_plans_are_bounded(tiny_model: TrajectoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajectory_transformer.planner.MAX_TIMES", 3)
    planner = Planner(tiny_model, search=SearchConfig(beam_width=1, horizon=1))
    policy = planner.policy()
    planner._one = policy
    for _ in range(5):
        planner.act(np.zeros(3))
    assert len(policy.plan_seconds) == 3 and policy.num_plans == 5
