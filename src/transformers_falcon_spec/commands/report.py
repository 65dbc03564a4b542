"""`falcon-spec report`: render results files into documents, between their markers, and into HTML pages.

In a document the text between the markers `<!-- results:begin -->` and `<!-- results:end -->` is replaced by the
tables of `bench`, `parity` and `calibrate`.

Example:
  falcon-spec report --results speed.json parity.json --documents README.md
  falcon-spec report --pages speed.json
"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError
from ..evaluation.report import tables_of, write_between_markers
from ..evaluation.results import read_result
from .options import option


@dataclass(kw_only=True)
class ReportCommand:
    """The results to render, and the documents and pages to write."""

    results: list[str] = option(
        "Results files of `bench`, `parity` and `calibrate`, and folders of them: in a folder, other files are passed "
        "over.",
        [],
    )
    documents: list[str] = option("Markdown files with the markers; each gets all tables of `results`.", [])
    pages: list[str] = option(
        "Results files of `bench` and `calibrate`; each becomes an HTML page with plots beside it, of its name with "
        ".html. Needs matplotlib, the extra `report`.",
        [],
    )


def run(command: ReportCommand) -> None:
    """Write the tables into the documents, and the pages beside their results."""
    if not command.pages and not (command.results and command.documents):
        raise OptionError("`report` needs something to render: `results` with `documents`, or `pages`.")
    for name in command.documents:
        if not Path(name).is_file():
            raise OptionError(f"`documents` must name files that are there, with the markers, but `{name}` is not.")
    tables = [text for name in command.results for text in _tables(Path(name))] if command.documents else []
    for document in command.documents:
        write_between_markers(Path(document), tables)
        print(f"{document} holds the figures of {', '.join(command.results)}")
    for name in command.pages:
        _page(Path(name))


def _tables(path: Path) -> list[str]:
    if not path.exists():
        raise OptionError(f"`results` must name files or folders that are there, but `{path}` is not.")
    rendered = [tables_of(file) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not any(rendered):
        raise OptionError(f"`{path}` must hold results of `bench`, `parity` or `calibrate`, but it holds none.")
    return [text for text in rendered if text is not None]


def _page(path: Path) -> None:
    if path.suffix != ".json":
        raise OptionError(f"`pages` must name results files that end in `.json`, but one is `{path}`.")
    result, page = read_result(path, ("bench", "calibrate")), path.with_suffix(".html")
    from ..evaluation.result_pages import render_result  # noqa: PLC0415  needs matplotlib, which documents do without

    page.write_text(render_result(result), encoding="utf-8")
    print(f"{page} shows {path}")
