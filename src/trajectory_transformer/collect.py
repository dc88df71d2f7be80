"""Episodes from policies at work: whole processes play, one episode at a time each.

An episode is a function of (seed, policy, number) alone: both its start and the policy's noise come from a stream of
that name. So a dataset does not depend on how many processes made it, and a policy gives the same episodes alone as
in a mixture.
"""

import json
import multiprocessing
import os
import signal
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from trajectory_transformer.actors import ActorSpec, Script, ScriptedPolicy, make_script
from trajectory_transformer.data.episode import Episode
from trajectory_transformer.data.spaces import action_leaf, flatten, split_goal
from trajectory_transformer.rollout import make_envs, rollout, space_dims

# Starts are drawn from the upper half of the seeds, clear of the small ones that evaluations use.
_FIRST_SEED = 2**31


@dataclass(frozen=True)
class Job:
    """All that a process needs to know to play any episode of one policy."""

    env_id: str
    actor: ActorSpec
    seed: int
    env_options: str = "{}"  # JSON, for the environment's constructor


@dataclass(frozen=True)
class Part:
    """How much of one policy a dataset holds: steps, the last episode cut to fit, or else whole episodes."""

    actor: ActorSpec
    steps: int | None = None
    episodes: int | None = None


@dataclass(frozen=True)
class Played:
    """One episode of a collection."""

    episode: Episode
    part: int
    seed: int  # that the environment was reset with


@dataclass(frozen=True)
class _Batch:
    """What a process sends back."""

    episodes: list[Episode]
    seeds: list[int]
    process: int
    cpu_seconds: float  # of the process since it started


def divide(actors: Sequence[ActorSpec], *, steps: int | None, episodes: int | None) -> list[Part]:
    """Give each policy its share; policies without one divide what is left."""
    labels = [actor.label for actor in actors]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"policy {twice!r} is named twice: it would play the same episodes again")
    given = sum(actor.share or 0.0 for actor in actors)
    open_ended = sum(actor.share is None for actor in actors)
    if given > 1 + 1e-9 or (not open_ended and given < 1 - 1e-9) or (open_ended and given > 1 - 1e-9):
        raise ValueError(f"shares of policies must add up to 1, got {given:g} for {open_ended} more without one")
    shares = [(1 - given) / open_ended if actor.share is None else actor.share for actor in actors]
    total = steps if steps is not None else episodes
    assert total is not None, "a collection has a size"
    ends = np.rint(np.cumsum(shares) * total).astype(int).tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if min(counts) < 1:
        raise ValueError(f"{total} {'episodes' if steps is None else 'steps'} are too few for {len(actors)} policies")
    return [
        Part(actor, steps=count) if steps is not None else Part(actor, episodes=count)
        for actor, count in zip(actors, counts, strict=True)
    ]


def episode_stream(job: Job, index: int) -> tuple[int, np.random.Generator]:
    """The start and the noise of an episode."""
    source = np.random.SeedSequence([job.seed, zlib.crc32(job.actor.label.encode()), index])
    start, noise = source.spawn(2)
    return _FIRST_SEED + int(start.generate_state(1)[0]) % _FIRST_SEED, np.random.default_rng(noise)


@lru_cache(maxsize=4)  # a process is asked for one policy after the other
def _stage(job: Job) -> tuple[SyncVectorEnv, Script]:
    """The environment and the policy of a job, made once a process."""
    envs = make_envs(job.env_id, 1, json.loads(job.env_options))
    observation_dim, _, _ = space_dims(envs)
    actions = action_leaf(envs.single_action_space)
    return envs, make_script(job.actor, job.env_id, actions, observation_dim, envs.envs[0])


def rehearse(job: Job) -> None:
    """Let the policy act once, in this process: what does not fit is found out before anything is played."""
    envs, script = _stage(job)
    observation_parts, goal_parts = split_goal(envs.single_observation_space)
    observation, _ = envs.reset(seed=_FIRST_SEED)
    rows = [flatten(observation, parts, 1)[0] for parts in (observation_parts, goal_parts)]
    script(rows[0], rows[1], np.random.default_rng(job.seed))


def _play(job: Job, indices: Sequence[int]) -> _Batch:
    """Play some episodes of a job in this process."""
    envs, script = _stage(job)
    episodes, seeds = [], []
    for index in indices:
        seed, rng = episode_stream(job, index)
        episodes += rollout(envs, ScriptedPolicy(script, rng), num_episodes=1, seed=seed)
        seeds.append(seed)
    return _Batch(episodes, seeds, os.getpid(), time.process_time())


def _prepare_process() -> None:
    """One core each, and Ctrl-C is for the parent alone."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass
class Crew:
    """Processes that play episodes; with one worker, this process does."""

    workers: int
    _pool: ProcessPoolExecutor | None = None
    _cpu: dict[int, float] = field(default_factory=dict)
    _started: float = 0.0

    def __enter__(self) -> "Crew":
        """Start the processes."""
        self._started = time.process_time()
        if self.workers > 1:
            # Forked from a fresh process: a copy of this one could inherit locks that its threads hold.
            server = "forkserver" in multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("forkserver" if server else "spawn")
            if server:
                context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(self.workers, context, _prepare_process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop them, without waiting for episodes that nobody wants any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def cpu_seconds(self) -> float:
        """Processor time that all processes have spent, this one included."""
        return time.process_time() - self._started + sum(self._cpu.values())

    def play(self, job: Job, count: int | None = None) -> Generator[tuple[Episode, int], None, None]:
        """Episodes 0, 1, ... of a job in order with the seeds of their starts; without a count, until closed."""
        # Single episodes where the caller may stop at any of them, so that few are played in vain.
        size = 1 if count is None else max(1, min(16, count // (4 * self.workers)))
        if self._pool is None:
            index = 0
            while count is None or index < count:
                batch = _play(job, [index])
                yield batch.episodes[0], batch.seeds[0]
                index += 1
            return
        pending: deque[Future[_Batch]] = deque()
        following = 0
        try:
            while True:
                # Some episodes are far longer than others: enough are asked for that nobody waits for those.
                while len(pending) < 4 * self.workers and (count is None or following < count):
                    indices = range(following, following + size if count is None else min(following + size, count))
                    pending.append(self._pool.submit(_play, job, indices))
                    following = indices.stop
                if not pending:
                    return
                batch = pending.popleft().result()
                self._cpu[batch.process] = batch.cpu_seconds
                yield from zip(batch.episodes, batch.seeds, strict=True)
        except BrokenProcessPool as error:
            raise ValueError("a process that plays episodes ended unexpectedly: out of memory?") from error
        finally:
            for future in pending:
                future.cancel()


def collect(
    env_id: str, parts: Sequence[Part], *, seed: int, crew: Crew, env_options: Mapping[str, Any] | None = None
) -> Iterator[Played]:
    """Play all parts one after the other, and yield their episodes in order."""
    jobs = [Job(env_id, part.actor, seed, json.dumps(dict(env_options or {}))) for part in parts]
    for number, (job, part) in enumerate(zip(jobs, parts, strict=True)):
        left = part.steps
        # Closed here rather than when collected as garbage: what it still asked for is called off.
        with closing(crew.play(job, part.episodes)) as episodes:
            for episode, start in episodes:
                kept = episode if left is None or len(episode) <= left else cut(episode, left)
                yield Played(kept, number, start)
                if left is not None:
                    left -= len(kept)
                    if left == 0:
                        break


def cut(episode: Episode, steps: int) -> Episode:
    """The first steps of an episode: the recording ended it, not the task."""
    rewards = None if episode.rewards is None else episode.rewards[:steps]
    observations, actions = episode.observations[: steps + 1], episode.actions[:steps]
    return Episode(observations, actions, rewards, False, episode.goal, map=episode.map)
