"""Outputs are claimed before work starts, nothing is left behind that blocks, and no mistake ends in a traceback."""

import json
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from trajectory_transformer.cli import main
from trajectory_transformer.cli.train import Stopped, Train
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.report.video import MIN_SECONDS

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]

TINY = ["--model.window", "3", "--model.num_layers", "1", "--model.num_heads", "2", "--model.width", "16"]
TINY += ["--tokens.num_bins", "16", "--tokens.rewards", "false", "--train.batch_size", "4", "--train.steps", "2"]
SEARCH = ["--search.beam_width", "1", "--search.horizon", "1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset and a run on it."""
    folder = tmp_path_factory.mktemp("made")
    words = ["--env", "CartPole-v1", "--policy", "random", "--episodes", "4", "--workers", "1"]
    assert main(["collect", *words, "--out", str(folder / "pole.npz")]) == 0
    assert main(["train", str(folder / "pole.npz"), "--out", str(folder / "run"), *TINY]) == 0
    return folder


def test_outputs_that_cannot_be_written_are_refused_before_work_starts(
    refused: Refused, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise AssertionError("work has started")

    work = {
        "evaluate": "evaluate",
        "search.predict": "predict",
        "runs": "start_run",
        "cli.data": "save_dataset",
        "collect": "play_parts",
    }
    for module, name in work.items():
        monkeypatch.setattr(import_module(f"trajectory_transformer.{module}"), name, fail)
    (tmp_path / "file").touch()
    data, run = str(made / "pole.npz"), str(made / "run")
    outputs: dict[str, tuple[list[str], str]] = {
        "--out": (["evaluate", run, *SEARCH], "x.json"),
        "--trace": (["evaluate", run, "--out", "y.json", *SEARCH], "x.npz"),
        "--video": (["evaluate", run, "--out", "y.json", *SEARCH], "x.gif"),
    }
    commands = [
        *([*words, flag, f"file/{name}"] for flag, (words, name) in outputs.items()),
        ["predict", run, "--dataset", data, "--out", "file/x.png"],
        ["train", data, *TINY, "--out", "file/run"],
        ["data", "convert", data, "--out", "file/x.csv"],
        ["data", "show", data, "--plot", "file/x.png"],
        ["collect", "--out", "x.npz", "--result", "file/x.json"],
        ["demo", "--out", "file/demo"],
        ["train", data, *TINY, "--out", "/proc/run"],
    ]
    for words in commands:
        refused(r"cannot be written: .*: (Not a directory|No such file or directory)", *words)
    refused(r"x\.npz would be written twice", "evaluate", run, "--out", "x.npz", *SEARCH)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_existing_outputs_are_kept_unless_overwrite_is_given(tt: Run, refused: Refused, made: Path) -> None:
    data, run = str(made / "pole.npz"), str(made / "run")
    commands: dict[str, list[str]] = {
        "x.npz": ["data", "convert", data, "--out", "x.npz"],
        "tests/pole-v0": ["data", "convert", data, "--out", "tests/pole-v0"],
        "plot.png": ["data", "show", data, "--plot", "plot.png"],
        "collected.npz": ["collect", "--episodes", "1", "--out", "collected.npz"],
        "own": ["train", data, "--out", "own", *TINY],
        "result.json": ["evaluate", run, "--episodes", "1", "--out", "result.json", *SEARCH],
        "future.png": ["predict", run, "--dataset", data, "--samples", "2", "--horizon", "2", "--out", "future.png"],
    }
    for name, words in commands.items():
        code, text = tt(*words)
        assert code == 0, text
        refused(rf"{name} exists already; choose another .*or replace it with --overwrite true", *words)
        code, text = tt(*words, "--overwrite", "true")
        assert code == 0, text
    assert "--overwrite" not in json.loads(Path("result.json").read_text())["command"]
    assert len(load_dataset("tests/pole-v0")) == 4


def test_a_failed_demo_leaves_nothing_that_blocks_the_next(
    tt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["demo", "--demonstrations", 4, "--steps", 2, "--goals", 1]
    train = Train.execute

    def stop(command: Train) -> Path:
        train(command)
        raise Stopped("stopped at step 1; resume with: tt train --resume runs/demo")

    def fail(command: Train) -> Path:
        train(command)
        raise ValueError("the disk is full")

    for broken, code, message in ((stop, 130, "tt demo: stopped\n"), (fail, 2, "tt demo: error: the disk is full\n")):
        monkeypatch.setattr(Train, "execute", broken)
        found, text = tt(*words)
        assert found == code and text.endswith(message), text
        assert "resume with" not in text
        assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.setattr(Train, "execute", train)
    code, text = tt(*words)
    assert code == 0, text


def test_moved_data_can_be_named_when_a_run_is_resumed(tt: Run, refused: Refused, made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "pole.npz", "here.npz")
    assert tt("train", "here.npz", "--out", "run", *TINY)[0] == 0
    Path("here.npz").rename("there.npz")
    refused(
        r"run was started on .*here\.npz, which no longer exists; .*: tt train DATASET --resume run$",
        *("train", "--resume", "run"),
    )
    code, text = tt("train", "there.npz", "--resume", "run")
    assert code == 0, text


def test_report_writes_the_page_of_a_run_folder(tt: Run, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", "run")
    code, text = tt("evaluate", "run", "--episodes", 1, *SEARCH)
    assert code == 0, text
    code, text = tt("report", "run")
    assert code == 0, text
    assert "wrote run/report.html" in text
    assert "evaluation" in Path("run/report.html").read_text()


def test_a_table_of_scores_needs_scores(refused: Refused, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", "results/run")
    Path("README.md").write_text("<!-- scores run/training -->\n<!-- /scores -->\n")
    refused(r"training\.json: has no score", "report", "results")


ENVIRONMENT = """
import gymnasium
import numpy as np

class Own(gymnasium.Env):
    metadata = {"render_modes": MODES, "render_fps": 30}
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, size=1):
        if size > 3:
            raise RuntimeError("size must be at most 3")
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, False, self.steps >= 5, {}

    def render(self):
        return np.full((16, 16, 3), self.steps, np.uint8)

gymnasium.register("NAME-v0", Own)
"""


def test_own_environments_are_found_in_the_working_folder(tt: Run, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "homemade.py").write_text(ENVIRONMENT.replace("MODES", "['rgb_array']").replace("NAME", "Home"))
    words = ["--env", "homemade:Home-v0", "--policy", "random", "--episodes", 3]
    code, text = tt("collect", *words, "--workers", 2, "--out", "x.npz")
    assert code == 0, text
    code, text = tt("train", "x.npz", "--out", "run", *TINY)
    assert code == 0, text
    code, text = tt("evaluate", "run", "--episodes", 1, *SEARCH, "--video", "x.gif", "--trust", "true")
    assert code == 0, text
    assert "homemade:Home-v0" in text
    with Image.open("x.gif") as video:  # 6 different frames, the last one held to the end
        assert video.info["duration"] == 250
    words = ["evaluate", "run", "--env", "nowhere:Home-v0", "--out", "y.json"]
    refused(r"'nowhere:Home-v0' cannot be made: No module named 'nowhere'", *words)


def test_environments_may_refuse_their_options(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(ENVIRONMENT.replace("MODES", "[]").replace("NAME", "Picky"))
    words = ["collect", "--env", "picky:Picky-v0", "--policy", "random", "--env_options", '{"size": 9}']
    refused(r"'picky:Picky-v0' cannot be made: size must be at most 3", *words)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("def act(observation):\n    return 0\n", r"must be a function of \(observation, goal, rng\), got act\(observ"),
        ("def act(a, b, c, d):\n    return 0\n", r"must be a function of .* got act\(a, b, c, d\)"),
        ("def act(:\n", r"cannot be imported \(SyntaxError"),
        ("undefined\n", r"cannot be imported \(NameError: name 'undefined'"),
        ("act = 5\n", r"must be a function of .* got 5"),
    ],
)
def test_policies_that_cannot_be_called_are_refused(
    refused: Refused, tmp_path: Path, source: str, pattern: str, request: pytest.FixtureRequest
) -> None:
    module = f"bad_policy_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source)
    refused(pattern, "collect", "--env", "CartPole-v1", "--policy", f"{module}:act", "--episodes", 1)
    assert not (tmp_path / "data").exists()


def test_a_video_needs_an_environment_that_renders(
    refused: Refused, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("trajectory_transformer.evaluate")
    monkeypatch.setattr(module, "evaluate", lambda *given, **options: pytest.fail("played"))
    (tmp_path / "blind.py").write_text(ENVIRONMENT.replace("MODES", "[]").replace("NAME", "Blind"))
    words = ["evaluate", made / "run", "--env", "blind:Blind-v0", "--out", "x.json", *SEARCH, "--video", "x.gif"]
    refused(r"'blind:Blind-v0' cannot be recorded: it has no render mode rgb_array .*[Rr]ender", *words)
    assert not (tmp_path / "x.json").exists()


def test_progress_counts_steps_before_the_first_episode_ends(
    tt: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajectory_transformer.cli.console.LINE_SECONDS", 0.0)
    code, text = tt("evaluate", made / "run", "--episodes", 2, "--num_envs", 2, "--out", "steps.json", *SEARCH)
    assert code == 0, text
    assert "evaluating 0/2, 2 steps, 0:00:0" in text, text
    assert re.search(r"evaluating 2/2, [\d,]+ steps, mean return", text), text


def test_videos_show_the_longest_episode_for_three_seconds(tt: Run, made: Path, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    words = ["evaluate", made / "run", "--episodes", 4, "--out", "x.json", *SEARCH, "--video", "x.gif"]
    code, text = tt(*words)
    assert code == 0, text
    steps = [len(episode) for episode in load_dataset("x.npz")]
    assert f"recording episode {steps.index(max(steps))}, the longest" in text and f"{max(steps)}/{max(steps)}" in text
    with Image.open("x.gif") as video:
        frames = getattr(video, "n_frames", 1)
        seconds = 0.0
        for index in range(frames):
            video.seek(index)
            seconds += video.info["duration"] / 1000
    assert seconds >= MIN_SECONDS - 0.1
