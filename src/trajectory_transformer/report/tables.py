"""Tables of measured numbers, written from result files into documents, never typed."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from trajectory_transformer.files import write_atomically
from trajectory_transformer.results import two_digits

BEGIN, END = "<!-- results -->", "<!-- /results -->"
# A mark may name folders of results or single ones, and its table shows those alone: <!-- results race minigrid/v1 -->
_MARKED = re.compile(r"(<!-- results((?: [\w./-]+)*) -->\n).*?(<!-- /results -->)", re.DOTALL)

# Which metrics of a result are shown, in this order, and how.
SHOWN = {
    "success_rate": "goals reached",
    "path_ratio": "path / shortest path",
    "normalized_score": "normalised score",
    "percent_of_expert": "percent of the expert",
    "return": "return",
    "plan_ms_p50": "ms a plan",
    "same_first_action_beam_32_horizon_5": "same first action, beam 32",
    "other_noise_beam_32_horizon_5": "of float32 with other noise",
    "same_first_action_beam_128_horizon_15": "same first action, beam 128",
    "other_noise_beam_128_horizon_15": "of float32 with other noise",
    "speedup_over_naive": "fused / naive speed",
    "plans_per_second_64_envs": "plans/s, 64 environments",
    "cached_speedup": "cached / naive speed",
    "cached_speedup_sliding": "the same, window slides",
    "cost_per_step_20_over_5": "cost per step, horizon 20 / 5",
    "cost_per_step_20_over_5_sliding": "the same, window slides always",
    "cost_per_step_20_over_5_default": "the same, at 20 only",
    "tokens_per_second": "training tokens/s",
    "floor_share": "share of the roofline",
    "loss_gap_auto": "loss above float32's",
    "overhead_share": "share outside the model",
    "peak_mib": "peak memory (MiB)",
    "core_share": "cores used",
    "seconds_collect": "collected in (s)",
    "seconds_train": "trained in (s)",
    "seconds_evaluate": "played in (s)",
}


def results_table(folder: Path, *, parts: Sequence[str] = (), seen_from: Path | None = None) -> str:
    """One row for every result file below a folder: what was measured, how it came out, the command behind it.

    `parts` are the subfolders and single results (no suffix) to show, in this order, all there are if none is named;
    links lead there from the folder `seen_from`, that of the results' parent if none is given.
    """
    rows = ["| what | measured | device | command |", "|---|---|---|---|"]
    for path in (file for part in parts or ("",) for file in _files(folder, part)):
        result = json.loads(path.read_text())
        metrics = result["metrics"]
        if result["device"].endswith("threads"):
            metrics.pop("plan_ms_p50", None)  # CPUs are shared: their times compare within a file only
        shown = ", ".join(f"{text} {_number(metrics, name)}" for name, text in SHOWN.items() if name in metrics)
        name = path.relative_to(folder).with_suffix("").as_posix()
        link = Path(os.path.relpath(path, seen_from or folder.parent)).as_posix()
        rows.append(f"| [{name}]({link}) | {shown} | {result['device']} | `{result['command']}` |")
    return "\n".join(rows)


def write_tables(folder: Path, document: Path) -> None:
    """Put tables of a results folder between all marks of a document."""
    text = document.read_text()
    if not has_marks(document):
        raise ValueError(f"{document}: a document needs the marks {BEGIN} and {END} around its table, found none")

    def table(found: re.Match[str]) -> str:
        parts = found[2].split()
        for part in parts:
            if not _files(folder, part):
                raise ValueError(f"{document}: it asks for results of {part}, and there are none in {folder / part}")
        return f"{found[1]}{results_table(folder, parts=parts, seen_from=document.parent)}\n{found[3]}"

    write_atomically(document, _MARKED.sub(table, text).encode())


def has_marks(document: Path) -> bool:
    """Whether a document has a place for a table."""
    return _MARKED.search(document.read_text()) is not None


def _files(folder: Path, part: str) -> list[Path]:
    """The result files of a subfolder, or the one of that name."""
    single = folder / f"{part}.json"
    return [single] if single.is_file() else sorted((folder / part).rglob("*.json"))


def _number(metrics: dict[str, float], name: str) -> str:
    """A value with its standard error where it has one."""
    value, spread = metrics[name], metrics.get(f"{name}_stderr")
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text if not spread else f"{text} ± {two_digits(spread)}"
