"""`falcon-spec report`: render the results files into documents, between their markers."""

from dataclasses import dataclass, field
from pathlib import Path

from ..evaluation.report import PAGES, render_into


@dataclass
class ReportCommand:
    """What to render, and where."""

    results: str = field(default="benchmarks/results", metadata={"help": "Folder of results files."})
    documents: list[str] = field(
        default_factory=lambda: ["README.md", *(f"docs/{name}" for name in PAGES)],
        metadata={"help": "Markdown files with the markers; each gets the tables that belong to a page of its name."},
    )


def run(command: ReportCommand) -> None:
    """Render."""
    for document in command.documents:
        render_into(Path(document), Path(command.results))
        print(f"{document} holds the figures of {command.results}")
