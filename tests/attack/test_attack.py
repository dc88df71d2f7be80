"""The attack in short: some kills, some mutations of every format, pairs of processes; `make attack` does all of it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.attack.corpus import TARGETS
from tests.attack.fuzz import Outcome, attack, outcomes_in_forks
from tests.attack.kills import SCENARIOS
from tests.attack.pairs import PAIRS
from tests.attack.run import BLOCK, Attack, State, pieces
from trajectory_transformer.cli import main

pytestmark = [
    pytest.mark.attack,
    pytest.mark.filterwarnings("ignore"),  # damaged numbers overflow
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attack:
    """The corpus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", "")
        return Attack(tmp_path_factory.mktemp("attack"))


@pytest.fixture(autouse=True)
def fresh(attacked: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", "")
    attacked.findings.clear()


def test_damaged_files_are_refused_by_name(attacked: Attack) -> None:
    for index in range(len(TARGETS)):
        attacked.fuzz(index, 1000, 1)
    assert attacked.findings == []
    assert attacked.counts["fuzzed"] == len(TARGETS)


def test_a_hang_in_c_and_a_crash_are_found_and_the_attack_goes_on(tmp_path: Path) -> None:
    def outcome(number: int) -> Outcome:
        if number == 3:
            # A signal handler of Python does not run while a library in C is called.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(60)
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does to one that takes all memory
        Path("written").touch()
        return Outcome("refused", str(number))

    found = dict(outcomes_in_forks(outcome, range(2, 8), tmp_path, kill_seconds=0.5))
    assert [outcome.kind for outcome in found.values()] == ["refused", "hang", "refused", "raw", "refused", "refused"]
    assert found[5].text == f"the process ended with {-signal.SIGKILL}"
    assert found[7].text == "7"
    assert (tmp_path / "written").is_file()


WRONG_KIND = ("policy", "actor")  # files of another kind, which are always refused


def test_whole_files_are_accepted(attacked: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in TARGETS:
        content = (attacked.corpus / target.file).read_bytes()
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(attacked.copy / "minari"))
        found = attack(target, attacked.corpus, attacked.copy, content, main)
        assert found.kind == ("refused" if target.name in WRONG_KIND else "unharmed"), (target.name, found.text)


@pytest.mark.parametrize(("name", "count"), [("zip", 8), ("zip data", 8), ("zip weights", 4), ("noisy actor", 20)])
def test_damaged_policies_are_refused_or_act(attacked: Attack, name: str, count: int) -> None:
    attacked.fuzz([target.name for target in TARGETS].index(name), 2000, count)
    assert attacked.findings == []


FOUND = [
    ("parquet", 843),
    ("parquet", 873),
    ("npz", 1056),
    ("npz", 3329),
    ("npz", 5109),
    ("ogbench", 1401),
    ("minari data", 250),
    ("minari data", 1810),
]


@pytest.mark.parametrize(("name", "number"), FOUND)
def test_what_the_attack_found_once_is_not_found_again(attacked: Attack, name: str, number: int) -> None:
    attacked.fuzz([target.name for target in TARGETS].index(name), number, 1)
    assert attacked.findings == []


@pytest.mark.parametrize("name", ["npz", "csv", "minari", "evaluate", "resume", "pets"])
def test_a_command_killed_at_a_file_event_gives_the_same_result_when_run_again(attacked: Attack, name: str) -> None:
    index = [scenario.name for scenario in SCENARIOS].index(name)
    before = attacked.counts["kills"]
    attacked.kill(index, first=2, every=16)
    assert attacked.findings == []
    assert attacked.counts["kills"] > before


@pytest.mark.parametrize("index", [0, 3, 5])
def test_two_processes_do_not_harm_each_other(attacked: Attack, index: int) -> None:
    attacked.pair(index)
    assert attacked.findings == [], PAIRS[index].name


def test_planning_for_a_long_time_takes_no_more_memory(attacked: Attack, tmp_path: Path) -> None:
    attacked.soak(50)
    assert attacked.findings == []


def test_a_piece_that_is_attacked_again_replaces_what_it_found(tmp_path: Path) -> None:
    first, second = [piece for piece in pieces() if piece.name == "fuzz npz"][:2]
    state = State(tmp_path / "state.json", seed=7)
    clean = {"counts": {"fuzzed": 100}, "findings": [], "seconds": 1.0, "commit": "b"}
    found = clean | {"counts": {"fuzzed": 100, "raw": 1}, "findings": ["npz, mutation 5"], "commit": "a"}
    state.add(first, found)
    state.add(second, clean | {"commit": "a"})
    assert len(state.left(["fuzz npz"], again=False)) == len(state.left(["fuzz npz"], again=True)) - 2
    state.write(tmp_path / "before.json")
    state = State(tmp_path / "state.json", seed=7)  # as another process reads it
    state.add(first, clean)
    state.write(tmp_path / "after.json")
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after"))
    assert (before["metrics"]["fuzzed"], before["metrics"]["raw"], before["findings"]) == (200, 1, found["findings"])
    assert (after["metrics"]["fuzzed"], after["metrics"]["raw"], after["findings"]) == (200, 0, [])
    assert after["pieces_by_commit"] == {"a": 1, "b": 1}
    with pytest.raises(SystemExit, match="seed 7, not 8"):
        State(tmp_path / "state.json", seed=8)


def test_the_whole_attack_is_large_enough() -> None:
    planned = pieces()
    assert sum(piece.kind == "fuzz" for piece in planned) * BLOCK >= 200_000
    assert len(set(planned)) == len(planned)
