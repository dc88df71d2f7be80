"""Look at played episodes: which policy of the data they follow, where they leave it, and whether it would recover.

    python benchmarks/paper/failures.py EPISODES.npz --env HalfCheetah-v5 --policies DIR \
        --names halfcheetah-expert-tqc halfcheetah-medium-ppo --data EXPERT.npz --below 10000 --out failures.json

For every step: the distance between the action and what each policy would do there without noise (root mean square
over dimensions), and the distance between the state and the nearest one of --data (in its standard deviations; give
episodes of the first policy). For episodes that return less than --below: the first policy is started from states
around the step where the episode leaves it, or before the end if it ends early, and what it earns is recorded. The
other episodes are the control: the first policy is started from steps all over them. States are those of the simulator
while the episode's actions are repeated from its seed, because an observation may be clipped; a step at which repeated
and recorded observation differ is left out. Policies are those of `tt collect --policies`.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from trajectory_transformer.actors import Script, make_script, parse_actor
from trajectory_transformer.data.episode import Episode, FloatArray, load_npz
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.results import write_result

FIRST = 10  # steps before this one may be opening moves of any policy
AWAY = 0.6  # distance of an action that does not belong to the policy
EVERY = 40  # steps between two starts of the control
SAME = 1e-5  # difference of two initial observations of the same seed, at most
REPEATED = 0.05  # difference of observations up to which an episode counts as repeated
NO_GOAL = np.zeros(0, dtype=np.float32)


def action_distances(episode: Episode, script: Script) -> FloatArray:
    """Distance of each action from what a policy would do [T]."""
    rng = np.random.default_rng(0)
    own = np.stack([script(state, NO_GOAL, rng) for state in episode.observations[:-1]])
    return np.asarray(np.sqrt(np.square(episode.actions - np.clip(own, -1.0, 1.0)).mean(axis=1)), np.float32)


def state_distances(states: FloatArray, data: FloatArray) -> FloatArray:
    """Distance of each state from the nearest one of the data, in standard deviations of the data [T]."""
    scale = data.std(axis=0)
    found = torch.cdist(torch.from_numpy(states / scale), torch.from_numpy(data / scale)).amin(dim=1)
    return np.asarray(found.numpy(), np.float32)


def repeated_states(env: Any, episode: Episode, seed: int) -> list[tuple[FloatArray, FloatArray]]:
    """Positions and velocities before each step while the actions are repeated, up to where the repetition ends."""
    observation, _ = env.reset(seed=seed)
    states: list[tuple[FloatArray, FloatArray]] = []
    for recorded, action in zip(episode.observations, episode.actions, strict=False):
        if np.abs(observation - recorded).max() > (REPEATED if states else SAME):
            break
        states.append((env.data.qpos.copy(), env.data.qvel.copy()))
        observation, *_ = env.step(action)
    return states


def start_from(env: Any, script: Script, state: tuple[FloatArray, FloatArray], steps: int) -> tuple[float, int]:
    """Return and length of a policy without noise from a state."""
    env.set_state(*state)
    rng, total = np.random.default_rng(0), 0.0
    observation = env._get_obs().astype(np.float32)
    for step in range(steps):
        action = np.asarray(script(observation, NO_GOAL, rng), np.float64)
        observation, reward, terminated, _, _ = env.step(action)
        observation = np.asarray(observation, np.float32)
        total += float(reward)
        if terminated:
            return total, step + 1
    return total, steps


def looked_at(distances: FloatArray, limit: int) -> list[int]:
    """Steps of a failed episode to start the policy from: around the first action that is not its own, or the end."""
    away = np.flatnonzero(distances[FIRST:] > AWAY) + FIRST
    if len(away) and len(distances) == limit:
        first, every = int(away[0]) - 8, 4
    else:
        first, every = len(distances) - 120, 10
    return list(range(max(first, 0), len(distances), every))[:12]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the result file."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=Path, help="played episodes, as tt evaluate writes them")
    parser.add_argument("--env", required=True)
    parser.add_argument("--policies", type=Path, required=True, help="folder of the actor files")
    parser.add_argument("--names", nargs="+", required=True, help="policies of the data, the best one first")
    parser.add_argument("--data", type=Path, required=True, help="episodes of the first policy")
    parser.add_argument("--below", type=float, required=True, help="return of a failed episode, at most")
    parser.add_argument("--limit", type=int, default=1000, help="steps of a whole episode")
    parser.add_argument("--steps", type=int, default=300, help="of the first policy after a start")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    for path in (options.episodes, options.data):
        if not path.is_file():
            parser.error(f"{path} does not exist")
    env: Any = gymnasium.make(options.env).unwrapped
    env.reset(seed=0)
    actions, dim = action_leaf(env.action_space), env.observation_space.shape[0]
    scripts = {
        name: make_script(parse_actor(f"{name} det", options.policies), options.env, actions, dim)
        for name in options.names
    }
    data = np.concatenate([episode.observations for episode in load_npz(options.data)])
    found: list[dict[str, object]] = []
    followed = []
    survived: dict[str, list[bool]] = {"failed": [], "control": []}
    played = load_npz(options.episodes)
    first_seed = int(str(played.metadata["seed"]))
    for number, episode in enumerate(played):
        distances = {name: action_distances(episode, script) for name, script in scripts.items()}
        nearest = np.stack(list(distances.values())).argmin(axis=0)
        followed.append(np.bincount(nearest, minlength=len(scripts)) / len(nearest))
        states = state_distances(episode.observations[:-1], data)
        own = distances[options.names[0]]
        entry: dict[str, object] = {
            "return": round(episode.total_reward, 1),
            "steps": len(episode),
            "followed": dict(zip(scripts, followed[-1].round(3).tolist(), strict=True)),
            "action_distance": {name: round(float(np.median(each)), 3) for name, each in distances.items()},
            "state_distance": round(float(np.median(states)), 3),
        }
        failed = episode.total_reward < options.below
        repeated = repeated_states(env, episode, first_seed + number)
        entry["repeated_steps"] = len(repeated)
        steps = looked_at(own, options.limit) if failed else list(range(EVERY, len(episode) - EVERY, EVERY))
        earned = {
            step: start_from(env, scripts[options.names[0]], repeated[step], options.steps)
            for step in steps
            if step < len(repeated)
        }
        survived["failed" if failed else "control"] += [length == options.steps for _, length in earned.values()]
        if failed:
            entry["starts"] = [
                {
                    "step": step,
                    "action_distance": round(float(own[step]), 3),
                    "state_distance": round(float(states[step]), 3),
                    "return": round(total, 1),
                    "steps": length,
                }
                for step, (total, length) in earned.items()
            ]
        found.append(entry)
    shares = np.mean(followed, axis=0)
    metrics = {f"followed_{name}": float(share) for name, share in zip(scripts, shares, strict=True)}
    metrics |= {"episodes": len(found), "failed": sum("starts" in entry for entry in found)}
    for name, each in survived.items():
        if each:
            metrics |= {f"survived_{name}": float(np.mean(each)), f"starts_{name}": len(each)}
    write_result(
        options.out,
        name=f"failures {options.env}",
        command="python " + shlex.join(sys.argv),
        device=torch.device("cpu"),
        seeds=[],
        seconds=time.monotonic() - began,
        metrics=metrics,
        details={"played": found},
    )
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
