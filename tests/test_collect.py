"""Collections: the same episodes whoever plays them, shares, and exact numbers of steps."""

from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.actors import ActorSpec, parse_actor
from trajectory_transformer.collect import Crew, Part, Played, collect, divide
from trajectory_transformer.envs import FOUR_ROOMS_ID

WANDERER = ActorSpec(name="demonstrator", noise=0.1, wander=0.5)
RANDOM = ActorSpec(name="random")


def played(*parts: Part, seed: int = 0, workers: int = 1, env: str = FOUR_ROOMS_ID) -> list[Played]:
    with Crew(workers) as crew:
        return list(collect(env, parts, seed=seed, crew=crew))


def assert_same(first: list[Played], second: list[Played]) -> None:
    assert [(each.part, each.seed) for each in first] == [(each.part, each.seed) for each in second]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.episode.observations, b.episode.observations)
        np.testing.assert_array_equal(a.episode.actions, b.episode.actions)
        assert a.episode.terminated == b.episode.terminated


def test_a_dataset_does_not_depend_on_how_many_processes_made_it() -> None:
    parts = (Part(WANDERER, steps=300), Part(RANDOM, steps=250))
    assert_same(played(*parts), played(*parts, workers=3))
    assert_same(played(Part(WANDERER, episodes=7)), played(Part(WANDERER, episodes=7), workers=2))


def test_hopper_datasets_do_not_depend_on_how_many_processes_made_them(policies: Path) -> None:
    pytest.importorskip("mujoco")
    parts = (Part(parse_actor("hopper-medium-sac sto", policies), steps=1500), Part(RANDOM, steps=300))
    assert_same(played(*parts, env="Hopper-v5"), played(*parts, env="Hopper-v5", workers=2))


def test_steps_are_exact_and_the_episode_cut_for_them_was_not_ended_by_the_task() -> None:
    found = played(Part(WANDERER, steps=100), Part(RANDOM, steps=50))
    assert [sum(len(each.episode) for each in found if each.part == part) for part in (0, 1)] == [100, 50]
    assert not found[-1].episode.terminated
    assert len(found[-1].episode.observations) == len(found[-1].episode) + 1


def test_a_policy_plays_the_same_episodes_alone_as_in_a_mixture() -> None:
    alone = played(Part(RANDOM, episodes=3))
    mixed = [each for each in played(Part(WANDERER, episodes=2), Part(RANDOM, episodes=3)) if each.part == 1]
    for a, b in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(a.episode.observations, b.episode.observations)


def test_episodes_seeds_and_policies_differ_from_each_other() -> None:
    starts = {
        tuple(each.episode.observations[0].tolist())
        for seed in (0, 1)
        for actor in (WANDERER, RANDOM)
        for each in played(Part(actor, episodes=4), seed=seed)
    }
    assert len(starts) == 16
    assert min(each.seed for each in played(Part(RANDOM, episodes=4))) >= 2**31  # clear of evaluations


def test_processor_time_of_all_processes_is_counted() -> None:
    with Crew(2) as crew:
        list(collect(FOUR_ROOMS_ID, [Part(WANDERER, episodes=20)], seed=0, crew=crew))
        assert crew.cpu_seconds > 0.01


def test_shares_divide_steps_and_what_is_left_goes_to_the_others() -> None:
    actors = [parse_actor(words) for words in ("random share=0.5", "random sigma=0.1", "random eps=0.5")]
    assert [part.steps for part in divide(actors, steps=1001, episodes=None)] == [500, 251, 250]
    assert [part.episodes for part in divide(actors, steps=None, episodes=8)] == [4, 2, 2]
    assert [part.steps for part in divide(actors[1:], steps=3, episodes=None)] == [2, 1]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["random share=0.5"], "must add up to 1, got 0.5 for 0 more"),
        (["random share=1", "random eps=0.5"], "must add up to 1, got 1 for 1 more"),
        (["random", "random"], "policy 'random' is named twice"),
        (["random", "random eps=0.1", "random eps=0.2", "random eps=0.3"], "3 steps are too few for 4 policies"),
    ],
)
def test_shares_that_do_not_divide_are_refused(words: list[str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        divide([parse_actor(each) for each in words], steps=3, episodes=None)
