"""Markdown tables of results, generated from result files and inserted into documents."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trajectory_transformer.data.scores import normalized_score, references_of
from trajectory_transformer.files import read_json, write_atomically
from trajectory_transformer.report.locomotion import locomotion_table
from trajectory_transformer.results import two_digits

BEGIN, END = "<!-- results -->", "<!-- /results -->"
# A marker can select folders and single results: <!-- results race minigrid/v1 -->
_BLOCK = re.compile(r"(<!-- (results|scores|locomotion)((?: [\w./=-]+)*) -->\n).*?(<!-- /\2 -->)", re.DOTALL)

_DESCRIPTIONS = ("run.json", "checkpoint.json")  # of a run folder, beside its results

# Metrics that the tables show, in this order, with their labels.
SHOWN = {
    "success_rate": "goals reached",
    "path_ratio": "path / shortest path",
    "normalized_score": "normalised score",
    "percent_of_expert": "percent of expert return",
    "return": "return",
    "plan_ms_p50": "ms per plan",
    "same_first_action_beam_32_horizon_5": "same first action as float32, beam 32",
    "other_noise_beam_32_horizon_5": "same first action of float32 with a different seed, beam 32",
    "same_first_action_beam_128_horizon_15": "same first action as float32, beam 128",
    "other_noise_beam_128_horizon_15": "same first action of float32 with a different seed, beam 128",
    "speedup_over_naive": "fused vs naive speed-up",
    "plans_per_second_64_envs": "plans/s, 64 environments",
    "cached_speedup": "cached vs naive speed-up",
    "cached_speedup_sliding": "cached vs naive speed-up, sliding window",
    "cost_per_step_20_over_5": "cost per step, horizon 20 vs 5",
    "cost_per_step_20_over_5_sliding": "cost per step, horizon 20 vs 5, sliding window",
    "cost_per_step_20_over_5_default": "cost per step, horizon 20 vs 5, window slides at 20 only",
    "tokens_per_second": "training tokens/s",
    "floor_share": "share of the roofline",
    "loss_gap_auto": "loss minus loss of float32",
    "overhead_share": "time outside the model",
    "peak_mib": "peak memory (MiB)",
    "core_share": "share of CPU cores used",
    "seconds_collect": "collection (s)",
    "seconds_train": "training (s)",
    "seconds_evaluate": "evaluation (s)",
}


def results_table(folder: str | Path, *, parts: Sequence[str] = (), seen_from: str | Path | None = None) -> str:
    """One row per result file in a folder: name, metrics, device and command.

    `parts` are the subfolders and single results (without suffix) to show, in this order; the default is all of them.
    Links are relative to the folder `seen_from`; the default is the parent of the results folder.
    """
    folder = Path(folder)
    rows = ["| result | metrics | device | command |", "|---|---|---|---|"]
    for path in (file for part in parts or ("",) for file in _files(folder, part)):
        result = _read(path)
        metrics = result["metrics"]
        if result["device"].endswith("threads"):
            metrics.pop("plan_ms_p50", None)  # CPU times are comparable only within one file
        shown = ", ".join(f"{text} {_number(metrics, name)}" for name, text in SHOWN.items() if name in metrics)
        name = path.relative_to(folder).with_suffix("").as_posix()
        link = _link(path, seen_from or folder.parent)
        rows.append(f"| [{_text(name)}]({link}) | {shown} | {_text(result['device'])} | `{_text(result['command'])}` |")
    return "\n".join(rows)


def scores_table(folder: str | Path, *, parts: Sequence[str], seen_from: str | Path | None = None) -> str:
    """A short table: one row per result with its score and that of a reference.

    The reference is the expert or the best policy of the data that the result was compared with, or the file named
    after an equals sign: `minigrid/held_out=minigrid/collect_expert`.
    """
    folder = Path(folder)
    rows = ["| task | ours | reference | episodes | result |", "|---|---|---|---|---|"]
    for part in parts:
        name, _, other = part.partition("=")
        path = folder / f"{name}.json"
        result = _read(path)
        metrics = result["metrics"]
        counts = {each: _count(metrics, each) for each in ("normalized_score", "success_rate", "return")}
        metric = next((each for each, count in counts.items() if count), None)
        if metric is None:
            raise ValueError(f"{path}: has no score; a table of scores needs normalized_score, success_rate or return")
        reference = ""
        if other:
            reference = _score(_read(folder / f"{other}.json")["metrics"], metric)
        elif "expert_return" in metrics:
            references = references_of(str(result.get("settings", {}).get("env", "")))
            if references is not None:
                reference = f"{normalized_score(metrics['expert_return'], references):.3g} (expert)"
        elif "best_policy_noisy_score" in metrics:
            reference = f"{metrics['best_policy_noisy_score']:.3g} (best policy)"
        link = _link(path, seen_from or folder.parent)
        task = str(result.get("name", name)).partition(" ")[2] or name
        count = f"{counts[metric]:.0f}"
        rows.append(f"| {_text(task)} | {_score(metrics, metric)} | {reference} | {count} | [{_text(name)}]({link}) |")
    return "\n".join(rows)


def _count(metrics: dict[str, float], name: str) -> float:
    """Over how many episodes a metric was measured; 0 if that is not known."""
    return metrics.get(f"{name}_episodes", metrics.get(f"{name}_n", 0.0))


def _text(text: str) -> str:
    """Text of a file as a cell of a table: neither a new column nor code nor HTML."""
    return " ".join(text.split()).replace("`", "'").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _link(path: Path, start: str | Path) -> str:
    """A relative address."""
    return quote(Path(os.path.relpath(path, start)).as_posix())


def _score(metrics: dict[str, float], name: str) -> str:
    """Format a score; a success rate in percent."""
    if name != "success_rate":
        return _number(metrics, name)
    percent = {key: 100 * metrics[key] for key in (name, f"{name}_stderr") if key in metrics}
    return f"{_number(percent, name)} %"


def write_tables(folder: str | Path, document: str | Path) -> None:
    """Write the tables of a results folder between the markers of a document."""
    folder, document = Path(folder), Path(document)
    text = document.read_text()
    if not has_markers(document):
        raise ValueError(f"{document}: no markers found; put {BEGIN} and {END} where the table belongs")

    def table(found: re.Match[str]) -> str:
        parts = found[3].split()
        for part in (each for pair in parts for each in pair.split("=")):
            if not _files(folder, part):
                raise ValueError(f"{document}: a marker names the results {part}, but {folder / part} has none")
        if found[2] == "locomotion":
            return f"{found[1]}{locomotion_table(folder)}\n{found[4]}"
        write = results_table if found[2] == "results" else scores_table
        return f"{found[1]}{write(folder, parts=parts, seen_from=document.parent)}\n{found[4]}"

    write_atomically(document, _BLOCK.sub(table, text).encode())


def has_markers(document: str | Path) -> bool:
    """Whether a document has markers for a table."""
    return _BLOCK.search(Path(document).read_text()) is not None


def _files(folder: Path, part: str) -> list[Path]:
    """The result files in a subfolder, or the single result of this name; a run folder may be one of them."""
    single = folder / f"{part}.json"
    found = sorted(path for path in (folder / part).rglob("*.json") if path.name not in _DESCRIPTIONS)
    return [single] if single.is_file() else found


def _read(path: Path) -> dict[str, Any]:
    """Read a result file."""
    result = read_json(path)
    if not isinstance(result, dict) or not {"metrics", "device", "command"} <= result.keys():
        raise ValueError(f"{path}: not a result file; move it out of the folder of results")
    metrics = result["metrics"]
    if not isinstance(metrics, dict) or not all(isinstance(value, int | float) for value in metrics.values()):
        raise ValueError(f"{path}: metrics must be a mapping of names to numbers")
    if not isinstance(result["device"], str) or not isinstance(result["command"], str):
        raise ValueError(f"{path}: device and command must be text")
    return result


def _number(metrics: dict[str, float], name: str) -> str:
    """Format a value, with its standard error if it has one."""
    value, stderr = metrics[name], metrics.get(f"{name}_stderr")
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if not stderr else f"{text} ± {two_digits(stderr)}"
