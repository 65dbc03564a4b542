"""`falcon-spec report`: render the results files into a document, between its markers."""

from dataclasses import dataclass, field
from pathlib import Path

from ..evaluation.report import render_into


@dataclass
class ReportCommand:
    """What to render, and where."""

    results: str = field(default="benchmarks/results", metadata={"help": "Folder of results files."})
    document: str = field(default="README.md", metadata={"help": "Markdown file with the markers."})


def run(command: ReportCommand) -> None:
    """Render."""
    render_into(Path(command.document), Path(command.results))
    print(f"{command.document} holds the figures of {command.results}")
