"""OGBench files: `.npz` with the rows of all trajectories.

Arrays: `observations` [N, O], `actions` [N, A] (or integers [N]: one discrete action), `terminals` [N], optional
`rewards` [N]. `terminals` marks the last row of each trajectory. That row holds the final state: its action leads
nowhere and is left out. Trajectories have a fixed length, so the end of one says nothing about the task: all episodes
count as truncated.
"""

import zipfile
from pathlib import Path

import numpy as np

from trajectory_transformer.data.episode import Dataset, Dimension, read_npz
from trajectory_transformer.data.sources.columns import Columns
from trajectory_transformer.data.sources.rows import Rows, build_dataset, check_numbers

_NEEDED = ("observations", "actions", "terminals")


def is_ogbench(path: Path) -> bool:
    """Whether a `.npz` file has the arrays of OGBench; reads only the names of its arrays."""
    try:
        with zipfile.ZipFile(path) as file:
            names = {Path(name).stem for name in file.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, OSError, UnicodeDecodeError):
        return False
    return names.issuperset(_NEEDED) and "lengths" not in names


def load_ogbench(path: str | Path, columns: Columns | None = None) -> Dataset:
    """Read an OGBench file."""
    path = Path(path)
    arrays = read_npz(path, only=(*_NEEDED, "rewards"))
    count = len(arrays["observations"]) if arrays["observations"].ndim else 0
    wrong = next((name for name, array in arrays.items() if not array.ndim or len(array) != count or not count), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong} must have as many rows as observations, {count}, got {arrays[wrong].shape}")
    actions = arrays["actions"]
    dimensions: tuple[Dimension, ...] = ()
    if actions.ndim == 1:
        discrete = np.issubdtype(actions.dtype, np.integer)
        dimensions = (Dimension("action 0", int(actions.max()) + 1),) if discrete else ()
        actions = actions[:, None]
    observations = check_numbers(path, "observations", arrays["observations"], ndim=2)
    actions = check_numbers(path, "actions", actions, ndim=2)
    last = arrays["terminals"].astype(np.bool_).ravel()
    last[-1] = True
    actions[last] = np.nan
    rows = Rows(
        observations=observations,
        actions=actions,
        last=last,
        terminated=np.zeros(count, np.bool_),
        rewards=check_numbers(path, "rewards", arrays["rewards"], ndim=1) if "rewards" in arrays else None,
        final_rows=True,
    )
    facts = {"format": "OGBench"}
    return build_dataset(
        path, rows, columns or Columns(), found_by="the array terminals", metadata=facts, action_dimensions=dimensions
    )
