"""`tt report`, and the pages that other commands write."""

import re
from collections.abc import Callable
from pathlib import Path


def test_commands_write_the_page(tt: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    small = ["--model.window", "2", "--model.num_layers", "1", "--model.num_heads", "1", "--model.width", "8"]
    small += ["--tokens.num_bins", "8", "--tokens.goal_dims", "[0,1]", "--tokens.rewards", "false"]
    assert tt("collect", "--episodes", 6, "--out", "rooms.npz")[0] == 0
    assert tt("train", "rooms.npz", "--out", "a", *small, "--train.steps", 3, "--train.batch_size", 4)[0] == 0
    assert "Not evaluated yet" in (tmp_path / "a/report.html").read_text()
    code, text = tt("evaluate", "a", "--episodes", 2, "--search.beam_width", 2, "--search.horizon", 1)
    assert code == 0 and "wrote a/report.html" in text
    assert "of 2 goals reached" in (tmp_path / "a/report.html").read_text()
    (tmp_path / "a/report.html").unlink()
    code, text = tt("report", "a", "--held_out", "rooms.npz")
    assert code == 0, text
    assert "held-out episodes" in (tmp_path / "a/report.html").read_text()
    assert tt("train", "rooms.npz", "--out", "b", *small, "--train.steps", 5, "--train.batch_size", 4)[0] == 0
    code, text = tt("report", "a", "b")
    assert code == 0 and "wrote a/compared-with-b.html" in text
    assert re.search("<td>train.steps</td><td>3</td><td>5</td>", (tmp_path / "a/compared-with-b.html").read_text())
    code, text = tt("report", "a", "rooms.npz")
    assert code == 2 and "rooms.npz: not a run folder" in text
    code, text = tt("report", "a", "--into", "[x.md]")
    assert code == 2 and "--into is for tables" in text
