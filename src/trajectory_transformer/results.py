"""Result files: JSON with the command, commit, device, package versions, seeds and metrics of a measurement."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajectory_transformer.files import write_atomically

if TYPE_CHECKING:
    import torch  # tables of results need not wait for it

_PACKAGES = ("trajectory-transformer", "torch", "numpy", "gymnasium", "mujoco", "minari", "minigrid")
EPISODES = "episodes_sha256"  # in the result of an evaluation: the digest of the file of its episodes
COMMIT = "TT_COMMIT"  # environment variable with the commit of a source tree without git history


def write_result(
    path: str | Path,
    *,
    name: str,
    command: str,
    device: "torch.device",
    seeds: Sequence[int],
    seconds: float,
    metrics: Mapping[str, float],
    details: Mapping[str, object] | None = None,
) -> None:
    """Write a result file; `details` are further keys, such as settings and values per episode."""
    content = {
        "name": name,
        "command": command,
        "commit": source_commit(),
        "device": _device_name(device),
        "versions": {"python": platform.python_version(), **package_versions(_PACKAGES)},
        "seeds": list(seeds),
        "seconds": round(seconds, 3),
        "metrics": {key: float(value) for key, value in metrics.items()},
        **(details or {}),
    }
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def summarize(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and number (`_n`) of repeated measurements, and the standard error (`_stderr`) of at least two."""
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    error = {f"{name}_stderr": float(data.std(ddof=1) / np.sqrt(count))} if count > 1 else {}
    return {name: float(data.mean()), **error, f"{name}_n": float(count)}


def mean_and_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Like `summarize`, without the number of measurements."""
    return {key: value for key, value in summarize(name, values).items() if key != f"{name}_n"}


def with_error(metrics: Mapping[str, float], name: str) -> str:
    """A mean as text, with its standard error if that is known: `114.3 ± 1.5`."""
    stderr = metrics.get(f"{name}_stderr")
    return f"{metrics[name]:.4g}" + ("" if stderr is None else f" ± {two_digits(stderr)}")


def two_digits(value: float | None) -> str:
    """Format a number with two significant digits and without exponent: 223.4 as 220, not as 2.2e+02; None as ""."""
    return "" if value is None else f"{float(f'{value:.2g}'):g}"


def counted(count: float, one: str, several: str | None = None) -> str:
    """A number with its noun: `1 episode`, `15 episodes`; `several` for a plural that does not end with just an s."""
    return f"{count:.0f} {one if count == 1 else several or one + 's'}"


def source_commit() -> str:
    """Commit of the running source, with `-dirty` for uncommitted changes; `unknown` outside a git checkout.

    The environment variable TT_COMMIT overrides it, for copies of the source without git history.
    """
    if os.environ.get(COMMIT):
        return os.environ[COMMIT]
    here = Path(__file__).parent
    try:
        done = [
            subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0] + ("-dirty" if done[1] else "")


def _device_name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
