"""Trains one baseline on several AntMaze datasets, with all training seeds, in the same steps; for `antmaze.py`.

    python benchmarks/antmaze_baselines.py iql-antmaze --method iql --datasets DIR --runs DIR [--tasks TASK ...]

Datasets are DIR/antmaze-<task>.npz. Writes <runs>/<task>_<method>, which `tt evaluate` plays and `--q` reads, and at
the end <runs>/<method>_<tasks>/training.json. Ctrl-C ends with a checkpoint; the same command continues from it.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.antmaze_data import TASKS
from benchmarks.baselines_together import make_together, mean_losses, progress_line, save_apart
from trajectory_transformer.baselines import PRESETS
from trajectory_transformer.baselines.presets import changed, settings_dict
from trajectory_transformer.data.episode import load_npz
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.results import write_result
from trajectory_transformer.runs.run import noted_interrupts

CHECKPOINT_SECONDS = 60.0


def trained(runs: Path, method: str, tasks: Sequence[str]) -> Path:
    """Written when the training of a method on these tasks ends."""
    return runs / f"{method}_{'+'.join(tasks)}" / "training.json"


def train(options: argparse.Namespace) -> bool:
    """Train to the end or to Ctrl-C; whether it is finished."""
    settings = changed(PRESETS[options.preset].settings, options.settings)
    datasets = [load_npz(options.datasets / f"antmaze-{task}.npz") for task in options.tasks]
    seeds, device = range(options.seeds), find_device(options.device)
    trainer, baseline = make_together(options.preset, settings, datasets, seeds, device)
    out = trained(options.runs, options.method, options.tasks)
    out.parent.mkdir(parents=True, exist_ok=True)
    resume = out.with_name("resume.safetensors")
    if resume.exists():
        trainer.load(resume)
    print(f"{options.preset} on {', '.join(options.tasks)}: step {trainer.step} of {trainer.total_steps}", flush=True)
    first, started, losses = trainer.step, time.monotonic(), {}
    saved = started
    with noted_interrupts() as interrupts:
        for metrics in trainer.run():
            if metrics is not None:
                losses = mean_losses(metrics)
                print(progress_line(options.method, metrics), flush=True)
            now = time.monotonic()
            if interrupts or now - saved > CHECKPOINT_SECONDS or trainer.step == trainer.total_steps:
                trainer.save(resume)
                saved = now
            if interrupts:
                break
    if trainer.step < trainer.total_steps:
        return False
    save_apart(baseline, datasets, seeds, [options.runs / f"{task}_{options.method}" for task in options.tasks])
    seconds, steps = time.monotonic() - started, trainer.step - first
    write_result(
        out,
        name=f"antmaze {options.method}",
        command="python " + shlex.join(sys.argv),
        device=device,
        seeds=list(seeds),
        seconds=seconds,
        metrics={"steps": steps, "steps_per_second": steps / seconds, **{f"loss_{k}": v for k, v in losses.items()}},
        details={"settings": {"tasks": options.tasks, "preset": options.preset, **settings_dict(settings)}},
    )
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns 130 if Ctrl-C came first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--method", required=True, help="name in the table")
    parser.add_argument("--datasets", type=Path, required=True, help="folder of antmaze-<task>.npz")
    parser.add_argument("--runs", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3, help="number of training seeds")
    parser.add_argument("--settings", type=json.loads, default={}, help='to change, as {"steps": 1000}')
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    missing = [path for task in options.tasks if not (path := options.datasets / f"antmaze-{task}.npz").is_file()]
    if missing:
        parser.error(f"{missing[0]} does not exist; benchmarks/antmaze_data.py collects it")
    return 0 if train(options) else 130


if __name__ == "__main__":
    sys.exit(main())
