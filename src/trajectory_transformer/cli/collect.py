"""`tt collect`: run policies in an environment and write their episodes."""

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trajectory_transformer.actors import parse_actor
from trajectory_transformer.cli.console import console, metrics_table, progress_bar
from trajectory_transformer.cli.data import claim_dataset
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.config import require
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.data.sources import is_minari_id, save_dataset
from trajectory_transformer.data.sources.minari import save_minari
from trajectory_transformer.envs import FOUR_ROOMS_ID
from trajectory_transformer.files import naming
from trajectory_transformer.results import counted, write_result

if TYPE_CHECKING:
    from trajectory_transformer.collect import CollectedEpisode, WorkerPool
    from trajectory_transformer.recipes import Recipe


_OF_DEMONSTRATOR = ("--noise", "--wander")
_OF_RECIPES = ("--env", "--policy", "--episodes", *_OF_DEMONSTRATOR)  # what a recipe sets


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Run policies in an environment and write their episodes as a dataset."""

    positional: ClassVar[dict[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt collect --env Pendulum-v1 --policy random --episodes 100 --out swing.npz",
        "tt collect --env Pendulum-v1 --policy my_module:swing_up --episodes 100 --out swing.npz",
    )

    out: str | None = None
    """Dataset to write: a file (.npz, .hdf5, .parquet, .csv) or a Minari id; must not exist. null: data/collected.npz,
    or tt/NAME-v0 for a recipe."""
    recipe: str | None = None
    """Name (such as hopper-medium) or path of a recipe, which sets the environment, the policies and their steps.
    --steps collects another number in the same shares."""
    policies: Path | None = None
    """Folder in which actor files are searched too."""
    env: str = FOUR_ROOMS_ID
    """Gymnasium id of the environment, or module:Id-v0 for one that a module registers, also in this folder."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    policy: str | list[str] = "demonstrator"
    """What acts: random, demonstrator (four rooms), expert (MiniGrid), FILE.safetensors, a Stable-Baselines3 FILE.zip
    or module:function, with options after it: 'FILE sto sigma=0.1 eps=0.05 share=0.5'; several as a list."""
    noise: float = 0.1
    """Standard deviation of the demonstrator's noise, in units of the longest step."""
    wander: float = 0.25
    """Share of random steps of the demonstrator."""
    episodes: int = 1000
    """Episodes to collect."""
    steps: int | None = None
    """Steps to collect instead; the last episode of each policy is cut to fit."""
    workers: int | None = None
    """Processes; null: one per core. The dataset does not depend on it."""
    seed: int = 0
    """Seed of all random numbers: episode i of a policy is a function of seed, policy and i."""
    result: Path | None = None
    """Also write returns and speed as a result file; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    trust: bool = False
    """Run what a recipe or a --config file names: module:function, module:Id-v0 and Stable-Baselines3 zips."""

    def execute(self) -> Dataset:
        """Collect and write."""
        from trajectory_transformer.collect import WorkerPool, collected_dataset
        from trajectory_transformer.evaluate import episode_metrics

        require(self.episodes >= 1, "--episodes must be at least 1", self.episodes)
        require(self.steps is None or self.steps >= 1, "--steps must be at least 1", self.steps)
        require(self.workers is None or self.workers >= 1, "--workers must be at least 1", self.workers)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        if {"--steps", "--episodes"} <= set(changed_flags(self)):
            raise ValueError("--steps and --episodes both say how much to collect; leave out one of them")
        require(self.policies is None or self.policies.is_dir(), "--policies must be a folder", self.policies)
        plan = self._plan()
        out = self.out or ("data/collected.npz" if self.recipe is None else f"tt/{plan.name}-v0")
        claim_dataset(out, self.result, overwrite=self.overwrite)
        started = time.perf_counter()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        few = plan.parts[0].episodes is not None and sum(part.episodes or 0 for part in plan.parts) <= 64
        workers = self.workers or (1 if few else cores)
        with WorkerPool(workers) as pool:
            # What a recipe names may not exist.
            with nullcontext() if self.recipe is None else naming(self.recipe, "cannot be collected"):
                collected = self._play(plan, pool)
            options = {**plan.env_options, **self.env_options}
            dataset = collected_dataset(
                plan.env,
                plan.parts,
                collected,
                seed=self.seed,
                env_options=options,
                collect_options=plan.collect_options,
            )
            if is_minari_id(out):
                save_minari(dataset, out, [each.seed for each in collected], overwrite=self.overwrite)
            else:
                save_dataset(dataset, out, overwrite=self.overwrite)
            seconds, cpu_seconds = time.perf_counter() - started, pool.cpu_seconds
        metrics = episode_metrics(dataset.episodes, references_of(plan.env))
        console.print(
            metrics_table(f"{counted(len(dataset), 'episode')}, {dataset.num_steps} steps of {plan.env}", metrics)
        )
        speed, used = dataset.num_steps / seconds, cpu_seconds / seconds / cores
        console.print(
            f"wrote {out} in {seconds:.0f} s: {speed:,.0f} steps/s, "
            f"{counted(workers, 'process', 'processes')} used {used:.0%} of {cores} cores"
        )
        if self.result is not None:
            metrics |= {"total_steps": dataset.num_steps, "steps_per_second": speed, "core_share": used}
            self._write_result(plan, out, seconds, metrics)
        return dataset

    def _plan(self) -> "Recipe":
        """What to play: the recipe's parts, or those of the flags."""
        from trajectory_transformer.collect import split_by_share
        from trajectory_transformer.recipes import Recipe, read_recipe

        if self.recipe is not None:
            given = [flag for flag in changed_flags(self) if flag in _OF_RECIPES]
            if given:
                raise ValueError(f"--recipe sets the environment and the policies; leave out {given[0]}")
            with naming(self.recipe, "cannot be collected"):
                recipe = read_recipe(self.recipe, self.policies, trust=self.trust)
                return recipe if self.steps is None else recipe.with_steps(self.steps)
        words = [self.policy] if isinstance(self.policy, str) else self.policy
        actors = [parse_actor(each, self.policies) for each in words]
        given = [flag for flag in changed_flags(self) if flag in _OF_DEMONSTRATOR]
        if given and all(actor.name != "demonstrator" for actor in actors):
            raise ValueError(f"{given[0]} is for the policy demonstrator, not for {actors[0].label}; leave it out")
        actors = [
            replace(actor, noise=self.noise, wander=self.wander) if actor.name == "demonstrator" else actor
            for actor in actors
        ]
        parts = split_by_share(actors, steps=self.steps, episodes=None if self.steps is not None else self.episodes)
        return Recipe("collected", self.env, tuple(parts))

    def _play(self, plan: "Recipe", pool: "WorkerPool") -> "list[CollectedEpisode]":
        from trajectory_transformer.collect import play_parts

        by_steps = plan.parts[0].steps is not None
        total = sum(part.steps or part.episodes or 0 for part in plan.parts)
        episodes = play_parts(
            plan.env,
            plan.parts,
            seed=self.seed,
            pool=pool,
            env_options={**plan.env_options, **self.env_options},
            collect_options=plan.collect_options,
        )
        collected = []
        with progress_bar() as bar:
            task = bar.add_task("collecting", total=total)
            for each in episodes:
                collected.append(each)
                bar.advance(task, len(each.episode) if by_steps else 1)
        return collected

    def _write_result(self, plan: "Recipe", out: str, seconds: float, metrics: dict[str, float]) -> None:
        import torch

        assert self.result is not None
        write_result(
            self.result,
            name=f"collect {plan.name}",
            command=command_line("collect", self, leave_out=("workers", "result", "overwrite", "trust"), out=out),
            device=torch.device("cpu"),
            seeds=[self.seed],
            seconds=seconds,
            metrics=metrics,
        )
