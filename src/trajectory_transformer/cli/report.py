"""`tt report`: write tables of results into documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.console import console
from trajectory_transformer.report.locomotion import average, locomotion_figure, method_scores
from trajectory_transformer.report.tables import has_markers, results_table, write_tables


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write tables of result files into documents, or print them."""

    positional: ClassVar[dict[str, str]] = {"results": "Folder of result files."}
    required: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = (
        "tt report results --into []        # print the table of all result files",
        "tt report results                  # write tables into README.md and docs beside the folder",
    )

    results: str | None = None
    """Folder of result files."""
    into: tuple[Path, ...] | None = None
    """Documents to write tables into, between the marks <!-- results NAME... --> and <!-- /results -->. null: README.md
    and docs/*.md beside the folder, if they have marks; [] prints the table."""

    def execute(self) -> None:
        """Print or write."""
        folder = Path(self.results or "results")
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder of results")
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
        if self.into is None and pictures.is_dir() and any(map(average, method_scores(folder).values())):
            locomotion_figure(folder).savefig(pictures / "locomotion.png", dpi=150)
            console.print(f"wrote {pictures / 'locomotion.png'}")
        if not documents:
            console.print(results_table(folder), markup=False)
