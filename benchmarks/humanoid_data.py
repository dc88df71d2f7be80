"""Data of the humanoid experiment (`humanoid.py`): episodes to train on, held-out ones, and reference episodes.

The policy reads all 348 dimensions of Humanoid-v5, the datasets hold the first 45: positions and velocities.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import gymnasium
import mujoco
import numpy as np

from benchmarks.humanoid_jobs import NUM_BINS, Places
from trajectory_transformer.actors import Script, ScriptedPolicy, make_script
from trajectory_transformer.analysis.likelihood import Edges
from trajectory_transformer.analysis.masking import masked_dataset
from trajectory_transformer.collect import CollectedEpisode, WorkerPool, collected_dataset, play_parts
from trajectory_transformer.data.episode import Dataset, DoubleArray, Episode, FloatArray, load_npz, save_npz
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.data.split import split_episodes
from trajectory_transformer.randomness import stream_seed
from trajectory_transformer.recipes import read_recipe
from trajectory_transformer.rollout import make_envs, rollout, space_dims
from trajectory_transformer.tokens.discretizer import bins_of

RECIPE = "humanoid-expert"
OBSERVATION_DIM = 45
ENV_OPTIONS = {f"include_{name}_in_observation": False for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")}
HIDDEN = 0.5
SPLIT_SEED = 0
LATEST_BRANCH = 200  # references part from each other at a step up to this one


def narrow(episode: Episode) -> Episode:
    """Positions and velocities only."""
    return replace(episode, observations=episode.observations[:, :OBSERVATION_DIM].copy())


def collect_data(options: argparse.Namespace, places: Places) -> None:
    """Collect the recipe, hold episodes out and mask the rest."""
    recipe = read_recipe(RECIPE, options.policies)
    parts = [replace(part, steps=max(1, round((part.steps or 0) * options.scale))) for part in recipe.parts]
    collected: list[CollectedEpisode] = []
    with WorkerPool(options.workers) as pool:
        for each in play_parts(recipe.env, parts, seed=0, pool=pool):
            collected.append(replace(each, episode=narrow(each.episode)))
    dataset = collected_dataset(recipe.env, parts, collected, seed=0, env_options=ENV_OPTIONS)
    train, held_out = split_episodes(dataset, options.held_out, SPLIT_SEED)
    save_npz(held_out, places.data("held_out"))
    save_npz(masked_dataset(train, HIDDEN, SPLIT_SEED, NUM_BINS), places.data("train_masked"))
    save_npz(train, places.data("train"))


def collect_references(options: argparse.Namespace, places: Places) -> None:
    """Play several visits from each of a few starts."""
    visits = range(options.visits)
    played = [play_visits(options, start, visits) for start in range(options.starts)]
    held_out = load_npz(places.data("held_out"))
    metadata = {**held_out.metadata, "seed": options.reference_seed}
    episodes = tuple(chain.from_iterable(played))
    dataset = Dataset(episodes, metadata, held_out.observation_dimensions, held_out.action_dimensions)
    save_npz(dataset, places.data("references"))


def play_visits(options: argparse.Namespace, start: int, visits: Iterable[int]) -> list[Episode]:
    """Episodes from one start: the same noise up to a step, then that of each visit.

    Data is played with seeds of environments from 2^31 on, references with those from `options.reference_seed` on.
    """
    recipe, seed, branch = read_recipe(RECIPE, options.policies), options.reference_seed, branch_of(options, start)
    envs = make_envs(recipe.env, 1, {"max_episode_steps": branch + options.horizon})
    actions = action_leaf(envs.single_action_space)
    script = make_script(recipe.parts[0].actor, recipe.env, actions, space_dims(envs)[0], envs.envs[0])
    found = []
    for visit in visits:
        common, own = common_noise(options, start), own_noise(options, start, visit)
        policy = ScriptedPolicy(branching(script, common, own, branch), own)
        found.append(narrow(rollout(envs, policy, num_episodes=1, seed=seed + start)[0]))
    envs.close()
    return found


def play_from_bins(options: argparse.Namespace, start: int, visits: Iterable[int], edges: Edges) -> list[Episode]:
    """Episodes that begin at states in the bins of a start, with the noise of its visits."""
    recipe = read_recipe(RECIPE, options.policies)
    env: Any = gymnasium.make(recipe.env).unwrapped  # Gymnasium has no types for the simulator
    actions, observation_dim = action_leaf(env.action_space), env.observation_space.shape[0]
    script = make_script(recipe.parts[0].actor, recipe.env, actions, observation_dim, env)
    no_goal = np.zeros(0, dtype=np.float32)
    observation, _ = env.reset(seed=options.reference_seed + start)
    common = common_noise(options, start)
    for _ in range(branch_of(options, start)):
        observation = env.step(script(observation.astype(np.float32), no_goal, common))[0]
    begun = mujoco.MjData(env.model)
    mujoco.mj_copyData(begun, env.model, env.data)
    found = []
    for visit in visits:
        # Only positions and velocities change: what else the policy reads belongs to the step before.
        mujoco.mj_copyData(env.data, env.model, begun)
        rng = np.random.default_rng(stream_seed(options.reference_seed, start, 2, visit))
        state = drawn_from_bins(observation[:OBSERVATION_DIM], edges, rng)
        env.data.qpos[2:], env.data.qvel[:] = np.split(state, [env.model.nq - 2])
        env.data.qpos[3:7] /= np.linalg.norm(env.data.qpos[3:7])  # the orientation is a unit quaternion
        own = own_noise(options, start, visit)
        taken: list[FloatArray] = []
        observations, ended = [env._get_obs()], False
        while len(taken) < options.horizon and not ended:
            taken.append(np.asarray(script(observations[-1].astype(np.float32), no_goal, own), dtype=np.float32))
            following, _, ended, _, _ = env.step(taken[-1])
            observations.append(following)
        states = np.stack(observations)[:, :OBSERVATION_DIM].astype(np.float32)
        found.append(Episode(states, np.stack(taken), None, ended))
    env.close()
    return found


def drawn_from_bins(state: DoubleArray, edges: Edges, rng: np.random.Generator) -> DoubleArray:
    """A state [O] whose entries are uniform in the bins of the entries of another."""
    found = state.copy()
    for dim, bounds in enumerate(edges):
        if len(bounds) > 1:
            place = int(bins_of(found[dim], bounds))
            found[dim] = rng.uniform(bounds[place], bounds[place + 1])
    return found


def branch_of(options: argparse.Namespace, start: int) -> int:
    """The step at which visits of a start part from each other."""
    rng = np.random.default_rng(stream_seed(options.reference_seed, start))
    return int(rng.integers(options.context, max(LATEST_BRANCH, options.context + 1)))


def common_noise(options: argparse.Namespace, start: int) -> np.random.Generator:
    """The noise of all visits of a start before they part."""
    return np.random.default_rng(stream_seed(options.reference_seed, start, 0))


def own_noise(options: argparse.Namespace, start: int, visit: int) -> np.random.Generator:
    """The noise of one visit after that."""
    return np.random.default_rng(stream_seed(options.reference_seed, start, 1, visit))


def branching(script: Script, common: np.random.Generator, own: np.random.Generator, step: int) -> Script:
    """A policy that draws its noise from one stream before a step, and from another one after it."""
    taken = 0

    def act(observation: FloatArray, goal: FloatArray, rng: np.random.Generator) -> FloatArray:
        del rng
        nonlocal taken
        taken += 1
        return np.asarray(script(observation, goal, common if taken <= step else own), dtype=np.float32)

    return act
