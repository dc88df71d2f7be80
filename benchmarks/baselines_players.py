"""Plays checkpoints of baselines in other processes, for `baselines_table.py`.

Where a paper chooses settings for acting for every task, they are chosen on tuning seeds, for every training seed.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from trajectory_transformer.baselines import Baseline
from trajectory_transformer.baselines.dt import TARGETS
from trajectory_transformer.baselines.mbop import GRID
from trajectory_transformer.evaluate import evaluate
from trajectory_transformer.files import write_atomically
from trajectory_transformer.gpu.backends import find_device

SCORE_SEED, CURVE_SEED, TUNING_SEED = 7_000_000, 6_000_000, 5_000_000  # of the episodes
PLANNERS = ("dt", "mbop")  # need a GPU to act fast


class OutOfTimeError(Exception):
    """The time limit is reached; finished work is kept."""


def acting_settings(name: str, task: str) -> list[dict[str, object]]:
    """Settings for acting to choose from on tuning seeds: those that the papers choose for every task."""
    if name == "dt":
        return [{"target_return": target} for target in TARGETS[task.partition("-")[0]]]
    if name == "mbop":
        pairs = itertools.product(GRID["noise_std"], GRID["temperature"])
        return [{"noise_std": noise, "temperature": temperature} for noise, temperature in pairs]
    return [{}]


class Game(NamedTuple):
    """What is played with a checkpoint."""

    episodes: int
    first: int  # seed of the first episode
    tuning: int  # episodes to tune with
    acting: list[dict[str, object]]  # settings to choose from; without tuning the first one
    device: str


def play(folder: str, seed: int, game: Game) -> list[float]:
    """Returns of the episodes of one training seed; what was chosen on tuning seeds is kept next to the checkpoint."""
    baseline = Baseline.load(folder, game.device)

    def returns(acting: dict[str, object], episodes: int, first: int) -> list[float]:
        policy = baseline.with_settings(acting).policy(seed)
        found = evaluate(policy, episodes=episodes, num_envs=episodes, seed=first)
        return [episode.total_reward for episode in found.episodes]

    chosen = game.acting[0]
    if game.tuning and len(game.acting) > 1:
        tried = [float(np.mean(returns(acting, game.tuning, TUNING_SEED))) for acting in game.acting]
        chosen = game.acting[int(np.argmax(tried))]
        record = {
            "chosen": chosen,
            "tried": [[acting, value] for acting, value in zip(game.acting, tried, strict=True)],
        }
        write_atomically(Path(folder) / f"acting_{seed}.json", json.dumps(record).encode())
    return returns(chosen, game.episodes, game.first)


class Players:
    """Plays checkpoints in other processes and stores what comes back next to them."""

    def __init__(self, workers: int, options: argparse.Namespace) -> None:
        """Start when the first checkpoint comes."""
        self._pool = (
            ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) if workers else None
        )
        self._options = options
        self._waiting: list[tuple[Path, dict[int, Future[list[float]]]]] = []

    def submit(self, name: str, checkpoint: Path, kind: str, seeds: Sequence[int]) -> None:
        """Play a checkpoint of an algorithm, unless that was done before."""
        out = checkpoint / f"{kind}.json"
        if out.exists() or any(path == out for path, _ in self._waiting):
            return
        options, device = self._options, "cpu"
        if name in PLANNERS:
            device = str(find_device(options.device))
        acting = acting_settings(name, checkpoint.name)
        game = Game(options.curve_episodes, CURVE_SEED, 0, acting, device)
        if kind == "score":
            game = Game(options.episodes, SCORE_SEED, options.tuning_episodes, acting, device)
        jobs = {seed: self._submit(str(checkpoint), seed, game) for seed in seeds}
        self._waiting.append((out, jobs))

    def _submit(self, folder: str, seed: int, game: Game) -> Future[list[float]]:
        if self._pool is not None:
            return self._pool.submit(play, folder, seed, game)
        done: Future[list[float]] = Future()
        done.set_result(play(folder, seed, game))
        return done

    def collect(self, *, wait: bool = False) -> None:
        """Store what has been played; with `wait`, all of it."""
        left = []
        for out, jobs in self._waiting:
            if wait or all(job.done() for job in jobs.values()):
                write_atomically(out, json.dumps({str(seed): job.result() for seed, job in jobs.items()}).encode())
            else:
                left.append((out, jobs))
        self._waiting = left

    def finish(self, late: Callable[[], bool]) -> None:
        """Wait until everything has been played."""
        while self._waiting:
            if late():
                raise OutOfTimeError
            self.collect()
            time.sleep(0.1)

    def stop(self) -> None:
        """Drop what has not begun and store the rest."""
        for _, jobs in self._waiting:
            for job in jobs.values():
                job.cancel()
        self._waiting = [pair for pair in self._waiting if not any(job.cancelled() for job in pair[1].values())]
        self.collect(wait=True)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
