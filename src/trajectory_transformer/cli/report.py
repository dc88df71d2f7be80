"""`tt report`: tables of documents from result files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.console import console
from trajectory_transformer.report.tables import results_table, write_tables


@dataclass(frozen=True, kw_only=True)
class Report:
    """Print the table of a results folder, or write it into documents between their marks."""

    positional: ClassVar[dict[str, str]] = {"results": "Folder of result files."}

    results: str | None = None
    """Folder of result files."""
    into: tuple[Path, ...] = ()
    """Documents to write the table into, between <!-- results --> and <!-- /results -->; none prints it."""

    def execute(self) -> None:
        """Print or write."""
        folder = Path(self.results or "results")
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder of results")
        for document in self.into:
            write_tables(folder, document)
            console.print(f"wrote the results into {document}")
        if not self.into:
            console.print(results_table(folder), markup=False)
