"""The picture of scores over training, from result files."""

import json
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.cli import main
from trajectory_transformer.report.curves import curves, curves_figure


def write(folder: Path, group: str, name: str, **content: object) -> None:
    path = folder / group / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    errors = {"normalized_score_stderr": 0.0, "normalized_score_stderr_episodes": 0.0}
    metrics = {"normalized_score": 50.0, **errors}
    path.write_text(json.dumps({"metrics": metrics, "device": "x", "command": "y", **content}))


def results(folder: Path) -> Path:
    points = [{"step": 5, "scores": [1.0, 3.0]}, {"step": 20, "scores": [4.0, 8.0]}]
    write(folder, "baselines", "hopper-medium_dt", curve=points)
    write(folder, "baselines", "walker2d-medium_bc", curve=[{"step": 7, "scores": [2.0]}])
    write(folder, "baselines", "walker2d-medium_iql")  # no curve
    write(folder, "locomotion", "hopper-medium_quantile")
    return folder


def test_curves_are_read_by_task_and_method(tmp_path: Path) -> None:
    assert curves(results(tmp_path)) == {
        "hopper-medium": {"DT": [(5, [1.0, 3.0]), (20, [4.0, 8.0])]},
        "walker2d-medium": {"BC": [(7, [2.0])]},
    }
    with pytest.raises(ValueError, match="no curves of baselines"):
        curves_figure(tmp_path / "nothing")


def test_lines_are_means_over_seeds_at_the_share_of_training(tmp_path: Path) -> None:
    figure = curves_figure(results(tmp_path))
    hopper, walker, empty = figure.axes
    assert [axes.get_title() for axes in (hopper, walker)] == ["hopper-medium", "walker2d-medium"]
    line, ours = hopper.lines
    assert line.get_label() == "DT" and ours.get_label() == "TT quantile"
    assert np.asarray(line.get_xydata()).tolist() == [[25.0, 2.0], [100.0, 6.0]]
    assert np.asarray(ours.get_ydata()).tolist() == [50.0, 50.0]
    (band,) = hopper.collections  # one standard error on both sides: 1 of (1, 3), 2 of (4, 8)
    points = {tuple(point) for point in np.asarray(band.get_paths()[0].vertices).round(6)}
    assert {(25.0, 1.0), (25.0, 3.0), (100.0, 4.0), (100.0, 8.0)} <= points
    assert len(walker.lines) == 1 and not walker.collections  # one seed has no error
    assert not empty.axison
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["BC", "DT", "TT quantile"]  # not in order of panels


def test_the_report_draws_the_curves(tmp_path: Path) -> None:
    results(tmp_path / "results")
    pictures = tmp_path / "docs" / "images"
    pictures.mkdir(parents=True)
    assert main(["report", str(tmp_path / "results")]) == 0
    assert (pictures / "baseline_curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (pictures / "locomotion.png").exists()  # no method has all tasks
