"""Collect datasets: run policies in an environment, in one or several processes.

An episode depends only on (seed, policy, episode number): its initial state and the policy's random numbers come from
streams derived from these. So a dataset does not depend on the number of processes, and a policy plays the same
episodes alone as in a mixture.
"""

import itertools
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from trajectory_transformer.actors import ActorSpec, Script, ScriptedPolicy, make_script, parse_actor, script_actor
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.data.spaces import action_leaf, flatten, split_goal
from trajectory_transformer.results import package_versions
from trajectory_transformer.rollout import make_envs, rollout, space_dims

# Environments are reset with seeds from the upper half of the range; evaluations use small seeds.
_FIRST_SEED = 2**31
# Packages whose version can change the episodes that a seed gives.
_PACKAGES = ("gymnasium", "gymnasium-robotics", "minigrid", "mujoco", "numpy", "trajectory-transformer")


@dataclass(frozen=True)
class Part:
    """The part of a dataset that one policy collects: a number of steps (the last episode is cut) or of episodes."""

    actor: ActorSpec
    steps: int | None = None
    episodes: int | None = None


@dataclass(frozen=True)
class CollectedEpisode:
    """One episode of a dataset."""

    episode: Episode
    part: int  # index of the part it belongs to
    seed: int  # the environment was reset with


@dataclass(frozen=True)
class Job:
    """What a process needs to play any episode of one policy."""

    env_id: str
    actor: ActorSpec
    seed: int
    env_options: str = "{}"  # JSON, arguments of the environment's constructor
    key: int = 0  # distinguishes jobs whose policies are functions: those cannot be compared across processes


@dataclass(frozen=True)
class _Batch:
    """What a worker process returns."""

    episodes: list[Episode]
    seeds: list[int]
    process: int
    cpu_seconds: float  # of the process since it started


_keys = itertools.count(1)


def collect(
    env: str,
    policy: str | Script | Sequence[str | Script] = "random",
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    workers: int = 1,
    env_options: Mapping[str, Any] | None = None,
    policies: str | Path | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> Dataset:
    """Run one or several policies in an environment and return their episodes as a dataset.

    The same arguments always give the same dataset, for any number of workers.

    Args:
        env: Gymnasium id of the environment.
        policy: what acts: `random`, `demonstrator` (four rooms), `expert` (MiniGrid), an actor file or a
            walker (AntMaze) `FILE.safetensors`, a Stable-Baselines3 `FILE.zip`, `module:function`, or a function
            `script(observation, goal, rng) -> action`. Options follow the name: `FILE sto sigma=0.1 eps=0.05
            share=0.5`. A list of these collects a part of the dataset with each policy.
        episodes: number of episodes to collect.
        steps: number of steps to collect instead; the last episode of each policy is cut to fit.
        seed: seed of all random numbers.
        workers: number of processes. More than one needs the usual `if __name__ == "__main__":` in scripts, and
            functions that can be imported (not lambdas or local functions).
        env_options: arguments of the environment's constructor.
        policies: folder in which actor files are searched too.
        on_episode: called with every episode, in the order of the dataset.

    Returns:
        A dataset with named dimensions; the metadata records environment, seed, policies and package versions.
    """
    require((episodes is None) != (steps is None), "collect needs either episodes or steps", (episodes, steps))
    require(episodes is None or episodes >= 1, "episodes must be at least 1", episodes)
    require(steps is None or steps >= 1, "steps must be at least 1", steps)
    require(workers >= 1, "workers must be at least 1", workers)
    require(seed >= 0, "seed must not be negative", seed)
    given: Sequence[str | Script] = [policy] if isinstance(policy, str) or callable(policy) else policy
    actors = [parse_actor(each, policies) if isinstance(each, str) else script_actor(each) for each in given]
    parts = split_by_share(actors, steps=steps, episodes=episodes)
    collected = []
    with WorkerPool(workers) as pool:
        for each in play_parts(env, parts, seed=seed, pool=pool, env_options=env_options):
            collected.append(each)
            if on_episode is not None:
                on_episode(each.episode)
    return collected_dataset(env, parts, collected, seed=seed, env_options=env_options)


def split_by_share(actors: Sequence[ActorSpec], *, steps: int | None, episodes: int | None) -> list[Part]:
    """Split a number of steps or episodes by the policies' shares; policies without a share split the remainder."""
    require(len(actors) > 0, "policy must name at least one policy", list(actors))
    labels = [actor.label for actor in actors]
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if duplicate is not None:
        raise ValueError(f"policy {duplicate!r} is given twice: both would play the same episodes")
    given = sum(actor.share or 0.0 for actor in actors)
    num_open = sum(actor.share is None for actor in actors)
    if given > 1 + 1e-9 or (not num_open and given < 1 - 1e-9) or (num_open and given > 1 - 1e-9):
        raise ValueError(
            f"the shares of all policies must add up to 1, got a sum of {given:g} and {num_open} policies without share"
        )
    shares = [(1 - given) / num_open if actor.share is None else actor.share for actor in actors]
    total = steps if steps is not None else episodes
    assert total is not None, "callers give steps or episodes"
    counts = split_count(total, shares, "episodes" if steps is None else "steps")
    return [
        Part(actor, steps=count) if steps is not None else Part(actor, episodes=count)
        for actor, count in zip(actors, counts, strict=True)
    ]


def split_count(total: int, shares: Sequence[float], what: str) -> list[int]:
    """Whole numbers that add up to a total, one per share; `what` names them in the message if there are too few."""
    ends = np.rint(np.cumsum(shares) * total).astype(int).tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if min(counts) < 1:
        raise ValueError(f"too few {what} for {len(shares)} policies: {total}")
    return counts


def play_parts(
    env_id: str,
    parts: Sequence[Part],
    *,
    seed: int,
    pool: "WorkerPool",
    env_options: Mapping[str, Any] | None = None,
    collect_options: Mapping[str, Any] | None = None,
) -> Iterator[CollectedEpisode]:
    """Check every policy, then play the parts one after the other: an iterator over their episodes in order.

    `collect_options` are more arguments of the environment's constructor, which evaluations do without.
    """
    options = json.dumps({**(env_options or {}), **(collect_options or {})})
    jobs = [Job(env_id, part.actor, seed, options, next(_keys) if part.actor.script else 0) for part in parts]
    for job in jobs:
        check_policy(job)
        if pool.workers > 1:
            _check_picklable(job)
    return _play_jobs(jobs, parts, pool)


def _play_jobs(jobs: Sequence[Job], parts: Sequence[Part], pool: "WorkerPool") -> Iterator[CollectedEpisode]:
    for number, (job, part) in enumerate(zip(jobs, parts, strict=True)):
        left = part.steps
        # Closed explicitly, so that episodes requested in advance are cancelled at once.
        with closing(pool.play(job, part.episodes)) as episodes:
            for episode, start in episodes:
                kept = episode if left is None or len(episode) <= left else truncate(episode, left)
                yield CollectedEpisode(kept, number, start)
                if left is not None:
                    left -= len(kept)
                    if left == 0:
                        break


def collected_dataset(
    env_id: str,
    parts: Sequence[Part],
    collected: Sequence[CollectedEpisode],
    *,
    seed: int,
    env_options: Mapping[str, Any] | None = None,
    collect_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Episodes of `play_parts` as a dataset, with named dimensions and metadata about their origin."""
    envs = make_envs(env_id, 1, env_options)
    observation_parts, _ = split_goal(envs.single_observation_space)
    action = action_leaf(envs.single_action_space)
    envs.close()
    metadata: dict[str, str | int | float | bool | None] = {"env": env_id, "seed": seed}
    if env_options:
        metadata["env_options"] = json.dumps(dict(env_options))
    if collect_options:
        metadata["collect_options"] = json.dumps(dict(collect_options))
    metadata["policy"] = ", ".join(part.actor.label for part in parts)
    metadata |= {f"version.{name}": version for name, version in package_versions(_PACKAGES).items()}
    references = references_of(env_id)
    if references is not None:
        metadata |= {"ref_min_score": references.random, "ref_max_score": references.expert}
    for number, part in enumerate(parts):
        own = [each.episode for each in collected if each.part == number]
        facts = {**part.actor.provenance(), "episodes": len(own), "steps": sum(map(len, own))}
        metadata |= {f"policy.{number}.{key}": value for key, value in facts.items()}
    return Dataset(
        tuple(each.episode for each in collected),
        metadata,
        tuple(dimension for part in observation_parts for dimension in part.dimensions("observation")),
        action.dimensions("action"),
    )


def truncate(episode: Episode, steps: int) -> Episode:
    """The first steps of an episode; it then counts as truncated, not terminated."""
    rewards = None if episode.rewards is None else episode.rewards[:steps]
    observations, actions = episode.observations[: steps + 1], episode.actions[:steps]
    return Episode(observations, actions, rewards, False, episode.goal, map=episode.map)


def cut_at_rewards(episode: Episode) -> list[Episode]:
    """Episodes that end at every step with a reward, each from the state where the last one ended.

    An environment that goes on at its goal (`continuing`) shows what surrounds the goal; a task ends there.
    """
    assert episode.rewards is not None
    ends = (np.flatnonzero(episode.rewards) + 1).tolist()
    found = []
    for start, end in itertools.pairwise(sorted({0, *ends, len(episode)})):
        observations, actions = episode.observations[start : end + 1], episode.actions[start:end]
        terminated = end in ends or episode.terminated
        found.append(
            Episode(observations, actions, episode.rewards[start:end], terminated, episode.goal, map=episode.map)
        )
    return found


def episode_stream(job: Job, index: int) -> tuple[int, np.random.Generator]:
    """The seed of an episode's environment and the generator of its policy."""
    source = np.random.SeedSequence([job.seed, zlib.crc32(job.actor.label.encode()), index])
    start, noise = source.spawn(2)
    return _FIRST_SEED + int(start.generate_state(1)[0]) % _FIRST_SEED, np.random.default_rng(noise)


@lru_cache(maxsize=4)  # a process plays one policy after the other
def _environment_and_script(job: Job) -> tuple[SyncVectorEnv, Script]:
    """The environment and the policy of a job, made once per process."""
    envs = make_envs(job.env_id, 1, json.loads(job.env_options))
    observation_dim, _, _ = space_dims(envs)
    actions = action_leaf(envs.single_action_space)
    return envs, make_script(job.actor, job.env_id, actions, observation_dim, envs.envs[0])


def check_policy(job: Job) -> None:
    """Compute one action in this process, so that a policy that does not fit fails before anything is played."""
    envs, script = _environment_and_script(job)
    observation_parts, goal_parts = split_goal(envs.single_observation_space)
    observation, _ = envs.reset(seed=_FIRST_SEED)
    rows = [flatten(observation, parts, 1)[0] for parts in (observation_parts, goal_parts)]
    script(rows[0], rows[1], np.random.default_rng(job.seed))


def _check_picklable(job: Job) -> None:
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"policy {job.actor.label}: cannot be sent to worker processes; "
            f"use workers=1 or a function that can be imported ({error})"
        ) from error


def play_episodes(job: Job, indices: Sequence[int]) -> _Batch:
    """Play the episodes of these numbers in this process."""
    envs, script = _environment_and_script(job)
    episodes, seeds = [], []
    for index in indices:
        seed, rng = episode_stream(job, index)
        (played,) = rollout(envs, ScriptedPolicy(script, rng), num_episodes=1, seed=seed)
        continuing = getattr(envs.envs[0].unwrapped, "continuing", False)
        found = cut_at_rewards(played) if continuing else [played]
        episodes += found
        seeds += [seed] * len(found)
    return _Batch(episodes, seeds, os.getpid(), time.process_time())


def _initialize_worker() -> None:
    """Use one core per process, leave Ctrl-C to the parent process, and end with it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed: it would wait for more work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


@dataclass
class WorkerPool:
    """Processes that play episodes; one worker means this process."""

    workers: int
    _pool: ProcessPoolExecutor | None = None
    _cpu: dict[int, float] = field(default_factory=dict)
    _started: float = 0.0

    def __enter__(self) -> "WorkerPool":
        """Start the processes."""
        self._started = time.process_time()
        if self.workers > 1:
            # Forked from a fresh server process: a fork of this one could inherit locks held by its threads.
            server = "forkserver" in multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("forkserver" if server else "spawn")
            if server:
                context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(self.workers, context, _initialize_worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the processes; after an error, do not wait for the episodes they are playing."""
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all processes, this one included."""
        return time.process_time() - self._started + sum(self._cpu.values())

    def play(self, job: Job, count: int | None = None) -> Generator[tuple[Episode, int], None, None]:
        """Yield episodes 0, 1, ... of a job in order, each with the seed of its environment.

        Without a count, episodes are played until the generator is closed.
        """
        if self._pool is None:
            for index in itertools.count() if count is None else range(count):
                batch = play_episodes(job, [index])
                yield from zip(batch.episodes, batch.seeds, strict=True)
            return
        # Without a count the caller can stop at any episode: small batches waste less work.
        size = 1 if count is None else max(1, min(16, count // (4 * self.workers)))
        pending: deque[Future[_Batch]] = deque()
        following = 0
        try:
            while True:
                # Episodes differ much in length: request enough in advance that no process waits for a long one.
                while len(pending) < 4 * self.workers and (count is None or following < count):
                    indices = range(following, following + size if count is None else min(following + size, count))
                    pending.append(self._pool.submit(play_episodes, job, indices))
                    following = indices.stop
                if not pending:
                    return
                batch = pending.popleft().result()
                self._cpu[batch.process] = batch.cpu_seconds
                yield from zip(batch.episodes, batch.seeds, strict=True)
        except BrokenProcessPool as error:
            raise ValueError("a worker process ended unexpectedly, perhaps out of memory; use fewer workers") from error
        finally:
            for future in pending:
                future.cancel()
