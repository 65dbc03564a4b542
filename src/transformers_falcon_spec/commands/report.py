"""`falcon-spec report`: render results files into documents, between their markers, and into HTML pages.

A document holds the markers `<!-- results:begin -->` and `<!-- results:end -->`; what stands between them is replaced.

Example, on the results that come with the package:
  falcon-spec report --results benchmarks/results --documents README.md
  falcon-spec report --pages benchmarks/results/speed.json
"""

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import OptionError
from ..evaluation.calibration import read_calibration
from ..evaluation.report import PAGES, README, render_into
from ..evaluation.speed_results import read_result


@dataclass
class ReportCommand:
    """What to render, and where."""

    results: str = field(default="benchmarks/results", metadata={"help": "Folder of results files."})
    documents: list[str] | None = field(
        default=None,
        metadata={
            "help": "Markdown files with the markers; each gets the tables that belong to a page of its name. Without this and "
            "without `pages`: the README and the pages of docs/."
        },
    )
    pages: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Results files of `bench` and `calibrate`; each becomes an HTML page with plots beside it, of its name with .html. "
            "Needs matplotlib, the extra `report`."
        },
    )


def run(command: ReportCommand) -> None:
    """Render."""
    standard = [] if command.pages else [README, *(f"docs/{name}" for name in PAGES)]
    for document in standard if command.documents is None else command.documents:
        render_into(Path(document), Path(command.results))
        print(f"{document} holds the figures of {command.results}")
    for name in command.pages:
        _page(Path(name))


def _page(path: Path) -> None:
    if path.suffix != ".json":
        raise OptionError(f"`pages` must name results files that end in `.json`, but one is `{path}`.")
    page, calibration = path.with_suffix(".html"), read_calibration(path)
    result = calibration or read_result(path)
    from ..evaluation.calibration_page import render_calibration_page  # noqa: PLC0415  needs matplotlib,
    from ..evaluation.speed_page import render_speed_page  # noqa: PLC0415  which documents do without

    render = render_speed_page if calibration is None else render_calibration_page
    page.write_text(render(result), encoding="utf-8")
    print(f"{page} shows {path}")
