"""Look at played episodes: which policy of the data they follow, where they leave it, and whether it would recover.

    python benchmarks/paper/failures.py EPISODES.npz --env HalfCheetah-v5 --policies DIR \
        --names halfcheetah-expert-tqc halfcheetah-medium-ppo --data EXPERT.npz --below 10000 --out failures.json

For every step: the distance between the action and what each policy would do there without noise (root mean square
over dimensions), and the distance between the state and the nearest one of --data (in its standard deviations; give
episodes of the first policy). For episodes that return less than --below: the first policy is started from states
around the step where the episode leaves it, or before the end if it ends early, and what it earns is recorded.
Policies are those of `tt collect --policies`; bodies are Gymnasium's with positions and velocities as observations.
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


def start_from(env: Any, script: Script, state: FloatArray, steps: int) -> tuple[float, int]:
    """Return and length of a policy without noise from a state."""
    hidden = env.model.nq + env.model.nv - len(state)  # coordinates of the root that are not observed
    positions = np.concatenate([np.zeros(hidden), state[: env.model.nq - hidden]])
    env.set_state(positions, state[env.model.nq - hidden :].astype(np.float64))
    rng, total, observation = np.random.default_rng(0), 0.0, state
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
    first = int(away[0]) - 8 if len(away) and len(distances) == limit else len(distances) - 48
    return list(range(max(first, 0), len(distances), 4))[:12]


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
    for episode in load_npz(options.episodes):
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
        if episode.total_reward < options.below:
            script = scripts[options.names[0]]
            entry["starts"] = [
                {
                    "step": step,
                    "action_distance": round(float(own[step]), 3),
                    "state_distance": round(float(states[step]), 3),
                    "return": round(total, 1),
                    "steps": length,
                }
                for step in looked_at(own, options.limit)
                for total, length in [start_from(env, script, episode.observations[step], options.steps)]
            ]
        found.append(entry)
    shares = np.mean(followed, axis=0)
    metrics = {f"followed_{name}": float(share) for name, share in zip(scripts, shares, strict=True)}
    metrics |= {"episodes": len(found), "failed": sum("starts" in entry for entry in found)}
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
