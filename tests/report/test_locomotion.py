"""The locomotion table and bar chart, from result files."""

import json
from pathlib import Path

import pytest
from matplotlib.container import BarContainer

from trajectory_transformer.cli import main
from trajectory_transformer.report.locomotion import (
    PAPER,
    TASKS,
    Score,
    average,
    locomotion_figure,
    locomotion_table,
    method_scores,
)


def write(folder: Path, group: str, task: str, suffix: str, score: float, stderr: float, **more: float) -> None:
    path = folder / group / f"{task}_{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    errors = {"normalized_score_stderr": stderr, "normalized_score_stderr_episodes": 2 * stderr}
    metrics = {"normalized_score": score, **errors, **more}
    path.write_text(json.dumps({"metrics": metrics, "device": "x", "command": "y"}))


def results(folder: Path, tasks: tuple[str, ...] = TASKS) -> Path:
    for index, task in enumerate(tasks):
        known = {"data_score": 10.0, "best_policy_noisy_score": 20.0, "best_policy_noiseless_score": 30.5}
        write(folder, "locomotion", task, "quantile", 50.0 + index, 3.0, **known)
        write(folder, "baselines", task, "iql", 40.0, 0.0)
    return folder


def test_averages_need_all_tasks_and_combine_errors(tmp_path: Path) -> None:
    scores = method_scores(results(tmp_path))
    assert list(scores) == ["TT quantile", "IQL"]
    ours = average(scores["TT quantile"])
    assert ours is not None and ours.mean == 54.0
    assert ours.stderr == pytest.approx(1.0)  # nine errors of 3: 3 / sqrt(9)
    assert ours.stderr_episodes == pytest.approx(2.0)
    assert average(scores["IQL"]) == Score(40.0, 0.0, 0.0)
    assert average({task: scores["IQL"][task] for task in TASKS[1:]}) is None


def test_a_cell_of_one_training_seed_has_no_error_and_neither_has_the_average(tmp_path: Path) -> None:
    results(tmp_path)
    path = tmp_path / "locomotion" / f"{TASKS[0]}_quantile.json"
    result = json.loads(path.read_text())
    del result["metrics"]["normalized_score_stderr"]
    path.write_text(json.dumps(result))
    scores = method_scores(tmp_path)["TT quantile"]
    assert str(scores[TASKS[0]]) == "50.0 (6.0)"
    assert str(average(scores)) == "54.0 (2.0)"


def test_the_table_has_references_ours_baselines_and_the_paper(tmp_path: Path) -> None:
    lines = locomotion_table(results(tmp_path)).splitlines()
    header = (
        "| task | data | best policy | best policy, no noise | TT quantile | IQL | paper, uniform | paper, quantile |"
    )
    assert lines[0] == header
    ours = "| 10.0 | 20.0 | 30.5 | 50.0 ± 3.0 (6.0) | 40.0 ± 0.0 (0.0) |"
    assert lines[2] == f"| halfcheetah-medium-expert {ours} 40.8 | 95.0 |"
    ours = "| 10.0 | 20.0 | 30.5 | 54.0 ± 1.0 (2.0) | 40.0 ± 0.0 (0.0) |"
    assert lines[-1] == f"| average {ours} 72.6 | 78.9 |"  # the paper's averages
    assert len(lines) == 2 + 9 + 1


def test_missing_cells_are_dashes_and_missing_tasks_have_no_row(tmp_path: Path) -> None:
    results(tmp_path, TASKS[:1])
    write(tmp_path, "baselines", TASKS[1], "bc", 5.0, 1.0)
    lines = locomotion_table(tmp_path).splitlines()
    assert lines[3] == "| halfcheetah-medium | - | - | - | - | 5.0 ± 1.0 (2.0) | - | 44.0 | 46.9 |"
    assert lines[-1] == "| average | - | - | - | - | - | - | 72.6 | 78.9 |"
    assert len(lines) == 2 + 2 + 1
    assert "No results" in locomotion_table(tmp_path / "nothing")


def test_the_numbers_of_the_paper_have_its_averages() -> None:
    for name, expected in (("uniform", 72.6), ("quantile", 78.9)):
        assert sum(PAPER[name].values()) / 9 == pytest.approx(expected, abs=0.05)


def test_bars_are_scores_by_task_and_sorted_averages(tmp_path: Path) -> None:
    above, below = locomotion_figure(results(tmp_path)).axes
    legend = above.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["data", "best policy", "best policy, no noise", "TT quantile"]  # baselines: only their averages
    groups = [container for container in above.containers if isinstance(container, BarContainer)]
    assert [bar.get_height() for bar in groups[-1]] == [50.0 + index for index in range(9)]
    sides = [groups[0][4].get_x(), groups[-1][4].get_x() + groups[-1][4].get_width()]
    assert sides == pytest.approx([3.6, 4.4])  # the bars of the fifth task stand around its tick
    lines = [line for bars in groups if bars.errorbar is not None for line in bars.errorbar[2][0].get_segments()]
    drawn = [line[:, 1].tolist() for line in lines if len(line)]
    assert drawn == [[47.0 + index, 53.0 + index] for index in range(9)]  # ours; references have no standard error
    names = [label.get_text() for label in below.get_xticklabels()]
    assert names == ["data", "best policy", "best policy,\nno noise", "IQL", "TT quantile"]
    assert [bar.get_height() for bar in below.containers[-1]] == pytest.approx([10.0, 20.0, 30.5, 40.0, 54.0])
    assert len({bar.get_facecolor() for bar in below.patches}) == 5
    with pytest.raises(ValueError, match="no method has results for all nine tasks"):
        locomotion_figure(results(tmp_path / "few", TASKS[:2]))


def test_the_report_writes_table_and_chart(tmp_path: Path) -> None:
    results(tmp_path / "results")
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    (docs / "scores.md").write_text("<!-- locomotion -->\nold\n<!-- /locomotion -->\n")
    assert main(["report", str(tmp_path / "results")]) == 0
    text = (docs / "scores.md").read_text()
    assert "| average |" in text and "old" not in text
    assert (docs / "images" / "locomotion.png").read_bytes().startswith(b"\x89PNG")
