"""A walker file to test with."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_walker(path: Path) -> Path:
    """Write a walker with random weights: it moves, but does not walk."""
    rng = np.random.default_rng(0)
    sizes = [37, 16, 8]
    tensors = {"obs.mean": rng.normal(size=37).astype(np.float32), "obs.var": np.full(37, 0.5, np.float32)}
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        tensors[f"actor.{2 * index}.weight"] = (rng.normal(size=(outputs, inputs)) / 4).astype(np.float32)
        tensors[f"actor.{2 * index}.bias"] = (rng.normal(size=outputs) / 4).astype(np.float32)
    save_file(tensors, path)
    return path
