"""`tt report`: tables of documents from result files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.console import console
from trajectory_transformer.report.tables import has_markers, results_table, write_tables


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the tables of a results folder into documents between their marks, or print them where there are none."""

    positional: ClassVar[dict[str, str]] = {"results": "Folder of result files."}

    results: str | None = None
    """Folder of result files."""
    into: tuple[Path, ...] | None = None
    """Documents to write tables into, between <!-- results --> or <!-- results SUBFOLDER... --> and <!-- /results -->;
    null: README.md and docs/*.md beside the folder, where they have such marks; [] prints the table."""

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
            write_tables(folder, document)
            console.print(f"wrote the results into {document}")
        if not documents:
            console.print(results_table(folder), markup=False)
