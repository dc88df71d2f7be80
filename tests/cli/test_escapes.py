"""Names that files bring along are text: no markup, no terminal control, no LaTeX, no Markdown, no HTML."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trajectory_transformer.report.tables import results_table, write_tables

Run = Callable[..., tuple[int, str]]

NAMES = ("[/nope]x", "[red]y[/red]", "\x1b[2Jz", ":smile:", r"$\nothing{$", "a\u202eb", "<script>", "c|d`e")


def table(path: Path) -> None:
    rows = ["\t".join(NAMES), *("\t".join(f"{row * column % 7}" for column in range(1, 9)) for row in range(40))]
    path.write_text("\n".join(rows) + "\n")
    names = json.dumps({"observations": list(NAMES[:5]), "actions": list(NAMES[5:])})
    path.with_name(path.name + ".columns.yaml").write_text(names)


def test_names_of_columns_are_shown_as_they_are(tt: Run, tmp_path: Path) -> None:
    table(tmp_path / "x.tsv")
    code, text = tt("data", "show", "x.tsv", "--plot", "x.png", "--tokens.rewards", "false")
    assert code == 0, text
    assert "[/nope]x" in text and "[red]y[/red]" in text and ":smile:" in text
    assert "\x1b" not in text and r"\x1b[2Jz" in text
    assert "\u202e" not in text and Path("x.png").stat().st_size > 1000


def test_paths_in_errors_do_not_control_the_terminal(tt: Run) -> None:
    code, text = tt("data", "show", "\x1b[31m.csv")
    assert code == 2 and "\x1b" not in text and r"\x1b[31m.csv" in text
    code, text = tt("evaluate", "run", "--\x1b[31m")
    assert code == 2 and "\x1b" not in text
    code, text = tt("\x1b[31m")
    assert code == 2 and "\x1b" not in text


def test_warnings_do_not_control_the_terminal(tt: Run, tmp_path: Path) -> None:
    rows = [f"{value}\t{value % 3}" for value in range(200)] + ["1e30\t1"]
    (tmp_path / "x.tsv").write_text("\x1b[31mfar\ta\n" + "\n".join(rows) + "\n")
    (tmp_path / "x.tsv.columns.yaml").write_text(json.dumps({"observations": ["\x1b[31mfar"], "actions": ["a"]}))
    small = ["--model.window", "2", "--model.num_layers", "1", "--model.width", "8", "--train.steps", "1"]
    code, text = tt("train", "x.tsv", "--tokens.rewards", "false", "--out", "run", *small)
    assert code == 0 and "far has the value" in text, text
    assert "\x1b[31m" not in text


def result(path: Path, **changed: object) -> None:
    content = {"name": "x", "command": "tt x", "device": "cpu", "metrics": {"return": 1.0}, **changed}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_markdown_of_result_files_is_escaped(tmp_path: Path) -> None:
    hostile = "a | b ` c\n<img src=x onerror=alert(1)> [x](javascript:y)"
    result(tmp_path / "results" / "a.json", command=hostile, device=hostile, name=hostile)
    lines = results_table(tmp_path / "results").splitlines()
    assert len(lines) == 3
    assert len(re.findall(r"(?<!\\)\|", lines[2])) == 5
    assert "<img" not in lines[2] and lines[2].count("`") == 2
    (tmp_path / "doc.md").write_text("<!-- results -->\n<!-- /results -->\n")
    write_tables(tmp_path / "results", tmp_path / "doc.md")
    assert "<img" not in (tmp_path / "doc.md").read_text()


@pytest.mark.parametrize(
    "changed",
    [{"metrics": 5}, {"metrics": {"return": "x"}}, {"device": 5}, {"command": None}, {"metrics": {"return": None}}],
)
def test_damaged_result_files_are_refused_by_name(tmp_path: Path, changed: dict[str, object]) -> None:
    result(tmp_path / "results" / "a.json", **changed)
    with pytest.raises(ValueError, match=r"a\.json: "):
        results_table(tmp_path / "results")
