"""The receding-horizon controller: what it puts into prompts and what it takes out of plans."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trajectory_transformer import planner
from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, Episode, FloatArray, MapArray
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Controller, PlanningPolicy, PlanTrace
from trajectory_transformer.rollout import Step
from trajectory_transformer.search.beam import Plan, beam_search
from trajectory_transformer.search.decoder import Decoder
from trajectory_transformer.search.objectives import discounted_return


def make_model(*, rewards: bool, goal: bool, window: int = 4) -> TrajectoryModel:
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
    tokens = TokenConfig(num_bins=8, discretizer="uniform", rewards=rewards, goal_dims=(1,) if goal else ())
    model = TrajectoryModel.create(
        Dataset(episodes), tokens, ModelConfig(window=window, num_layers=1, num_heads=2, width=16), seed=0
    )
    model.gpt.eval()
    return model


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
    """Stands in for the search: keeps prompts, answers with a fixed plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: list[int]) -> None:
        self.seen: list[list[list[int]]] = []
        self.answer = answer
        monkeypatch.setattr(planner, "likelihood_search", self)

    def __call__(
        self,
        decoder: Decoder,
        prompt: Tensor,
        *,
        num_tokens: int,
        beam_width: int,
        min_tokens: int,
        map_embedding: Tensor | None,
    ) -> Plan:
        del decoder, beam_width
        assert min_tokens == 1
        assert map_embedding is None
        self.seen.append(prompt.tolist())
        tokens = (self.answer * num_tokens)[:num_tokens]
        return Plan(torch.tensor(tokens).repeat(len(prompt), 1, 1), torch.zeros(len(prompt), 1))


def encoded(model: TrajectoryModel, observation: list[float]) -> list[int]:
    tokens: list[int] = model.discretizer.encode(np.array(observation), model.layout.observation).tolist()
    return tokens


def test_prompt_is_goal_past_transitions_with_rewards_and_the_current_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=True, goal=True)
    prompts = Prompts(monkeypatch, answer=[3, 0, 0, 1, 1])
    policy = PlanningPolicy(model, SearchConfig(horizon=1, context=2))
    states = [[-0.9, 0.1], [0.2, -0.5], [0.7, 0.7], [0.0, 0.9]]
    for index, state in enumerate(states):
        action = policy.act(step_of([state], first=index == 0, reward=0.3 * index))
        np.testing.assert_allclose(action, model.discretizer.decode(np.array([[3]]), model.layout.action), rtol=1e-6)
    goal = model.discretizer.encode(np.array([0.5]), slice(1, 2)).tolist()
    rewards = [model.discretizer.encode(np.array([0.3 * index]), slice(3, 4)).tolist() for index in range(4)]
    s = [encoded(model, state) for state in states]
    top = [model.discretizer.num_bins - 1]
    assert prompts.seen[0] == [goal + s[0]]
    assert prompts.seen[1] == [goal + s[0] + [3] + rewards[1] + top + s[1]]
    # Two transitions of context at most: the first state is gone.
    assert prompts.seen[3] == [goal + s[1] + [3] + rewards[2] + top + s[2] + [3] + rewards[3] + top + s[3]]


def test_a_first_step_forgets_the_past_of_its_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[2, 0, 0])
    policy = PlanningPolicy(model, SearchConfig(horizon=1))
    policy.act(step_of([[0.1, 0.1], [0.2, 0.2]], first=True))
    step = step_of([[0.3, 0.3], [0.4, 0.4]])
    policy.act(Step(step.observations, step.rewards, np.array([False, True]), step.goals, step.active))
    # Prompts of different lengths are searched apart, shortest first.
    assert prompts.seen[1] == [encoded(model, [0.4, 0.4])]
    assert prompts.seen[2] == [[*encoded(model, [0.1, 0.1]), 2, *encoded(model, [0.3, 0.3])]]


def test_context_leaves_room_for_the_current_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False, window=2)
    prompts = Prompts(monkeypatch, answer=[2, 0, 0])
    policy = PlanningPolicy(model, SearchConfig(horizon=1, context=5))
    for index in range(4):
        policy.act(step_of([[0.1 * index, 0.0]], first=index == 0))
    assert [len(prompt[0]) for prompt in prompts.seen] == [2, 5, 5, 5]


def test_replanning_every_second_step_takes_two_actions_from_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[1, 0, 0, 6, 0, 0])
    policy = PlanningPolicy(model, SearchConfig(horizon=2, replan_every=2))
    actions = [policy.act(step_of([[0.0, 0.0]], first=index == 0))[0, 0] for index in range(4)]
    values = model.discretizer.values[model.layout.action][0]
    np.testing.assert_allclose(actions, [values[1], values[6], values[1], values[6]], rtol=1e-6)
    assert len(prompts.seen) == 2


def test_a_plan_that_sees_the_end_is_not_followed_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    stop = model.discretizer.stop
    prompts = Prompts(monkeypatch, answer=[1, stop, stop, stop, stop, stop])
    policy = PlanningPolicy(model, SearchConfig(horizon=2, replan_every=2))
    for index in range(3):
        policy.act(step_of([[0.0, 0.0]], first=index == 0))
    assert len(prompts.seen) == 3


def test_inactive_environments_are_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(rewards=False, goal=False)
    prompts = Prompts(monkeypatch, answer=[1, 0, 0])
    PlanningPolicy(model, SearchConfig(horizon=1)).act(
        step_of([[0.1, 0.1], [np.nan, 0.2]], first=True, active=[True, False])
    )
    assert prompts.seen == [[encoded(model, [0.1, 0.1])]]


@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize("goal", [False, True])
def test_plans_of_many_environments_are_those_of_each_alone(rewards: bool, goal: bool) -> None:
    model = make_model(rewards=rewards, goal=goal, window=3)
    config = SearchConfig(beam_width=5, horizon=4, context=2)
    rng = np.random.default_rng(1)
    states = rng.uniform(-1, 1, (4, 3, 2)).astype(np.float32)  # [T, E, O]
    together = PlanningPolicy(model, config)
    alone = [PlanningPolicy(model, config) for _ in range(3)]
    for index, state in enumerate(states):
        actions = together.act(step_of(state.tolist(), first=index == 0, reward=0.1))
        singles: list[FloatArray] = [
            policy.act(step_of([state[env].tolist()], first=index == 0, reward=0.1)) for env, policy in enumerate(alone)
        ]
        np.testing.assert_array_equal(actions, np.concatenate(singles))


def test_naive_and_cached_policies_act_alike() -> None:
    model = make_model(rewards=True, goal=True, window=3)
    rng = np.random.default_rng(2)
    cached = PlanningPolicy(model, SearchConfig(beam_width=6, horizon=5, decoder="cached"))
    naive = PlanningPolicy(model, SearchConfig(beam_width=6, horizon=5, decoder="naive"))
    for index in range(4):
        step = step_of(rng.uniform(-1, 1, (2, 2)).tolist(), first=index == 0, reward=0.2)
        np.testing.assert_array_equal(cached.act(step), naive.act(step))


def test_medians_are_planned_as_far_as_actions_are_taken() -> None:
    model = make_model(rewards=True, goal=True, window=4)
    traces: list[PlanTrace] = []
    config = SearchConfig(horizon=3, replan_every=2, imitate="median")
    policy = PlanningPolicy(model, config, on_plan=traces.append)
    for index in range(4):
        policy.act(step_of([[0.1, -0.1]], first=index == 0, reward=0.1))
    assert [trace.step for trace in traces] == [0, 2]
    assert all(trace.tokens.shape == (1, model.layout.size + 1) for trace in traces)  # one candidate
    with pytest.raises(ValueError, match="search.imitate median is for imitation and goals"):
        PlanningPolicy(model, config, discounted_return(0.99))


def test_bad_observations_are_refused() -> None:
    model = make_model(rewards=False, goal=True)
    policy = PlanningPolicy(model, SearchConfig(horizon=1))
    with pytest.raises(ValueError, match="observations must be finite, got nan in dimension 1"):
        policy.act(step_of([[0.0, np.nan]], first=True))
    with pytest.raises(ValueError, match="observations of 2 and goals of 1 dimensions, got 3 and 1"):
        policy.act(step_of([[0.0, 0.0, 0.0]], first=True))


def model_of_maps() -> tuple[TrajectoryModel, npt.NDArray[np.uint8]]:
    """A model that reads maps, with random weights, and three maps [3, 1, 4, 4]."""
    rng = np.random.default_rng(0)
    maps = rng.integers(2, size=(3, 1, 4, 4)).astype(np.uint8)
    episodes = tuple(
        Episode(rng.normal(size=(5, 2)).astype(np.float32), np.zeros((4, 1), np.float32), None, True, map=each)
        for each in maps
    )
    sizes = ModelConfig(window=4, num_layers=1, num_heads=2, width=16, map_channels=2)
    model = TrajectoryModel.create(Dataset(episodes), TokenConfig(num_bins=8, rewards=False), sizes, seed=0)
    return model, maps


def test_a_map_is_read_once_an_episode_and_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(planner, "likelihood_search", search)
    monkeypatch.setattr(TrajectoryModel, "encode_maps", count)
    policy = PlanningPolicy(model, SearchConfig(horizon=1, context=0))
    states = [[0.1, 0.1], [0.2, 0.2]]
    policy.act(replace(step_of(states, first=True), maps=maps[:2]))
    policy.act(replace(step_of(states), maps=maps[1:]))  # not read: no episode starts
    second = replace(step_of(states), maps=maps[1:], first=np.array([False, True]))
    policy.act(second)
    policy.act(replace(step_of(states, active=[False, True]), maps=maps[1:]))
    assert reads == [2, 1]
    expected = [encoded_maps[:2], encoded_maps[:2], encoded_maps[[0, 2]], encoded_maps[[2]]]
    for map_embedding, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(map_embedding, wanted)
    with pytest.raises(ValueError, match="the model reads a map"):
        policy.act(step_of(states, first=True))


def test_a_controller_takes_the_map_of_its_episode() -> None:
    model, maps = model_of_maps()
    controller = Controller(PlanningPolicy(model, SearchConfig(horizon=1, beam_width=2)))
    assert controller.act([0.0, 0.1], map=maps[0]).shape == (1,)
    assert controller.act([0.1, 0.1]).shape == (1,)  # the map is known
    controller.reset()
    with pytest.raises(ValueError, match="the model reads a map"):
        controller.act([0.0, 0.1])


def test_only_the_first_plan_of_an_episode_is_an_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    openings: list[bool] = []

    def watched(*args: Any, opening: bool, **others: Any) -> Plan:
        openings.append(opening)
        return beam_search(*args, opening=opening, **others)

    monkeypatch.setattr(planner, "beam_search", watched)
    search = SearchConfig(beam_width=2, horizon=1, context=2, opening_nucleus=0.9)
    policy = PlanningPolicy(make_model(rewards=True, goal=False), search, discounted_return(0.9))
    for first in (True, False, False, True):
        policy.act(step_of([[0.0, 0.0]], first=first))
    assert openings == [True, False, False, True]


@pytest.mark.parametrize(("context", "window"), [(0, None), (2, 1)])
def test_an_opening_needs_a_past_that_tells_where_an_episode_begins(
    tiny_model: TrajectoryModel, context: int, window: int | None
) -> None:
    with pytest.raises(ValueError, match=f"opening_nucleus needs a past.*context of {context} in a window"):
        PlanningPolicy(tiny_model, SearchConfig(opening_nucleus=0.9, context=context, window=window))
