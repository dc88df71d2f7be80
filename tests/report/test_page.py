"""The report page: what it shows of one run and of two, and that it is a single file whose texts are escaped."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.report.page import has_routes, summary, write_report
from trajectory_transformer.report.run import interval, is_run, read_run, wilson
from trajectory_transformer.report.run_figures import losses_figure, returns_figure

ATTACK = "<script>alert('x')</script>"


def write_run(folder: Path, *, steps: int = 40, width: int = 8, rate: float = 0.5, evaluated: bool = True) -> Path:
    """A run folder as the commands leave it, without weights."""
    folder.mkdir(parents=True)
    description = {"kind": "trajectory-transformer", "tokens": {"goal_dims": [0, 1]}, "model": {"width": width}}
    (folder / "checkpoint.json").write_text(json.dumps({**description, "metadata": {"env": ATTACK, f"{ATTACK}key": 1}}))
    (folder / "run.json").write_text(json.dumps({"train": {"steps": 40, "epochs": None}, "seed": 3}))
    lines = [
        json.dumps({"step": step, "total_steps": 40, "losses": {"observation": 2.0 / step, "action": 3.0 / step}})
        for step in range(20, steps + 1, 20)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, lines[-1][:9]]))  # the last line cut off by a kill
    if evaluated:
        result = {
            "name": "evaluate x goal",
            "command": f"tt evaluate {ATTACK}",
            "commit": "abc",
            "device": "abacus",
            "seconds": 2.0,
            "metrics": {
                "success_rate": rate,
                "success_rate_stderr": 0.1,
                "success_rate_n": 4,
                "return": 1.5,
                ATTACK: 1.0,
            },
            "returns": [1.0, 2.0],
            "settings": {"plan": "goal", "env": ATTACK, "search": {"window": None, "action": {"nucleus": 0.4}}},
        }
        (folder / "evaluation.json").write_text(json.dumps(result))
    return folder


def rows(page: str) -> list[list[str]]:
    """Cells of all table rows."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_a_page_shows_results_losses_and_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    Image.new("RGB", (2, 2)).save(run / "demonstrations.png")
    path = write_report(run)
    page = path.read_text()
    assert path == run / "report.html"
    assert "2 of 4 goals reached" in page
    low, high = wilson(0.5, 4)
    assert ["success_rate", "0.5", "0.1", f"{low:.4g} to {high:.4g}", "4"] in rows(page)
    assert ["observation", "0.050"] in rows(page) and ["action", "0.075"] in rows(page)
    for row in (["search.action.nucleus", "0.4"], ["search.window", "null"], ["tokens.goal_dims", "[0, 1]"]):
        assert row in rows(page)
    assert re.search(r"<details><summary>All settings</summary>", page)
    assert page.count("data:image/png;base64,") == 3  # returns, losses, demonstrations


def test_a_page_is_one_file_and_texts_of_the_data_are_escaped(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "a<b>&'c")).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "<b>" not in page and "a&lt;b&gt;&amp;&#x27;c" in page
    assert not re.search(r"(src|href)='(?!data:)", page) and "http://" not in page and "https://" not in page


def test_two_runs_stand_side_by_side_and_settings_that_differ_come_first(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "one"), write_run(tmp_path / "two", width=16, rate=1.0)
    page = write_report(first, second, out=tmp_path / "both.html").read_text()
    differing = page[page.index("<h3>Different</h3>") : page.index("<details>")]
    assert rows(differing) == [["setting", "one", "two"], ["model.width", "8", "16"]]
    assert ["kind of token", "one, training", "two, training"] in rows(page)
    assert ["observation", "0.050", "0.050"] in rows(page)
    assert page.count("class='two'") >= 1
    assert not (first / "report.html").exists()


def test_a_run_in_training_says_so_and_one_without_evaluation_how_to_get_one(tmp_path: Path) -> None:
    assert (
        "In training: step 20 of 40" in write_report(write_run(tmp_path / "a", steps=20, evaluated=False)).read_text()
    )
    page = write_report(write_run(tmp_path / "b", evaluated=False)).read_text()
    assert f"tt evaluate {tmp_path / 'b'}" in page and "<h2>Evaluation" not in page


def test_losses_of_several_training_seeds_are_averaged_and_infinite_ones_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [{"step": 1, "losses": {"critic": [1.0, 3.0]}}, {"step": 2, "losses": {"critic": [float("nan"), 1.0]}}]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert [(each.step, each.losses) for each in read_run(run).losses] == [(1, {"critic": 2.0})]


def test_curves_go_through_the_recorded_losses_and_crosses_are_held_out_losses(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run"))
    panel = losses_figure([record], [{"action": 0.7}]).axes[0]
    curves = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in panel.lines}
    assert curves["observation"] == [[20, 0.1], [40, 0.05]] and curves["action"] == [[20, 0.15], [40, 0.075]]
    crosses = [np.asarray(line.get_xydata()).tolist() for line in panel.lines if line.get_marker() == "x"]
    assert crosses == [[[40, 0.7]]]


def test_equal_returns_are_not_drawn(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run"))
    assert returns_figure([record]) is not None
    same = {"evaluation": {**record.evaluations["evaluation"], "returns": [1.0, 1.0]}}
    assert returns_figure([replace(record, evaluations=same)]) is None
    assert returns_figure([replace(record, evaluations={})]) is None


def test_intervals_are_stored_ones_wilsons_or_two_standard_errors() -> None:
    assert interval({"return": 5.0, "return_low": 1.0, "return_high": 9.0, "return_n": 3}, "return") == (1.0, 9.0)
    assert interval({"x": 5.0, "x_stderr": 1.0, "x_n": 3}, "x") == pytest.approx((3.04, 6.96))
    assert interval({"x": 5.0}, "x") is None and interval({"x": 5.0, "x_stderr": 0.0, "x_n": 1}, "x") is None
    # Wilson (1927), as tabulated: 81 of 263.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0.0 and wilson(1.0, 10)[1] == 1.0


def test_a_summary_names_the_score_with_its_interval() -> None:
    metrics = {"return": 10.0, "return_low": 8.0, "return_high": 12.0, "return_n": 5.0}
    assert summary({"metrics": metrics}) == "return 10 (95 % interval 8 to 12) over 5 episodes"


def test_a_model_adds_losses_and_forecasts_of_the_played_episodes(
    tmp_path: Path, tiny_dataset: Dataset, tiny_model: TrajectoryModel
) -> None:
    run = write_run(tmp_path / "run")
    save_npz(tiny_dataset, run / "evaluation.npz")
    page = write_report(run, models=[tiny_model]).read_text()
    assert ["kind of token", "training", "held out"] in rows(page)
    assert re.search(r"\d+ % inside the 50 % band, \d+ % inside the 90 % band", page)
    assert "useful for" in page and "episodes that the planner played" in page
    assert "held-out episodes" in write_report(run, models=[tiny_model], held_out=tiny_dataset).read_text()


def test_a_model_with_rewards_forecasts_nothing_of_episodes_without(
    tmp_path: Path, tiny_dataset: Dataset, tiny_model: TrajectoryModel
) -> None:
    run = write_run(tmp_path / "run")
    without = Dataset(tuple(replace(episode, rewards=None) for episode in tiny_dataset))
    save_npz(without, run / "evaluation.npz")
    assert "Forecasts" not in write_report(run, models=[tiny_model]).read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(ValueError, match=r"not a run folder; it has neither checkpoint\.json nor run\.json"):
        write_report(tmp_path)


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "evaluation.json").write_text("{")
    with pytest.raises(ValueError, match=r"evaluation\.json: not valid JSON"):
        read_run(run)


def test_routes_are_drawn_in_the_four_rooms_only(tmp_path: Path) -> None:
    episode = Dataset((_walk(),), {"env": "tt/FourRooms-v0"})
    assert has_routes(episode) and not has_routes(replace(episode, metadata={"env": "Hopper-v5"}))


def _walk() -> Episode:
    return Episode(np.full((2, 2), 0.3, np.float32), np.zeros((1, 2), np.float32), None, True)


def test_episodes_that_are_not_those_of_the_evaluation_are_refused(tmp_path: Path, tiny_dataset: Dataset) -> None:
    run = write_run(tmp_path / "run")
    played, stored = run / "evaluation.npz", run / "evaluation.json"
    save_npz(tiny_dataset, played)
    result = json.loads(stored.read_text())
    stored.write_text(json.dumps({**result, "episodes_sha256": hashlib.sha256(played.read_bytes()).hexdigest()}))
    played_by = read_run(run).played
    assert played_by is not None and played_by.num_steps == tiny_dataset.num_steps
    whole = played.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        played.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"evaluation\.npz: the file is damaged or belongs to another evaluation"):
            read_run(run)
    stored.write_text(json.dumps(result))  # of an earlier version, which stored no digest
    played.write_bytes(whole)
    assert read_run(run).played is not None
