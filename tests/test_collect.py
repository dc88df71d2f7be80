"""Collecting datasets: reproducible for any number of processes, split by share, with exact numbers of steps."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from trajectory_transformer.actors import ActorSpec, parse_actor
from trajectory_transformer.collect import CollectedEpisode, Part, WorkerPool, collect, play_parts, split_by_share
from trajectory_transformer.data.episode import Dataset, Dimension, Episode, FloatArray
from trajectory_transformer.envs import FOUR_ROOMS_ID

WANDERER = ActorSpec(name="demonstrator", noise=0.1, wander=0.5)
RANDOM = ActorSpec(name="random")


def play(*parts: Part, seed: int = 0, workers: int = 1, env: str = FOUR_ROOMS_ID) -> list[CollectedEpisode]:
    with WorkerPool(workers) as pool:
        return list(play_parts(env, parts, seed=seed, pool=pool))


def assert_same(first: list[CollectedEpisode], second: list[CollectedEpisode]) -> None:
    assert [(each.part, each.seed) for each in first] == [(each.part, each.seed) for each in second]
    assert_same_episodes([each.episode for each in first], [each.episode for each in second])


def assert_same_episodes(first: Dataset | list[Episode], second: Dataset | list[Episode]) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.observations, b.observations)
        np.testing.assert_array_equal(a.actions, b.actions)
        assert a.terminated == b.terminated


def right(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Step to the right, with noise."""
    return np.array([0.02, rng.uniform(-0.01, 0.01)], np.float32)


def test_datasets_do_not_depend_on_the_number_of_processes() -> None:
    parts = (Part(WANDERER, steps=300), Part(RANDOM, steps=250))
    assert_same(play(*parts), play(*parts, workers=3))
    assert_same(play(Part(WANDERER, episodes=7)), play(Part(WANDERER, episodes=7), workers=2))


def test_hopper_datasets_do_not_depend_on_the_number_of_processes(policies: Path) -> None:
    pytest.importorskip("mujoco")
    parts = (Part(parse_actor("hopper-medium-sac sto", policies), steps=1500), Part(RANDOM, steps=300))
    assert_same(play(*parts, env="Hopper-v5"), play(*parts, env="Hopper-v5", workers=2))


def test_number_of_steps_is_exact_and_the_cut_episode_is_not_terminated() -> None:
    found = play(Part(WANDERER, steps=100), Part(RANDOM, steps=50))
    assert [sum(len(each.episode) for each in found if each.part == part) for part in (0, 1)] == [100, 50]
    assert not found[-1].episode.terminated
    assert len(found[-1].episode.observations) == len(found[-1].episode) + 1


def test_a_policy_plays_the_same_episodes_alone_as_in_a_mixture() -> None:
    alone = play(Part(RANDOM, episodes=3))
    mixed = [each for each in play(Part(WANDERER, episodes=2), Part(RANDOM, episodes=3)) if each.part == 1]
    for a, b in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(a.episode.observations, b.episode.observations)


def test_episodes_differ_between_numbers_seeds_and_policies() -> None:
    starts = {
        tuple(each.episode.observations[0].tolist())
        for seed in (0, 1)
        for actor in (WANDERER, RANDOM)
        for each in play(Part(actor, episodes=4), seed=seed)
    }
    assert len(starts) == 16
    assert min(each.seed for each in play(Part(RANDOM, episodes=4))) >= 2**31  # evaluations use smaller seeds


class Corridor(gymnasium.Env[FloatArray, FloatArray]):
    """One place further at every step, with rewards at the places 3, 4 and 8; ends after nine steps."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, *, continuing: bool = True) -> None:
        self.continuing, self.place = continuing, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.place += 1
        return np.full(1, self.place, np.float32), float(self.place in (3, 4, 8)), False, self.place == 9, {}


@pytest.fixture
def corridor(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.envs.registration.registry))
    gymnasium.register("Corridor-v0", lambda **options: Corridor(**options))
    return "Corridor-v0"


def test_episodes_that_go_on_at_the_goal_are_cut_at_every_reward(corridor: str) -> None:
    found = play(Part(RANDOM, episodes=2), env=corridor)
    assert [each.seed for each in found] == [found[0].seed] * 4 + [found[-1].seed] * 4
    for first in (0, 4):
        pieces = [each.episode for each in found[first : first + 4]]
        assert [piece.observations[:, 0].tolist() for piece in pieces] == [
            [0, 1, 2, 3], [3, 4], [4, 5, 6, 7, 8], [8, 9]
        ]  # fmt: skip
        assert [piece.rewards.tolist() for piece in pieces if piece.rewards is not None] == [
            [0, 0, 1], [1], [0, 0, 0, 1], [0]
        ]  # fmt: skip
        assert [piece.terminated for piece in pieces] == [True, True, True, False]
    whole = collect(corridor, "random", episodes=2, env_options={"continuing": False})
    assert [len(episode) for episode in whole] == [9, 9]
    cut = np.concatenate([piece.episode.actions for piece in found])
    np.testing.assert_array_equal(np.concatenate([episode.actions for episode in whole]), cut)
    steps = [len(each.episode) for each in play(Part(RANDOM, steps=11), env=corridor)]
    assert steps == [3, 1, 4, 1, 2]


def test_cpu_time_of_all_processes_is_counted() -> None:
    with WorkerPool(2) as pool:
        list(play_parts(FOUR_ROOMS_ID, [Part(WANDERER, episodes=20)], seed=0, pool=pool))
        assert pool.cpu_seconds > 0.01


def test_shares_split_steps_and_policies_without_a_share_split_the_remainder() -> None:
    actors = [parse_actor(text) for text in ("random share=0.5", "random sigma=0.1", "random eps=0.5")]
    assert [part.steps for part in split_by_share(actors, steps=1001, episodes=None)] == [500, 251, 250]
    assert [part.episodes for part in split_by_share(actors, steps=None, episodes=8)] == [4, 2, 2]
    assert [part.steps for part in split_by_share(actors[1:], steps=3, episodes=None)] == [2, 1]


@pytest.mark.parametrize(
    ("policies", "rule"),
    [
        (["random share=0.5"], "must add up to 1, got a sum of 0.5 and 0 policies without share"),
        (["random share=1", "random eps=0.5"], "must add up to 1, got a sum of 1 and 1 policies without share"),
        (["random", "random"], "policy 'random' is given twice"),
        (["random", "random eps=0.1", "random eps=0.2", "random eps=0.3"], "too few steps for 4 policies: 3"),
        ([], "policy must name at least one policy, got "),
    ],
)
def test_shares_that_cannot_be_split_are_refused(policies: list[str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        split_by_share([parse_actor(text) for text in policies], steps=3, episodes=None)


def test_collect_returns_a_dataset_with_dimensions_and_provenance() -> None:
    seen: list[Episode] = []
    policies = ["demonstrator share=0.25", "random eps=0.5"]
    options = {"success_radius": 0.1}
    dataset = collect(FOUR_ROOMS_ID, policies, steps=200, seed=3, env_options=options, on_episode=seen.append)
    assert dataset.num_steps == 200
    assert [id(episode) for episode in dataset] == [id(episode) for episode in seen]
    assert dataset.observation_dimensions == (Dimension("observation 0"), Dimension("observation 1"))
    assert dataset.action_dimensions == (Dimension("action 0"), Dimension("action 1"))
    known = dataset.metadata
    assert (known["env"], known["seed"]) == (FOUR_ROOMS_ID, 3)
    assert json.loads(str(known["env_options"])) == options
    assert known["policy"] == "demonstrator noise=0.1 wander=0.25, random eps=0.5"
    assert (known["policy.0.steps"], known["policy.1.steps"], known["policy.1.eps"]) == (50, 150, 0.5)
    assert "version.gymnasium" in known


def test_collect_names_categories_and_stores_reference_scores() -> None:
    dataset = collect("CartPole-v1", episodes=2)
    assert len(dataset) == 2 and dataset.action_dimensions == (Dimension("action 0", 2),)
    pytest.importorskip("mujoco")
    assert collect("Hopper-v5", steps=10).metadata["ref_max_score"] == 3234.3


def test_a_function_collects_the_same_episodes_as_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_policies.py").write_text(
        "import numpy as np\n"
        "def up(observation, goal, rng):\n    return np.array([rng.uniform(-0.01, 0.01), 0.02], np.float32)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_policies  # type: ignore[import-not-found]

    by_name = collect(FOUR_ROOMS_ID, "my_policies:up", episodes=2)
    assert_same_episodes(collect(FOUR_ROOMS_ID, my_policies.up, episodes=2), by_name)
    assert by_name.metadata["policy"] == "my_policies:up det"


def test_functions_of_one_name_are_told_apart() -> None:
    def towards(x: float) -> Any:
        return lambda observation, goal, rng: np.array([x, 0.0], np.float32)

    for x in (0.01, -0.02):
        dataset = collect(FOUR_ROOMS_ID, towards(x), steps=5)
        assert all((episode.actions[:, 0] == np.float32(x)).all() for episode in dataset)


def test_functions_and_policy_names_can_be_mixed() -> None:
    dataset = collect(FOUR_ROOMS_ID, [right, "random share=0.5"], steps=20)
    assert [dataset.metadata[f"policy.{number}.steps"] for number in (0, 1)] == [10, 10]


def test_worker_processes_need_functions_that_can_be_imported() -> None:
    with pytest.raises(ValueError, match="cannot be sent to worker processes; use workers=1 or a function that can be"):
        collect(FOUR_ROOMS_ID, lambda observation, goal, rng: np.zeros(2, np.float32), steps=5, workers=2)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, r"collect needs either episodes or steps, got \(None, None\)"),
        ({"episodes": 2, "steps": 3}, r"collect needs either episodes or steps, got \(2, 3\)"),
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 1, got -1"),
        ({"episodes": 1, "workers": 0}, "workers must be at least 1, got 0"),
        ({"episodes": 1, "seed": -1}, "seed must not be negative, got -1"),
        ({"episodes": 1, "policy": "expert"}, "policy expert: supports only MiniGrid environments"),
    ],
)
def test_arguments_that_make_no_dataset_are_refused(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        collect(FOUR_ROOMS_ID, **arguments)
