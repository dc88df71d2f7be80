"""Kill a command at a file event, run it again, and compare the result with that of an undisturbed run."""

import hashlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.attack.corpus import SEARCH, STEP
from tests.attack.fuzz import remember, remembered_commands
from trajectory_transformer.cli import main
from trajectory_transformer.data.sources import load_dataset

_EVENTS = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move")
SEEDED = ("--env", "Pendulum-v1", "--policy", "random", "--episodes", "2", "--workers", "1", "--seed", "5")


@dataclass(frozen=True)
class Scenario:
    """A command, what it writes, and what to type after a kill; `{}` in words is the corpus."""

    name: str
    words: tuple[str, ...]
    output: str
    again: tuple[str, ...] = ()  # if the output exists
    prepare: str = ""  # a folder of the corpus that the command changes


TRAIN = ("train", "{}/data.npz", "--out", "new", *STEP[2:], "--train.steps", "4", "--checkpoint_every", "2")
BASELINE: tuple[str, ...] = (
    "baseline",
    "{}/data.npz",
    "--out",
    "new",
    "--algorithm",
    "bc",
    "--steps",
    "4",
    "--checkpoint_every",
    "2",
)
BASELINE += ("--settings", "{hidden: [4], batch_size: 2}", "--device", "cpu")
PETS: tuple[str, ...] = (
    "pets",
    "{}/data.npz",
    "--out",
    "new",
    "--device",
    "cpu",
    "--ensemble.epochs",
    "2",
    "--ensemble.width",
    "4",
)
PETS += ("--ensemble.num_networks", "2", "--ensemble.num_elites", "1", "--ensemble.num_layers", "1")
SCENARIOS = (
    Scenario("npz", ("collect", *SEEDED, "--out", "x.npz"), "x.npz"),
    Scenario("hdf5", ("data", "convert", "{}/data.npz", "--out", "x.hdf5"), "x.hdf5"),
    Scenario("parquet", ("data", "convert", "{}/data.npz", "--out", "x.parquet"), "x.parquet"),
    Scenario("csv", ("data", "convert", "{}/data.npz", "--out", "x.csv"), "x.csv"),
    Scenario("minari", ("data", "convert", "{}/data.npz", "--out", "killed/x-v0"), "killed/x-v0"),
    Scenario("train", TRAIN, "new", again=("train", "--resume", "new", "--device", "cpu")),
    Scenario("shards", (*TRAIN, "--shards", "tokens"), "new", again=("train", "--resume", "new", "--device", "cpu")),
    Scenario("evaluate", ("evaluate", "run", *SEARCH), "run/evaluation.json", prepare="run"),
    Scenario(
        "resume",
        ("train", "--resume", "stopped", "--device", "cpu"),
        "stopped",
        again=("train", "--resume", "stopped", "--device", "cpu"),
        prepare="stopped",
    ),
    Scenario("baseline", BASELINE, "new", again=("baseline", "--resume", "new", "--device", "cpu")),
    Scenario("pets", PETS, "new", again=(*PETS, "--resume", "true")),
    Scenario("import", ("import", "{}/state_1.pt", "--dataset", "{}/five.npz", "--out", "new"), "new"),
)


def run_child(words: list[str], folder: Path, kill_at: int | None = None) -> tuple[int, int]:
    """Run a command in a fork; its exit code (negative: a signal), and the file events it caused."""
    remember(words)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        become(words, folder, kill_at, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, int(text or 0)


def become(words: list[str], folder: Path, kill_at: int | None, write: int) -> None:
    """The child: count file events, and die at one of them."""
    seen = 0
    place = str(folder)

    def watch(event: str, given: tuple[object, ...]) -> None:
        nonlocal seen
        is_write = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not is_write and event not in _EVENTS:
            return
        path = os.path.abspath(os.fsdecode(given[0])) if isinstance(given[0], str | bytes | os.PathLike) else ""  # noqa: PTH100
        if not path.startswith(place):
            return
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(folder)
    sys.addaudithook(watch)
    try:
        with remembered_commands():
            code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 99
    os.write(write, str(seen).encode())
    os._exit(code)


def fingerprint(scenario: Scenario, folder: Path) -> str | None:
    """What the result of a command amounts to, without times; None if there is none."""
    path = folder / scenario.output
    if scenario.output.endswith(".json"):
        if not path.is_file():
            return None
        metrics = json.loads(path.read_text())["metrics"]
        kept = {name: value for name, value in metrics.items() if not name.startswith("plan_ms")}
        return json.dumps(kept, sort_keys=True) + _dataset_digest(str(path.with_suffix(".npz")))
    if scenario.output in ("new", "stopped"):
        if not (path / "weights.safetensors").is_file():
            return None
        state = (
            json.loads((path / "training.json").read_text())["metrics"] if (path / "training.json").is_file() else {}
        )
        weights = sorted(path.rglob("weights.safetensors"))  # with that of the policy of `tt pets`
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in weights)).hexdigest()
        return f"{digest} {state.get('loss')}"
    if scenario.name == "minari":
        local = Path(os.environ["MINARI_DATASETS_PATH"]) / scenario.output
        return _dataset_digest(scenario.output) if local.exists() else None
    return _dataset_digest(str(path)) if path.exists() else None


def _dataset_digest(name: str) -> str:
    digest = hashlib.sha256()
    for episode in load_dataset(name):
        digest.update(f"{len(episode)} {episode.terminated}".encode())
        for part in (episode.observations, episode.actions, episode.rewards):
            digest.update(b"" if part is None else part.tobytes())
    return digest.hexdigest()


class Killing:
    """One scenario in a folder of its own."""

    def __init__(self, scenario: Scenario, corpus: Path, folder: Path) -> None:
        """Run it once undisturbed."""
        self.scenario = scenario
        self.corpus = corpus
        self.folder = folder
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
        self._start()
        code, self.num_events = run_child(self._words(scenario.words), folder)
        assert code == 0, f"{scenario.name}: the undisturbed run ends with {code}"
        self.expected = fingerprint(scenario, folder)
        assert self.expected is not None

    def _start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.scenario.prepare:
            shutil.copytree(self.corpus / self.scenario.prepare, self.folder / self.scenario.prepare)
            for name in ("evaluation.json", "evaluation.npz"):
                (self.folder / self.scenario.prepare / name).unlink(missing_ok=True)

    def _words(self, words: tuple[str, ...]) -> list[str]:
        return [word.replace("{}", str(self.corpus)) for word in words]

    def kill(self, event: int) -> str:
        """Kill at an event and run again: `identical`, or what went wrong."""
        os.environ["MINARI_DATASETS_PATH"] = str(self.folder / "minari")
        scenario = self.scenario
        self._start()
        code, _ = run_child(self._words(scenario.words), self.folder, kill_at=event)
        if code != -signal.SIGKILL:
            return f"event {event} did not come: exit code {code}"
        try:
            fingerprint(scenario, self.folder)  # complete or absent
        except Exception as error:
            return f"event {event}: the result cannot be read: {error}"
        resumes = scenario.again and (self.folder / scenario.output).exists()
        code, _ = run_child(self._words(scenario.again if resumes else scenario.words), self.folder)
        found = fingerprint(scenario, self.folder)
        if found != self.expected:
            return f"event {event}: exit code {code}, another result after the second run: {found}"
        return "identical"
