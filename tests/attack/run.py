"""`make attack`: kills at every file event, mutation fuzzing, pairs of processes and a soak, in pieces that resume.

    python -m tests.attack.run --minutes 60 --state build/attack-state.json --out results/reliability/attack.json

Every piece is a function of the seed. Finished pieces are remembered in the state file, so that the attack can be
stopped at any moment and continued; the result file holds what was done so far.
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tests.attack.corpus import TARGETS, build_corpus, small_dataset
from tests.attack.fuzz import Outcome, attack, damaged, outcomes_in_forks
from tests.attack.kills import SCENARIOS, Killing
from tests.attack.pairs import PAIRS, run_pair
from trajectory_transformer.cli import main
from trajectory_transformer.config import ModelConfig, SearchConfig, TokenConfig
from trajectory_transformer.files import write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.results import write_result

SEED = 7
BLOCK = 100  # mutations of a piece
BLOCKS = 64  # pieces of each target
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


def pieces() -> Iterator[tuple[str, int, int]]:
    """All pieces: their kind, what they attack, and their block."""
    for block in range(BLOCKS):
        if block < ROUNDS * len(SCENARIOS):  # spread, so that a part of the attack has something of everything
            yield "kill", block % len(SCENARIOS), block // len(SCENARIOS)
        if block < 5:
            yield from (("pair", index, block) for index in range(len(PAIRS)))
        yield from (("fuzz", index, block) for index, target in enumerate(TARGETS) if block % target.every == 0)
    yield from (("soak", 0, block) for block in range(SOAKS))


def main_attack() -> None:
    """Run pieces until the time is over or all are done."""
    parser = argparse.ArgumentParser(description="Attack readers and writers.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--state", type=Path, default=Path("build/attack-state.json"))
    parser.add_argument("--out", type=Path, default=Path("results/reliability/attack.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stored = json.loads(options.state.read_text()) if options.state.is_file() else {}
    state = {"done": [], "counts": {}, "findings": [], "seconds": 0.0, **stored}
    started = time.perf_counter()
    left = [piece for piece in pieces() if list(piece) not in state["done"]]
    with tempfile.TemporaryDirectory() as folder:
        attacked = Attack(Path(folder))
        for kind, index, block in left:
            if time.perf_counter() - started > 60 * options.minutes:
                break
            attacked.counts, attacked.findings, began = Counter(state["counts"]), [], time.perf_counter()
            if kind == "kill":
                attacked.kill(index)
            elif kind == "pair":
                attacked.pair(index)
            elif kind == "soak":
                attacked.soak(SOAK_ACTS)
            else:
                attacked.fuzz(index, block * BLOCK, BLOCK)
            state["done"].append([kind, index, block])
            state["counts"] = dict(attacked.counts)
            state["findings"] += attacked.findings
            state["seconds"] += time.perf_counter() - began
            write_atomically(options.state, json.dumps(state).encode())
            for finding in attacked.findings:
                print(finding)
    total = len(list(pieces()))
    write_result(
        options.out,
        name="attack",
        command="make attack",
        device=torch.device("cpu"),
        seeds=[SEED],
        seconds=state["seconds"],
        metrics={name: state["counts"].get(name, 0) for name in METRICS} | {"share_done": len(state["done"]) / total},
        details={"findings": state["findings"]},
    )
    print(f"{len(state['done'])} of {total} pieces done; wrote {options.out}")


if __name__ == "__main__":
    main_attack()
