"""Tables from result files, and the tables in the documents of this repository."""

import json
from pathlib import Path

import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.report.tables import BEGIN, END, results_table, write_tables

ROOT = Path(__file__).parent.parent.parent


def test_rows_show_known_metrics_with_standard_errors(tmp_path: Path) -> None:
    (tmp_path / "results/a").mkdir(parents=True)
    content = {
        "device": "abacus",
        "command": "tt x",
        "metrics": {"return": -1234.5, "return_stderr": 123.4, "success_rate": 0.5, "steps": 3},
    }
    (tmp_path / "results/a/b.json").write_text(json.dumps(content))
    row = results_table(tmp_path / "results").splitlines()[-1]
    assert row == "| [a/b](results/a/b.json) | goals reached 0.5, return -1,234 ± 120 | abacus | `tt x` |"


def test_only_text_between_markers_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_tables(tmp_path / "results", document)
    assert document.read_text().startswith(f"before\n{BEGIN}\n| result |")
    assert document.read_text().endswith(f"{END}\nafter\n")
    assert "old" not in document.read_text()
    document.write_text("no markers")
    with pytest.raises(ValueError, match=r"doc\.md: no markers found; put <!-- results -->"):
        write_tables(tmp_path / "results", document)


def result(path: Path, score: float) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"normalized_score": score, "normalized_score_stderr": 1.5, "seconds_train": 600}
    path.write_text(json.dumps({"device": "abacus", "command": "tt x", "metrics": metrics}))


def test_markers_select_results_and_links_are_relative_to_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result(tmp_path / "results/paper/hopper.json", 101.25)
    result(tmp_path / "results/speed/train.json", 7.0)
    result(tmp_path / "results/speed/plan.json", 9.0)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"all\n{BEGIN}\n{END}\n")
    (tmp_path / "docs/reproduce.md").write_text(
        f"scores\n<!-- results paper -->\nold\n{END}\nspeed\n<!-- results speed -->\n{END}\n"
    )
    (tmp_path / "docs/best.md").write_text(f"<!-- results speed/train paper -->\n{END}\n")
    (tmp_path / "docs/other.md").write_text("no table")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "results"]) == 0
    row = "| normalised score 101 ± 1.5, training (s) 600 | abacus | `tt x` |"
    readme, document = (tmp_path / "README.md").read_text(), (tmp_path / "docs/reproduce.md").read_text()
    assert f"| [paper/hopper](results/paper/hopper.json) {row}" in readme and "[speed/train]" in readme
    scores, speed = document.split("speed\n<!--")
    assert f"| [paper/hopper](../results/paper/hopper.json) {row}" in scores
    assert "[speed/train]" not in scores and "[speed/train](../results/speed/train.json)" in speed
    assert "paper/hopper" not in speed and "old" not in document
    best = (tmp_path / "docs/best.md").read_text()
    assert best.index("[speed/train]") < best.index("[paper/hopper]") and "[speed/plan]" not in best
    assert (tmp_path / "docs/other.md").read_text() == "no table"

    (tmp_path / "docs/reproduce.md").write_text(f"<!-- results none -->\n{END}\n")
    assert main(["report", "results"]) == 2
    assert "a marker names the results none, but" in capsys.readouterr().err
    assert main(["report", "results", "--into", "[]"]) == 0
    assert row in capsys.readouterr().out


def test_short_tables_compare_scores_with_the_expert_or_another_result(tmp_path: Path) -> None:
    def write(place: str, metrics: dict[str, float], **others: object) -> None:
        path = tmp_path / f"results/{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"device": "abacus", "command": "tt x", "metrics": metrics, **others}))

    # Hopper's scale goes from -20.272305 to 3234.3, so its middle is at 1607.013848.
    hopper = {"normalized_score": 101.25, "normalized_score_stderr": 1.5, "normalized_score_n": 15}
    write(
        "paper/hopper",
        {**hopper, "expert_return": 1607.013848},
        name="paper hopper-medium return",
        settings={"env": "Hopper-v5"},
    )
    goals = {"success_rate": 0.984, "success_rate_stderr": 0.0056, "success_rate_n": 500}
    write("grid/ours", goals, name="evaluate Grid-v0 goal")
    write("grid/expert", {"success_rate": 1.0, "success_rate_stderr": 0.0, "success_rate_n": 9}, name="collect grid")
    cell = {"normalized_score": 96.04, "normalized_score_stderr": 2.98, "normalized_score_episodes": 45}
    write("table/hopper", {**cell, "normalized_score_seeds": 3, "best_policy_noisy_score": 41.1}, name="table hopper")
    document = tmp_path / "README.md"
    parts = "paper/hopper grid/ours=grid/expert grid/ours table/hopper"
    document.write_text(f"<!-- scores {parts} -->\nold\n<!-- /scores -->\n")
    write_tables(tmp_path / "results", document)
    assert document.read_text().splitlines()[3:] == [
        "| hopper-medium return | 101 ± 1.5 | 50 (expert) | 15 | [paper/hopper](results/paper/hopper.json) |",
        "| Grid-v0 goal | 98.4 ± 0.56 % | 100 % | 500 | [grid/ours](results/grid/ours.json) |",
        "| Grid-v0 goal | 98.4 ± 0.56 % |  | 500 | [grid/ours](results/grid/ours.json) |",
        "| hopper | 96 ± 3 | 41.1 (best policy) | 45 | [table/hopper](results/table/hopper.json) |",
        "<!-- /scores -->",
    ]


@pytest.mark.parametrize(
    ("content", "message"), [('{"a": 1}', "not a result file"), ("{", "not valid JSON; the file may be truncated")]
)
def test_files_that_are_no_results_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/x.json").write_text(content)
    assert main(["report", str(tmp_path / "results"), "--into", "[]"]) == 2
    assert f"results/x.json: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "docs/reproduce.md"])
def test_tables_in_documents_are_up_to_date(tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text((ROOT / name).read_text())
    (tmp_path / "results").symlink_to(ROOT / "results")
    write_tables(tmp_path / "results", copy)
    assert copy.read_text() == (ROOT / name).read_text()
