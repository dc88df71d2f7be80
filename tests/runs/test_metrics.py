"""Where metrics go: JSON lines, TensorBoard, Weights & Biases, and lines of a redirected command."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_train import FLAGS, run
from trajectory_transformer import Dataset, Metrics, save_dataset
from trajectory_transformer.cli import main
from trajectory_transformer.cli.console import ProgressLines, console
from trajectory_transformer.runs import metrics as logs

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the tensorboard extra"
)
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the wandb extra")


@pytest.fixture
def data(tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset file in the current folder, which is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    save_dataset(tiny_dataset, "data.npz")
    return "data.npz"


def test_all_numbers_of_a_report_have_a_name() -> None:
    plain = Metrics(2, 9, 1.5, {"action": 1.0}, 0.1, 0.2, 30.0)
    assert logs.scalars(plain) == {
        "loss": 1.5,
        "loss/action": 1.0,
        "learning_rate": 0.1,
        "gradient_norm": 0.2,
        "tokens_per_second": 30.0,
    }
    full = Metrics(2, 9, 1.5, {"action": 1.0}, 0.1, 0.2, 30.0, 2.5, {"action": 2.0}, {"return": 7.0})
    added = {"validation": 2.5, "validation/action": 2.0, "evaluation/return": 7.0}
    assert logs.scalars(full) == logs.scalars(plain) | added


@needs_tensorboard
def test_tensorboard_has_every_report_once_after_a_resume(data: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def stop(metrics: Metrics) -> None:
        if metrics.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(data, out="run", log="tensorboard", checkpoint_every=3, on_metrics=stop)
    run(data, out="run", resume=True, log="tensorboard")
    events = EventAccumulator("run/tensorboard").Reload()
    assert [event.step for event in events.Scalars("loss/action")] == list(range(1, 13))


@needs_wandb
@pytest.mark.filterwarnings("ignore")  # of a package that is not ours
def test_weights_and_biases_works_offline_and_goes_on_after_a_resume(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main(["train", data, "--out", "run", *FLAGS, "--log", "wandb"]) == 0
    name = Path("run/wandb-id").read_text()
    assert main(["train", "--resume", "run", "--train.steps", "20", "--log", "wandb"]) == 0
    assert Path("run/wandb-id").read_text() == name
    files = list(Path("run/wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert files and all(file.stat().st_size for file in files)


def test_weights_and_biases_gets_name_settings_and_every_report(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        """Stands for the package."""

        Error = RuntimeError
        logged: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012
        options: dict[str, Any] = {}  # noqa: RUF012
        finished = 0

        def init(self, **options: Any) -> "Recorder":
            Recorder.options = options
            if os.environ.get("WANDB_MODE") == "refuse":
                raise RuntimeError("no key")
            return self

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            Recorder.finished += 1

    monkeypatch.setattr(logs, "_wandb", Recorder)
    run(data, out="run", log="wandb")
    assert [step for step, _ in Recorder.logged] == list(range(1, 13)) and Recorder.finished == 1
    assert {"loss", "loss/action", "learning_rate"} <= Recorder.logged[0][1].keys()
    assert Recorder.options["name"] == "run" and Recorder.options["config"]["train"]["steps"] == 12
    assert Recorder.options["id"] == Path("run/wandb-id").read_text()
    monkeypatch.setenv("WANDB_MODE", "refuse")
    with pytest.raises(ValueError, match=r"cannot start \(no key\); log in with: wandb login, or set WANDB_MODE=off"):
        run(data, out="other", log="wandb")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_before_anything_is_written(
    data: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", data, "--out", "run", *FLAGS, "--log", name]) == 2
    assert f"--log {name} needs: pip install 'trajectory-transformer[{name}]'" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_log_needs_a_folder(data: str) -> None:
    with pytest.raises(ValueError, match="log needs a run folder, out, got tensorboard"):
        run(data, log="tensorboard")


def test_the_old_flag_names_its_successor(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", data, "--tensorboard", "true"])
    assert "--tensorboard is now --log tensorboard" in capsys.readouterr().err


def test_progress_in_a_file_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trajectory_transformer.cli.console.LINE_SECONDS", 0.0)
    with ProgressLines(console=console) as bar:
        task = bar.add_task("training", total=4, loss="")
        for step in range(1, 5):
            bar.update(task, completed=step, loss=f"loss {10 / step:.1f}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        *([f"training {step}/4", f"loss {10 / step:.1f}"] for step in range(1, 5)),
        ["training 4/4", "loss 2.5"],
    ]


def test_progress_shows_whole_tokens_per_second(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0.0, 1e-5)  # as fast as a GPU: millions of tokens per second
    fast = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("trajectory_transformer.training.train.time", fast)
    assert main(["train", data, "--out", "run", *FLAGS]) == 0
    assert re.search(r"training 12/12, loss \d\.\d{3}, 8,400,000 tokens/s", capsys.readouterr().out)


CHILD = """
import sys
from trajectory_transformer.cli import console, main
console.LINE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_the_output_of_a_redirected_run_comes_line_by_line(data: str) -> None:
    words = [sys.executable, "-c", CHILD, "train", data, "--out", "run", *FLAGS, "--train.steps", "100000"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    seen = [line for line, _ in zip(child.stdout, range(6), strict=False)]  # while it runs
    assert child.poll() is None
    child.terminate()
    rest = child.communicate(timeout=60)[0]
    assert sum("training " in line and "/100000" in line for line in seen) >= 2, seen
    assert "resume with: tt train --resume run" in rest
