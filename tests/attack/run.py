"""`make attack`: kills at every file event, mutation fuzzing, pairs of processes and a soak, in pieces that resume.

    python -m tests.attack.run --minutes 60 --state build/attack-state.json --out results/reliability/attack.json

Every piece is a function of the seed. Finished pieces are remembered in the state file, so that the attack can be
stopped at any moment and continued; the result file holds what was done so far. A finding is printed at once, with
its number; what it does after a fix, and then everything of that kind again, in place of what was found before:

    python -m tests.attack.run --only 'fuzz minari data' --first 250
    python -m tests.attack.run --only 'fuzz minari data' --again
"""

import argparse
import json
import os
import re
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.attack.corpus import TARGETS, Target, build_corpus, small_dataset
from tests.attack.fuzz import Outcome, attack, damaged, outcomes_in_forks
from tests.attack.kills import SCENARIOS, Killing, Scenario
from tests.attack.pairs import PAIRS, run_pair
from trajectory_transformer.cli import main
from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig
from trajectory_transformer.files import write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.results import COMMIT, source_commit, write_result

SEED = 7
BLOCK = 100  # mutations of a piece
ROUNDS = 2  # kills at every event
METRICS = ("kills", "runs", "identical", "fuzzed", "raw", "silent", "hangs", "pairs", "soak_acts", "soak_mib")
SOAK_ACTS, SOAKS = 5000, 4


class Attack:
    """The corpus in a temporary folder, and what was counted and found so far."""

    def __init__(self, folder: Path, seed: int = SEED) -> None:
        """Build the corpus."""
        self.corpus, self.copy, self.elsewhere = folder / "corpus", folder / "copy", folder / "elsewhere"
        self.corpus.mkdir(parents=True)
        self.elsewhere.mkdir()
        os.environ["MINARI_DATASETS_PATH"] = str(self.corpus / "minari")
        build_corpus(self.corpus, main)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self._expected: dict[str, str] = {}

    def fuzz(self, target_index: int, first: int, count: int) -> None:
        """Mutations first, first + 1, ... of a target."""
        target = TARGETS[target_index]
        os.environ["MINARI_DATASETS_PATH"] = str(self.copy / "minari")
        content = (self.corpus / target.file).read_bytes()
        if target.name not in self._expected:
            self._expected[target.name] = attack(target, self.corpus, self.copy, content, main).text

        def outcome(number: int) -> Outcome:
            copy = damaged(target, content, np.random.default_rng([self.seed, target_index, number]))
            return attack(target, self.corpus, self.copy, copy, main, self._expected[target.name])

        for number, found in outcomes_in_forks(outcome, range(first, first + count), self.elsewhere):
            self.counts["fuzzed"] += 1
            if found.kind in ("raw", "silent", "hang"):
                self.counts["hangs" if found.kind == "hang" else found.kind] += 1
                text = re.sub(r"/\S*/", "", found.text)  # without the folders of this machine
                self._find(f"{target.name}, seed {self.seed}, mutation {number}: {found.kind}: {text[-500:]}")

    def _find(self, finding: str) -> None:
        self.findings.append(finding)
        print(finding, flush=True)

    def kill(self, index: int, first: int = 1, every: int = 1) -> None:
        """Kill a scenario at every file event, or at some of them."""
        killing = Killing(SCENARIOS[index], self.corpus, self.copy)
        for event in range(first, killing.num_events + 1, every):
            found = killing.kill(event)
            self.counts["kills"] += 1
            self.counts["runs"] += 1
            self.counts["identical"] += found == "identical"
            if found != "identical":
                self._find(f"{killing.scenario.name}: {found}")

    def pair(self, index: int) -> None:
        """Two processes at once."""
        found = run_pair(PAIRS[index], self.corpus, self.copy)
        self.counts["pairs"] += 1
        if found != "identical":
            self.counts["raw"] += 1
            self._find(f"pair {found}")

    def soak(self, acts: int) -> None:
        """Plan for a long time: memory must not grow."""
        sizes, tokens = ModelConfig(window=2, num_layers=1, num_heads=1, width=8), TokenConfig(num_bins=5)
        model = TrajectoryModel.create(small_dataset(), tokens, sizes, seed=0)
        planner = Planner(model, search=SearchConfig(beam_width=2, horizon=2, context=1))
        for _ in range(100):
            planner.act(np.zeros(3, np.float32), reward=0.0)
        before = _resident()
        for index in range(acts):
            planner.act(np.full(3, np.sin(index), np.float32), reward=0.0)
        grown = (_resident() - before) / 2**20
        self.counts["soak_acts"] += acts
        self.counts["soak_mib"] = max(self.counts["soak_mib"], round(grown))
        if grown > 32:
            self._find(f"soak: {acts} calls of act took {grown:.0f} MiB")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(frozen=True)
class Piece:
    """A part of the attack: its kind, what it attacks, and which block of it."""

    kind: str
    index: int
    block: int

    @property
    def name(self) -> str:
        """What is attacked, for example `fuzz npz`."""
        names: dict[str, Sequence[Target | Scenario]] = {"fuzz": TARGETS, "kill": SCENARIOS, "pair": PAIRS}
        return f"{self.kind} {names[self.kind][self.index].name}" if self.kind in names else self.kind

    def run(self, attack: Attack) -> dict[str, Any]:
        """Attack: what was counted and found, how long it took, and which commit it was."""
        attack.counts, attack.findings, began = Counter(), [], time.perf_counter()
        if self.kind == "kill":
            attack.kill(self.index)
        elif self.kind == "pair":
            attack.pair(self.index)
        elif self.kind == "soak":
            attack.soak(SOAK_ACTS)
        else:
            attack.fuzz(self.index, self.block * BLOCK, BLOCK)
        seconds = time.perf_counter() - began
        return {
            "counts": dict(attack.counts),
            "findings": attack.findings,
            "seconds": seconds,
            "commit": os.environ[COMMIT],
        }


def pieces() -> list[Piece]:
    """All pieces, spread, so that a part of the attack has something of everything."""
    found: list[tuple[float, Piece]] = []

    def spread(kind: str, index: int, count: int) -> None:
        found.extend(((block + 0.5) / count, Piece(kind, index, block)) for block in range(count))

    for index, target in enumerate(TARGETS):
        spread("fuzz", index, target.blocks)
    for index in range(len(SCENARIOS)):
        spread("kill", index, ROUNDS)
    for index in range(len(PAIRS)):
        spread("pair", index, 5)
    spread("soak", 0, SOAKS)
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


class State:
    """What every finished piece counted and found; a piece that is attacked again replaces what it had found."""

    def __init__(self, path: Path, seed: int) -> None:
        """Read what there is."""
        self.path = path
        stored = json.loads(path.read_text()) if path.is_file() else {}
        self.records: dict[str, dict[str, Any]] = stored.get("records", {})
        if stored.get("seed", seed) != seed:
            raise SystemExit(f"{path} was attacked with the seed {stored['seed']}, not {seed}")
        self.seed = seed

    def add(self, piece: Piece, record: dict[str, Any]) -> None:
        """Remember a finished piece."""
        self.records[f"{piece.name} {piece.block}"] = record
        write_atomically(self.path, json.dumps({"seed": self.seed, "records": self.records}).encode())

    def left(self, names: Sequence[str], *, again: bool) -> list[Piece]:
        """The pieces to do: of these names (none: all), those that are not done or, with `again`, all."""
        asked = [piece for piece in pieces() if not names or piece.name in names]
        return [piece for piece in asked if again or f"{piece.name} {piece.block}" not in self.records]

    def write(self, path: Path) -> None:
        """Write the table of all that is done."""
        planned = [f"{piece.name} {piece.block}" for piece in pieces()]
        done = [self.records[name] for name in planned if name in self.records]
        counts: Counter[str] = Counter()
        for record in done:
            counts.update(record["counts"])
        most = max((record["counts"].get("soak_mib", 0) for record in done), default=0)
        metrics = {name: counts[name] for name in METRICS} | {"soak_mib": most, "share_done": len(done) / len(planned)}
        write_result(
            path,
            name="attack",
            command="make attack",
            device=torch.device("cpu"),
            seeds=[self.seed],
            seconds=sum(record["seconds"] for record in done),
            metrics=metrics,
            details={
                "findings": [finding for record in done for finding in record["findings"]],
                "pieces_by_commit": Counter(record["commit"] for record in done),
            },
        )
        print(f"{len(done)} of {len(planned)} pieces done, {json.dumps(metrics)}; wrote {path}", flush=True)


def main_attack() -> None:
    """Run pieces until the time is over or all are done."""
    parser = argparse.ArgumentParser(description="Attack readers and writers.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--state", type=Path, default=Path("build/attack-state.json"))
    parser.add_argument("--out", type=Path, default=Path("results/reliability/attack.json"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="+", default=[], help="for example: 'fuzz npz' 'kill train'")
    parser.add_argument("--again", action="store_true", help="replace what is stored, for example after a fix")
    parser.add_argument("--first", type=int, help="only print what --count mutations from this one on do")
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    unknown = set(options.only) - {piece.name for piece in pieces()}
    if unknown:
        raise SystemExit(f"--only must name pieces of the attack, got {sorted(unknown)}")
    os.environ[COMMIT] = source_commit()  # of what was loaded: the files may change meanwhile
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        attack = Attack(Path(folder), options.seed)
        if options.first is not None:
            for index in sorted({piece.index for piece in pieces() if piece.name in options.only}):
                attack.fuzz(index, options.first, options.count)
            print(dict(attack.counts))
            return
        state = State(options.state, options.seed)
        for done, piece in enumerate(state.left(options.only, again=options.again)):
            if time.perf_counter() - started > 60 * options.minutes:
                break
            state.add(piece, piece.run(attack))
            if done % 50 == 0:
                state.write(options.out)
        state.write(options.out)


if __name__ == "__main__":
    main_attack()
