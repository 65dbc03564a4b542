"""`falcon-spec report`: render the results files into documents, between their markers."""

from dataclasses import dataclass, field
from pathlib import Path

from ..evaluation.matrix import NAME, render_matrix_into
from ..evaluation.report import render_into


@dataclass
class ReportCommand:
    """What to render, and where."""

    results: str = field(default="benchmarks/results", metadata={"help": "Folder of results files."})
    document: str = field(default="README.md", metadata={"help": "Markdown file with the markers."})
    matrix: str = field(
        default="docs/architectures.md",
        metadata={"help": f"Markdown file with the markers that gets `{NAME}`, where the folder has one."},
    )


def run(command: ReportCommand) -> None:
    """Render."""
    render_into(Path(command.document), Path(command.results))
    print(f"{command.document} holds the figures of {command.results}")
    if (Path(command.results) / NAME).is_file():
        render_matrix_into(Path(command.matrix), Path(command.results))
        print(f"{command.matrix} holds the matrix of {command.results}")
