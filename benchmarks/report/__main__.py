"""Render this repository's results into the README and the pages of docs/.

Command: python -m benchmarks.report; a results file that no script declares is not shown.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from lab.report import write_between_markers

from . import Report
from .commands import REPORTS
from .origins import check_one_commit
from .overview import overview

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def declared() -> Iterator[Report]:
    """The reports of commands, then those of all scripts that declare one."""
    yield from REPORTS
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if "\nREPORT = " in path.read_text(encoding="utf-8"):
            yield import_module(f"benchmarks.{path.stem}").REPORT


def pages(results: Path = RESULTS) -> dict[str, list[str]]:
    """The tables of every page, none where nothing was measured yet, and the few numbers of the README.

    Raises:
        [`OptionError`]: results that do not belong into one table.
    """
    found = {"README.md": overview(results), **{report.page: [] for report in declared()}}
    for report in sorted(declared(), key=lambda report: report.order):
        files = [file for file in report.files if (results / file).is_file()]
        read = {file: json.loads((results / file).read_text(encoding="utf-8")) for file in files}
        for file, result in read.items():
            check_one_commit(result, file)
        found[report.page] += report.render_all(read)

    return found


def main() -> None:
    """Render every page."""
    for page, tables in pages().items():
        document, _, name = page.partition("#")
        write_between_markers(ROOT / document, tables, name or None)
        print(f"{page} holds the figures of {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
