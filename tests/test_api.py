"""The public API: strings or paths, the same numbers as the commands, and what reaches the objective."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajectory_transformer
from trajectory_transformer import (
    Episode,
    ModelConfig,
    Objective,
    Planner,
    Sampler,
    SearchConfig,
    TokenConfig,
    TrainConfig,
    TrajectoryModel,
    collect,
    discounted_return,
    evaluate,
    planner,
    train,
)
from trajectory_transformer.cli import main
from trajectory_transformer.config import FIRST_SEED

SEARCH = SearchConfig(beam_width=3, horizon=2, action=Sampler(top_k=2), first_action=Sampler(nucleus=1.0))
FLAGS = ["--search.beam_width", "3", "--search.horizon", "2", "--search.action.nucleus", "null"]
FLAGS += ["--search.action.top_k", "2", "--search.first_action.nucleus", "1.0"]


@pytest.fixture(scope="module", params=[False, True], ids=["value after reward", "value with reward"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run of a few steps on random episodes of Pendulum-v1, as a string."""
    folder = str(tmp_path_factory.mktemp("pendulum") / "run")
    train(
        collect("Pendulum-v1", "random", episodes=2),
        tokens=TokenConfig(num_bins=8, discount=0.9, value_includes_reward=request.param),
        model=ModelConfig(window=3, num_layers=1, num_heads=2, width=16),
        train=TrainConfig(steps=3, batch_size=8),
        out=folder,
        device="cpu",
    )
    return folder


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without planning times."""
    return {name: value for name, value in metrics.items() if not name.startswith("plan_ms")}


def test_public_names_exist_and_are_sorted() -> None:
    assert [name for name in trajectory_transformer.__all__ if not hasattr(trajectory_transformer, name)] == []
    assert trajectory_transformer.__version__ == "0.1.0"


def test_run_folders_are_strings_or_paths(run: str) -> None:
    model = TrajectoryModel.load(run)
    observation = np.array([1.0, 0.0, 0.5])
    actions = [Planner(each, search=SEARCH).act(observation) for each in (model, run, Path(run))]
    assert actions[0].shape == (1,)
    for action in actions[1:]:
        np.testing.assert_array_equal(action, actions[0])


def test_evaluate_gives_the_metrics_and_episodes_of_the_command(run: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    short: dict[str, Any] = {"max_episode_steps": 40}
    words = ["--episodes", "2", "--env_options", json.dumps(short), "--out", str(out), *FLAGS]
    assert main(["evaluate", run, *words]) == 0
    played: list[Episode] = []
    planner = Planner(run, search=SEARCH, seed=FIRST_SEED)
    found = evaluate(planner, env_options=short, episodes=2, on_episode=played.append)
    stored = json.loads(out.read_text())
    assert untimed(found.metrics) == untimed(stored["metrics"])
    assert found.env == "Pendulum-v1" and list(found.episodes) == played
    assert stored["returns"] == [episode.total_reward for episode in found.episodes]
    assert {"plan_ms_p50", "plan_ms_p90", "plan_ms_p99"} <= found.metrics.keys()
    planner = Planner(run, search=SEARCH, seed=FIRST_SEED)
    again = evaluate(planner, "Pendulum-v1", env_options=short, episodes=2, num_envs=1)
    assert untimed(again.metrics) == untimed(found.metrics)


def test_evaluate_refuses_what_cannot_be_played(run: str) -> None:
    made = Planner(run, search=SEARCH)
    with pytest.raises(ValueError, match="episodes must be at least 1, got 0"):
        evaluate(made, episodes=0)
    with pytest.raises(ValueError, match="environments must be at least 1, got 0"):
        evaluate(made, num_envs=0)
    with pytest.raises(ValueError, match="the seed must not be negative"):
        evaluate(made, seed=-1)
    with pytest.raises(ValueError, match="'CartPole-v1' does not fit the model"):
        evaluate(made, "CartPole-v1")
    with pytest.raises(ValueError, match="'Pendulum-v1' cannot be made: .*unexpected keyword argument 'x'"):
        evaluate(made, env_options={"x": 1})
    with pytest.raises(ValueError, match="names no environment: give one"):
        evaluate(made.policy())


@pytest.mark.parametrize("discount", [None, 0.5])
def test_discount_and_value_includes_reward_reach_the_objective(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, discount: float | None
) -> None:
    """Scores of stored plans are those of rewards and values that the objective saw, computed by hand."""
    includes = TrajectoryModel.load(run).tokenizer.config.value_includes_reward
    used = 0.9 if discount is None else discount
    arguments: list[tuple[float, bool]] = []
    last: list[Any] = []

    def recorded(discount: float, *, value_includes_reward: bool = False) -> Objective:
        arguments.append((discount, value_includes_reward))
        score = discounted_return(discount, value_includes_reward=value_includes_reward)

        def objective(candidates: Any) -> Any:
            found = score(candidates)
            if candidates.rewards.shape[-1] == 2:
                first, second = candidates.rewards.unbind(-1)
                following = candidates.value if includes else second + used * candidates.value
                last.append((first + used * following).numpy())
            return found

        return objective

    monkeypatch.setattr(planner, "discounted_return", recorded)
    words = [] if discount is None else ["--discount", str(discount)]
    trace = tmp_path / "plans.npz"
    out = tmp_path / "x.json"
    assert main(["evaluate", run, "--episodes", "1", "--out", str(out), "--trace", str(trace), *FLAGS, *words]) == 0
    assert arguments == [(used, includes)]
    with np.load(trace) as file:
        scores = file["scores"]  # [P, 3], best first
    assert len(scores) == len(last) == 200
    for stored, by_hand in zip(scores, last, strict=True):
        np.testing.assert_allclose(stored, np.sort(by_hand[0])[::-1][:3], rtol=1e-5)


def test_an_objective_excludes_kind_and_discount(run: str) -> None:
    for more in ({"kind": "return"}, {"discount": 0.5}):
        with pytest.raises(ValueError, match="an objective replaces kind and discount"):
            Planner(run, objective=discounted_return(0.9), **more)
    with pytest.raises(ValueError, match="a discount is for planning for return, not for imitate"):
        Planner(run, kind="imitate", discount=0.5)
