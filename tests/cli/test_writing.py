"""Outputs appear complete or not at all, and nothing of the user's is replaced unasked, also by two processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trajectory_transformer.data.episode import Dataset, load_npz, save_npz
from trajectory_transformer.data.sources import load_dataset, save_dataset
from trajectory_transformer.files import FolderInUseError, OutputFolder, lock_folder, replacing

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]

COLLECT = ("collect", "--env", "CartPole-v1", "--policy", "random", "--episodes", "2", "--workers", "1")
TINY = ["--model.window", "2", "--model.num_layers", "1", "--model.num_heads", "1", "--model.width", "8"]
TINY += ["--tokens.num_bins", "4", "--train.batch_size", "2", "--device", "cpu"]


def tt_process(*words: object, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trajectory_transformer", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def test_a_path_that_appears_meanwhile_is_kept_and_so_is_the_work(tmp_path: Path) -> None:
    target = tmp_path / "x.bin"
    with (
        pytest.raises(FileExistsError, match=r"x.bin was created by another process .* kept as .*\.tmp"),
        replacing(target, overwrite=False) as temporary,
    ):
        temporary.write_bytes(b"mine")
        target.write_bytes(b"theirs")
    assert target.read_bytes() == b"theirs"
    assert [path.read_bytes() for path in tmp_path.glob("*.tmp")] == [b"mine"]


@pytest.mark.parametrize("name", ["x.npz", "x.hdf5", "x.parquet", "x.csv", "mine/x-v0"])
def test_the_second_of_two_writers_is_refused(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.chdir(tmp_path)
    save_dataset(tiny_dataset, name, overwrite=False)
    with pytest.raises((FileExistsError, ValueError), match="created by another process|exists"):
        save_dataset(tiny_dataset, name, overwrite=False)
    assert len(load_dataset(name)) == len(tiny_dataset)
    save_dataset(tiny_dataset, name, overwrite=True)
    assert len(load_dataset(name)) == len(tiny_dataset)


def test_two_collections_into_one_file_leave_one_dataset_and_one_error(tmp_path: Path) -> None:
    both = [tt_process(*COLLECT, "--seed", seed, "--out", tmp_path / "x.npz") for seed in (1, 2)]
    codes = sorted((process.wait(120), process.communicate()[1])[0] for process in both)
    assert codes == [0, 2]
    seed = load_npz(tmp_path / "x.npz").metadata["seed"]
    assert both[0 if seed == 1 else 1].returncode == 0


def test_the_columns_file_of_a_user_is_not_replaced(tt: Run, refused: Refused, tiny_dataset: Dataset) -> None:
    save_npz(tiny_dataset, "x.npz")
    Path("log.csv.columns.yaml").write_text("observations: [mine]\n")
    refused("log.csv.columns.yaml exists already", "data", "convert", "x.npz", "--out", "log.csv")
    assert Path("log.csv.columns.yaml").read_text() == "observations: [mine]\n"
    assert tt("data", "convert", "x.npz", "--out", "log.csv", "--overwrite", "true")[0] == 0
    Path("log.csv").unlink()  # what a kill between the two files leaves
    assert tt("data", "convert", "x.npz", "--out", "log.csv")[0] == 0
    assert len(load_dataset("log.csv")) == len(tiny_dataset)


def test_a_minari_dataset_appears_complete_or_not_at_all(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def fail(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trajectory_transformer.data.sources.minari.description", fail)
    with pytest.raises(KeyboardInterrupt):
        save_dataset(tiny_dataset, "mine/x-v0")
    assert not minari.list_local_datasets()
    monkeypatch.undo()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    save_dataset(tiny_dataset, "mine/x-v0")
    assert list(minari.list_local_datasets()) == ["mine/x-v0"]
    assert minari.load_dataset("mine/x-v0").spec.dataset_id == "mine/x-v0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_collection_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    words = ("collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", "100000", "--workers", "2")
    process = tt_process(*words, "--out", tmp_path / "x.npz", start_new_session=True)
    group = process.pid
    deadline = time.monotonic() + 60
    while len(_members(group)) < 4 and time.monotonic() < deadline:  # with the fork server and the workers
        time.sleep(0.1)
    assert len(_members(group)) >= 4
    os.kill(process.pid, number)
    process.wait(30)
    while _members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = _members(group)
    for each in left:
        os.kill(each, signal.SIGKILL)
    assert not left
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()


def _members(session: int) -> list[int]:
    """Processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_run_folder_belongs_to_one_process_at_a_time(tt: Run, refused: Refused, tiny_dataset: Dataset) -> None:
    save_npz(tiny_dataset, "x.npz")
    assert tt("train", "x.npz", "--out", "run", "--train.steps", "2", *TINY)[0] == 0
    script = (
        "import sys, time; from pathlib import Path; from trajectory_transformer.files import lock_folder\n"
        "lock = lock_folder(Path('run')); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        refused(rf"run: .*process {holder.pid} on ", "train", "--resume", "run", "--device", "cpu")
        holder.kill()
    assert tt("train", "--resume", "run", "--device", "cpu")[0] == 0
    with lock_folder(Path("run")), pytest.raises(FolderInUseError):
        lock_folder(Path("run"))


def test_the_result_of_training_appears_also_after_a_kill_behind_the_last_step(tt: Run, tiny_dataset: Dataset) -> None:
    save_npz(tiny_dataset, "x.npz")
    assert tt("train", "x.npz", "--out", "run", "--train.steps", "3", *TINY)[0] == 0
    before = json.loads(Path("run/training.json").read_text())
    Path("run/training.json").unlink()
    assert tt("train", "--resume", "run", "--device", "cpu")[0] == 0
    after = json.loads(Path("run/training.json").read_text())
    assert after["metrics"]["loss"] == before["metrics"]["loss"] and after["command"] == before["command"]
    Path("run/training.json").unlink()
    Path("run/metrics.jsonl").write_bytes(b"\xff\xfe{[")
    assert tt("train", "--resume", "run", "--device", "cpu")[0] == 0
    assert json.loads(Path("run/training.json").read_text())["metrics"] == {"steps": 0.0}


SEARCH = ("--search.beam_width", "1", "--search.horizon", "1", "--episodes", "1", "--num_envs", "1", "--device", "cpu")


def test_an_evaluation_that_was_killed_does_not_block_the_next(
    tt: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tt(*COLLECT, "--out", "x.npz")[0] == 0
    assert tt("train", "x.npz", "--out", "run", "--train.steps", "2", "--tokens.rewards", "false", *TINY)[0] == 0

    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("trajectory_transformer.cli.evaluate.write_result", fail)
        with pytest.raises(RuntimeError):
            tt("evaluate", "run", "--trace", "plans.npz", *SEARCH)
    assert Path("run/evaluation.npz").exists() and not Path("run/evaluation.json").exists()
    code, text = tt("evaluate", "run", "--trace", "plans.npz", *SEARCH)
    assert code == 0, text
    assert not list(Path("run").glob("*unfinished*"))
    refused("evaluation.json exists already", "evaluate", "run", *SEARCH)
    Path("mine.npz").write_bytes(b"of the user")
    refused("mine.npz exists already", "evaluate", "run", "--out", "mine.json", *SEARCH)
    assert Path("mine.npz").read_bytes() == b"of the user"


BASELINE = ("--algorithm", "bc", "--settings", "{hidden: [4], batch_size: 2}", "--device", "cpu")
PETS = ["--ensemble.num_networks", "2", "--ensemble.num_elites", "1", "--ensemble.width", "4", "--device", "cpu"]
PETS += ["--ensemble.num_layers", "1", "--ensemble.batch_size", "2"]


@pytest.mark.parametrize("command", ["train", "baseline", "pets"])
def test_a_folder_in_use_is_neither_resumed_nor_overwritten(
    tt: Run, refused: Refused, tiny_dataset: Dataset, command: str
) -> None:
    save_npz(tiny_dataset, "x.npz")
    start: dict[str, tuple[str, ...]] = {
        "train": ("train", "x.npz", "--train.steps", "2", *TINY),
        "baseline": ("baseline", "x.npz", "--steps", "2", *BASELINE),
        "pets": ("pets", "x.npz", "--ensemble.epochs", "2", *PETS),
    }
    again = {
        "train": ("train", "--resume", "run", "--device", "cpu"),
        "baseline": ("baseline", "--resume", "run", "--device", "cpu"),
        "pets": (*start["pets"], "--out", "run", "--resume", "true"),
    }
    code, text = tt(*start[command], "--out", "run")
    assert code == 0, text
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert Path("run/lock") not in before
    with lock_folder(Path("run")):
        refused(r"run: in use by process \d+ on .*; wait until it ends, or stop it", *again[command])
        refused(r"run: in use by process", *start[command], "--out", "run", "--overwrite", "true")
        assert {path: path.read_bytes() for path in before} == before
    for words in (again[command], (*start[command], "--out", "run", "--overwrite", "true")):
        code, text = tt(*words)
        assert code == 0, text
    assert not Path("run/lock").exists()


def test_a_fit_of_another_process_is_not_disturbed(refused: Refused, tiny_dataset: Dataset) -> None:
    save_npz(tiny_dataset, "x.npz")
    words = ("pets", "x.npz", "--out", "run", "--ensemble.epochs", 10**9, "--ensemble.patience", 10**9, *PETS)
    first = tt_process(*words)
    try:
        until = time.monotonic() + 60
        while not Path("run/resume.safetensors").is_file() and time.monotonic() < until:
            time.sleep(0.05)
        refused(f"run: in use by process {first.pid} on ", *words, "--resume", "true")
    finally:
        first.kill()
        first.communicate()


def test_a_new_folder_that_another_process_made_meanwhile_is_refused(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "run", resume=False) as mine, OutputFolder(tmp_path / "run", resume=False) as other:
        other.prepare()
        with pytest.raises(FolderInUseError, match="run was created by another process meanwhile"):
            mine.prepare()
    with pytest.raises(ValueError, match="run exists already; choose another folder or pass resume=True"):
        OutputFolder(tmp_path / "run", resume=False)
