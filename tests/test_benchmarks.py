"""The promises that a benchmark script measures: memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_transitions_are_tokenised_and_trained_on_in_two_gibibytes(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    subprocess.run([sys.executable, BENCHMARKS / "memory_mapped.py", "--out", out], check=True)
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["transitions"] == 10_000_000
    assert metrics["peak_mib"] < 2048
