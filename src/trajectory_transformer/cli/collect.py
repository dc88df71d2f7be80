"""`tt collect`: run a policy in an environment and keep what happened."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from gymnasium import spaces

from trajectory_transformer.cli.console import claim, console, metrics_table, progress_bar
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset, Episode, Metadata, save_npz
from trajectory_transformer.envs import FOUR_ROOMS_ID
from trajectory_transformer.envs.four_rooms import Demonstrator
from trajectory_transformer.evaluate import episode_metrics
from trajectory_transformer.policies import Policy, RandomPolicy, ScriptedPolicy
from trajectory_transformer.rollout import make_envs, rollout, space_dims


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Run a policy in an environment and write its episodes as a dataset."""

    positional: ClassVar[dict[str, str]] = {}

    out: Path = Path("data/collected.npz")
    """The dataset file to write; must not exist."""
    env: str = FOUR_ROOMS_ID
    """Gymnasium id of the environment."""
    policy: Literal["demonstrator", "random"] = "demonstrator"
    """Who acts: the goal-reaching agent of our own environments, or uniform random actions."""
    noise: float = 0.1
    """Spread of the demonstrator's noise, in units of the longest step."""
    wander: float = 0.25
    """Share of the demonstrator's steps that are random."""
    episodes: int = 1000
    """Episodes to collect."""
    num_envs: int = 16
    """Environments run side by side."""
    seed: int = 0
    """Of the policy; episode i is reset with seed + i."""

    def execute(self) -> Dataset:
        """Collect and write."""
        require(self.episodes >= 1, "--episodes must be at least 1", self.episodes)
        require(self.num_envs >= 1, "--num_envs must be at least 1", self.num_envs)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        claim(self.out)
        started = time.perf_counter()
        envs = make_envs(self.env, min(self.num_envs, self.episodes))
        try:
            space_dims(envs)
            policy = self._make_policy(envs.single_action_space)
            with progress_bar() as bar:
                task = bar.add_task("collecting", total=self.episodes)

                def count(episode: Episode) -> None:
                    del episode
                    bar.advance(task)

                episodes = rollout(envs, policy, num_episodes=self.episodes, seed=self.seed, on_episode=count)
        finally:
            envs.close()
        metadata: Metadata = {
            "env": self.env,
            "policy": self.policy,
            "noise": self.noise,
            "wander": self.wander,
            "seed": self.seed,
        }
        dataset = Dataset(tuple(episodes), metadata)
        save_npz(dataset, self.out)
        console.print(metrics_table(f"{len(dataset)} episodes, {dataset.num_steps} steps", episode_metrics(episodes)))
        console.print(f"wrote {self.out} in {time.perf_counter() - started:.0f} s")
        return dataset

    def _make_policy(self, actions: spaces.Space[object]) -> Policy:
        rng = np.random.default_rng(self.seed)
        if self.policy == "random":
            if not isinstance(actions, spaces.Box):
                raise ValueError(f"--policy random needs a Box of actions, the environment has {actions}")
            return RandomPolicy(actions, rng)
        if self.env != FOUR_ROOMS_ID:
            raise ValueError(
                f"--policy demonstrator knows only {FOUR_ROOMS_ID}, got --env {self.env}; try --policy random"
            )
        return ScriptedPolicy(Demonstrator(self.noise, wander=self.wander).act, rng)
