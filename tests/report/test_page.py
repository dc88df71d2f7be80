"""The report page of a run shows its metrics and its settings as the command line has them."""

import json
from pathlib import Path

from PIL import Image

from trajectory_transformer.config import dotted
from trajectory_transformer.report.page import write_report


def test_settings_are_shown_as_flags(tmp_path: Path) -> None:
    nested = {"window": None, "action": {"nucleus": 0.4, "top_k": None}, "backend": "auto"}
    assert dotted(nested) == {"window": None, "action.nucleus": 0.4, "action.top_k": None, "backend": "auto"}
    description = {"tokens": {"goal_dims": [0, 1]}, "model": {"width": 8}, "metadata": {"env": "<Rooms>"}}
    (tmp_path / "checkpoint.json").write_text(json.dumps(description))
    result = {
        "command": "tt evaluate x",
        "commit": "abc",
        "device": "abacus",
        "seconds": 2.0,
        "metrics": {"success_rate": 0.5, "success_rate_stderr": 0.1, "success_rate_n": 4},
        "settings": {"search": nested},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    Image.new("RGB", (2, 2)).save(tmp_path / "routes.png")
    page = write_report(tmp_path, place="in four rooms", pictures=["routes.png"]).read_text()
    for row in (("action.nucleus", "0.4"), ("action.top_k", "null"), ("backend", "auto"), ("goal_dims", "[0, 1]")):
        assert f"<tr><td>{row[0]}</td><td>{row[1]}</td></tr>" in page
    assert "&lt;Rooms&gt;" in page and "<Rooms>" not in page
    assert "2 of 4 goals reached" in page
