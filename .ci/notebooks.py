"""Run every notebook in a folder of its own, and check that the stored ones have no outputs.

python .ci/notebooks.py [NOTEBOOK ...]
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds for a cell, on a busy machine


def check(path: Path) -> None:
    """Run a notebook; raises if a cell fails, or if the stored notebook has outputs."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            raise ValueError(f"{path.name}: has outputs; clear them: jupyter nbconvert --clear-output --inplace {path}")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not any(output.get("text") for cell in cells for output in cell.outputs):
        raise ValueError(f"{path.name}: printed nothing")
    print(f"{path.name}: {len(cells)} cells in {time.perf_counter() - started:.0f} s")
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                print("    " + output.text.rstrip().replace("\n", "\n    "))


def main() -> int:
    """Run the notebooks that are named, or all of them."""
    paths = [Path(word) for word in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    try:
        for path in paths:
            check(path)
    except (CellExecutionError, ValueError) as error:
        print(f"notebooks: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
