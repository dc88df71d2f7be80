"""`tt report`: the page of a run, two runs side by side, or tables of results in documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trajectory_transformer.cli.console import console
from trajectory_transformer.cli.data import load_dataset

if TYPE_CHECKING:
    from trajectory_transformer.model.trajectory_model import TrajectoryModel


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the page of a run (or of two runs side by side), or tables of result files into documents."""

    positional: ClassVar[dict[str, str]] = {
        "results": "Run folder, or a folder of result files.",
        "other": "Second run folder, to compare with the first.",
    }
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt report runs/demo runs/other     # one page with two runs side by side",
        "tt report results                  # write tables into README.md and docs beside the folder",
    )

    results: str | None = None
    """Run folder, or a folder of result files."""
    other: str | None = None
    """Second run folder, to compare with the first."""
    out: Path | None = None
    """Page to write; null: report.html in the run folder, or compared-with-NAME.html for two runs."""
    held_out: str | None = None
    """Dataset for losses and forecasts on the page; null: the episodes that `tt evaluate` played."""
    device: str = "auto"
    """Where losses and forecasts are computed: auto, cpu or cuda."""
    into: tuple[Path, ...] | None = None
    """Documents to write tables into, between the markers <!-- results NAME... --> and <!-- /results -->. null:
    README.md and docs/*.md beside the folder, if they have markers; [] prints the table."""

    def execute(self) -> None:
        """Print or write."""
        from trajectory_transformer.report.curves import curves, curves_figure
        from trajectory_transformer.report.locomotion import average, locomotion_figure, method_scores
        from trajectory_transformer.report.plots import save_figure
        from trajectory_transformer.report.run import is_run
        from trajectory_transformer.report.tables import has_markers, results_table, write_tables

        folder = Path(self.results or "results")
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder of results")
        if self.other is not None or is_run(folder):
            self._write_page(folder)
            return
        if self.out is not None or self.held_out is not None:
            raise ValueError(f"{folder}: not a run folder; --out and --held_out are for the page of a run")
        documents = self.into
        if documents is None:
            beside = folder.resolve().parent
            known = [beside / "README.md", *sorted((beside / "docs").glob("*.md"))]
            documents = tuple(each for each in known if each.is_file() and has_markers(each))
        for document in documents:
            if not document.is_file():
                raise ValueError(f"{document}: no such document")
            write_tables(folder, document)
            console.print(f"wrote tables of results into {document}")
        pictures = folder.resolve().parent / "docs" / "images"
        if self.into is None and pictures.is_dir():
            figures = {}
            if any(map(average, method_scores(folder).values())):
                figures["locomotion.png"] = locomotion_figure(folder)
            if curves(folder):
                figures["baseline_curves.png"] = curves_figure(folder)
            for name, figure in figures.items():
                save_figure(figure, pictures / name)
                console.print(f"wrote {pictures / name}")
        if not documents:
            console.print(results_table(folder), markup=False)

    def _write_page(self, folder: Path) -> None:
        """Write the page of one run or of two."""
        from trajectory_transformer.report.page import write_report
        from trajectory_transformer.report.run import read_run

        if self.into is not None:
            raise ValueError(f"--into is for tables of a folder of result files, and {folder} is a run")
        folders = [folder] if self.other is None else [folder, Path(self.other)]
        for each in folders:
            read_run(each)  # refused before a model is loaded
        out = self.out
        if out is None and self.other is not None:
            out = folder / f"compared-with-{folders[1].resolve().name}.html"
        page = write_report(
            *folders,
            out=out,
            models=[self._model(each) for each in folders],
            held_out=None if self.held_out is None else load_dataset(self.held_out),
        )
        console.print(f"wrote {page}")

    def _model(self, folder: Path) -> "TrajectoryModel | None":
        """The model of a run; None for baselines and runs without a checkpoint."""
        from trajectory_transformer.baselines.model import KIND as BASELINE
        from trajectory_transformer.checkpoint import checkpoint_kind
        from trajectory_transformer.gpu.backends import find_device
        from trajectory_transformer.model.trajectory_model import TrajectoryModel
        from trajectory_transformer.report.run import CHECKPOINT

        if not (folder / CHECKPOINT).is_file() or checkpoint_kind(folder) == BASELINE:
            return None
        return TrajectoryModel.load(folder, find_device(self.device))
