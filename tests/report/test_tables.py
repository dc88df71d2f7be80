"""Tables from result files; the README's is the one they give."""

import json
from pathlib import Path

import pytest

from trajectory_transformer.report.tables import BEGIN, END, results_table, write_tables

ROOT = Path(__file__).parent.parent.parent


def test_a_row_shows_known_metrics_with_their_spread(tmp_path: Path) -> None:
    (tmp_path / "results/a").mkdir(parents=True)
    content = {
        "device": "abacus",
        "command": "tt x",
        "metrics": {"return": -1234.5, "return_stderr": 12.3, "success_rate": 0.5, "steps": 3},
    }
    (tmp_path / "results/a/b.json").write_text(json.dumps(content))
    row = results_table(tmp_path / "results").splitlines()[-1]
    assert row == "| [a/b](results/a/b.json) | goals reached 0.5, return -1,234 ± 12 | abacus | `tt x` |"


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_tables(tmp_path / "results", document)
    assert document.read_text().startswith(f"before\n{BEGIN}\n| what |")
    assert document.read_text().endswith(f"{END}\nafter\n")
    assert "old" not in document.read_text()
    document.write_text("no marks")
    with pytest.raises(ValueError, match=r"doc\.md: a document needs the marks"):
        write_tables(tmp_path / "results", document)


def test_the_readme_shows_the_results_as_they_are() -> None:
    assert results_table(ROOT / "results") in (ROOT / "README.md").read_text()
