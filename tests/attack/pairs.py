"""Two processes with the same command and the same target at the same moment."""

import os
import shutil
from pathlib import Path

from tests.attack.kills import SCENARIOS, TRAIN, Scenario, become, fingerprint

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
PAIRS = (
    _BY_NAME["npz"],
    _BY_NAME["csv"],
    _BY_NAME["minari"],
    Scenario("train", TRAIN, "new"),
    _BY_NAME["resume"],
    _BY_NAME["evaluate"],
)


def run_pair(scenario: Scenario, corpus: Path, folder: Path) -> str:
    """`identical` if one process made the result and each ended with exit code 0 or 2, else what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    if scenario.prepare:
        shutil.copytree(corpus / scenario.prepare, folder / scenario.prepare)
        for name in ("evaluation.json", "evaluation.npz"):
            (folder / scenario.prepare / name).unlink(missing_ok=True)
    words = [word.replace("{}", str(corpus)) for word in scenario.words]
    children = []
    for _ in range(2):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            become(words, folder, None, write)
        os.close(write)
        children.append((child, read))
    codes = []
    for child, read in children:
        with os.fdopen(read) as pipe:
            pipe.read()
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        found = fingerprint(scenario, folder)
    except Exception as error:
        return f"{scenario.name}: exit codes {codes}, the result cannot be read: {error}"
    # Both succeed where the second came after the first had finished its part.
    if not set(codes) <= {0, 2} or 0 not in codes or found is None:
        return f"{scenario.name}: exit codes {codes}, result {found}"
    return "identical"
