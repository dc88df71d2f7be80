"""The README's Python block and the examples run as they stand."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

from trajectory_transformer import Candidates, Planner, TrajectoryModel
from trajectory_transformer.cli import main
from trajectory_transformer.search.decoder import Bins

ROOT = Path(__file__).parent.parent
TINY = ["--model.window", "3", "--model.num_layers", "1", "--model.width", "16", "--train.steps", "3"]
FLOAT = r"-?\d+\.\d{3}"


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/demo`, a run of three steps on four rooms."""
    folder = tmp_path_factory.mktemp("rooms")
    assert main(["collect", "--out", str(folder / "rooms.npz"), "--episodes", "5"]) == 0
    words = ["--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false", "--train.batch_size", "4"]
    assert main(["train", str(folder / "rooms.npz"), "--out", str(folder / "runs/demo"), *words, *TINY]) == 0
    return folder


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on random episodes of Pendulum-v1, whose values include the rewards."""
    folder = tmp_path_factory.mktemp("pendulum")
    data = str(folder / "pendulum.npz")
    assert main(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--out", data]) == 0
    words = ["--tokens.num_bins", "10", "--tokens.value_includes_reward", "true", "--train.batch_size", "4", *TINY]
    assert main(["train", data, "--out", str(folder / "run"), *words]) == 0
    return folder


def run(folder: Path, *words: str) -> list[str]:
    """Lines that a Python program prints."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def example(name: str, folder: str = "examples") -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_loop_steps_to_the_goal_or_reports_the_distance(rooms: Path) -> None:
    lines = run(rooms, str(ROOT / "examples/own_loop.py"), "runs/demo")
    assert len(lines) == 1
    reached = re.fullmatch(r"reached the goal after (\d+) steps", lines[0])
    stopped = re.fullmatch(r"stopped after 100 steps, (\d\.\d\d) from the goal", lines[0])
    assert (reached is None) != (stopped is None), lines
    if stopped is not None:
        assert float(stopped.group(1)) >= 0.05


def test_own_loop_reports_success_with_a_planner_that_reaches_the_goal(
    rooms: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("own_loop")
    path = iter([[0.4, 0.0], [0.4, 0.0], [0.0, 0.4], [0.0, 0.4]])
    monkeypatch.setattr(Planner, "act", lambda self, position, goal: np.array(next(path)))
    monkeypatch.setattr(module, "move", lambda position, action: position + action)  # no walls
    monkeypatch.setattr(sys, "argv", ["own_loop.py", str(rooms / "runs/demo")])
    module.main()
    assert capsys.readouterr().out == "reached the goal after 4 steps\n"


def test_from_csv_prints_an_action_for_each_room(tmp_path: Path) -> None:
    lines = run(tmp_path, str(ROOT / "examples/from_csv.py"))
    found = [re.fullmatch(r"at (12|26) degrees: power (\d\.\d)", line) for line in lines]
    cold, warm = (float(each[2]) for each in found if each)
    assert cold >= 0.8 and warm <= 0.2
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == "run,temperature,power,comfort"
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 50 * 30


def test_custom_objective_prints_return_and_change_of_both_planners(pendulum: Path) -> None:
    lines = run(pendulum, str(ROOT / "examples/custom_objective.py"), "run", "12")
    assert [line.partition(":")[0] for line in lines] == ["return", "smooth return"]
    for line in lines:
        assert re.fullmatch(rf"(smooth )?return: return -\d+, mean change of action {FLOAT}", line), line


def test_custom_objective_scores_by_hand_if_values_include_rewards(pendulum: Path) -> None:
    model = TrajectoryModel.load(pendulum / "run")
    tokenizer = model.tokenizer
    assert tokenizer.config.value_includes_reward
    bins = tokenizer.discretizer.values[tokenizer.layout.action]  # [1, V]
    # Two candidates of three steps: action, reward, value; then state, action, reward, value; and again.
    actions = [[1, 4, 2], [7, 7, 0]]
    rows = [[a, 0, 0, 5, 5, 5, b, 0, 0, 5, 5, 5, c, 0, 0] for a, b, c in actions]
    rewards, value = [[1.0, 2.0, 4.0], [-1.0, 0.5, 3.0]], [10.0, -20.0]
    candidates = Candidates(
        tokens=torch.tensor([rows]),
        log_prob=torch.zeros(1, 2),
        rewards=torch.tensor([rewards]),
        value=torch.tensor([value]),
        ended=torch.zeros(1, 2, dtype=torch.bool),
        identity=torch.zeros(1, 2, dtype=torch.long),
        prompt=torch.tensor([[5, 5, 5]]),
        bins=Bins(model.layout, model.bin_values()),
    )
    scores = example("custom_objective").smooth_return(model, 3.0)(candidates)[0]
    for index in range(2):
        # The value of the third step includes its reward, which must not be counted twice.
        total = rewards[index][0] + 0.99 * rewards[index][1] + 0.99**2 * value[index]
        first, second, third = (bins[0, token] for token in actions[index])
        wanted = total - 3.0 * (abs(second - first) + abs(third - second))
        assert float(scores[index]) == pytest.approx(wanted, rel=1e-5)


def test_the_policy_of_the_race_walks_to_the_decoy_and_not_to_the_goal() -> None:
    module = example("race")
    goal = np.array([0.9, 0.9], np.float32)
    rng = np.random.default_rng(0)
    actions = [module.lured(np.array([0.6, 0.1], np.float32), goal, rng) for _ in range(200)]
    mean = np.mean(actions, axis=0)
    assert mean[0] > 0.02 and abs(mean[1]) < mean[0] / 2


def test_the_prediction_study_compares_three_predictors_with_the_oracle(tmp_path: Path) -> None:
    lines = run(tmp_path, str(ROOT / "examples/prediction_study.py"), "40", "5")
    assert [line.partition(":")[0] for line in lines] == ["tt", "markov", "pets", "oracle"]
    oracle = float(lines[-1].split()[-1])
    for line in lines[:3]:
        found = re.fullmatch(r"\w+: log-likelihood (-?\d+\.\d\d) after 1 step, (-?\d+\.\d\d) after 15", line)
        assert found is not None, line
        assert max(map(float, found.groups())) <= oracle
    assert (tmp_path / "study.png").is_file()


def test_examples_are_short() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        assert len(path.read_text().splitlines()) < 60, path.name


def test_the_python_block_of_the_readme_prints_an_action(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    lines = run(tmp_path, "-c", blocks[0])
    assert len(lines) == 1
    assert re.fullmatch(r"\[ ?-?\d+\.\d*(e-\d+)?\]", lines[0]), lines
    assert (tmp_path / "runs/log/weights.safetensors").is_file()


def test_beams_draws_one_frame_per_step(rooms: Path) -> None:
    lines = run(rooms, str(ROOT / "examples/beams.py"), "runs/demo", "beams.gif")
    found = re.fullmatch(r"(\d+) steps, (arrived|not reached): beams.gif", lines[0])
    assert found is not None, lines
    with Image.open(rooms / "beams.gif") as gif:
        assert getattr(gif, "n_frames", 1) > 1 and gif.size == (360, 360)


def test_runner_draws_every_second_step_and_leaves_the_body_where_it_was(tmp_path: Path) -> None:
    data = str(tmp_path / "hopper.npz")
    assert main(["collect", "--env", "Hopper-v5", "--policy", "random", "--episodes", "4", "--out", data]) == 0
    assert main(["train", data, "--out", str(tmp_path / "run"), "--train.batch_size", "4", *TINY]) == 0
    words = ["--steps", "4", "--skip", "1", "--horizon", "2"]
    lines = run(tmp_path, str(ROOT / "benchmarks/runner_picture.py"), "run", "runner.gif", *words)
    assert re.fullmatch(r"5 steps, return -?\d+: runner.gif", lines[0]), lines
    with Image.open(tmp_path / "runner.gif") as gif:
        assert getattr(gif, "n_frames", 1) == 2
    env = gymnasium.make("Hopper-v5")
    env.reset(seed=0)
    before = env.unwrapped.data.qpos.copy()  # type: ignore[attr-defined]
    ahead = np.zeros((3, 11))
    ahead[:, 0], ahead[:, 5] = 1.2, 2.0  # height and forward velocity
    torso = [float(segments[0, 0, 0]) for segments in example("runner_picture", "benchmarks").postures(env, ahead)]
    dt = env.unwrapped.dt  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.diff(torso), 2.0 * dt)
    np.testing.assert_array_equal(env.unwrapped.data.qpos, before)  # type: ignore[attr-defined]
