"""How a benchmark declares its tables: a page of this repository, results files, and what is shown of each.

A script holds `REPORT = Report(page, files, tables)`; `python -m benchmarks.report` finds it and renders `tables(result, path)` into the page.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.tables import distinct, fill, machine, source_line, table, total, where

__all__ = [
    "Report",
    "Result",
    "Rows",
    "by",
    "distinct",
    "fill",
    "machine",
    "named",
    "setting",
    "source_line",
    "sources_line",
    "speed_by_set",
    "table",
    "total",
    "where",
    "without_earlier",
]
EARLIER = "falcon-before"
Result = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """What a benchmark shows, and where.

    Args:
        page (`str`): The document, with the markers of `lab.report`; behind a `#` the name of its markers, if it has several.
        files (`Sequence[str]`): Results files that the page shows, in this order, as far as they are there.
        tables (`Callable`): The paragraphs and tables of a result; it is given the result and the path of its file.
        order (`int`): The reports of a page are sorted by this number, then by the names of the scripts.
    """

    page: str
    files: Sequence[str]
    tables: Callable[[Result, str], Iterable[str]]
    order: int = 0

    def render(self, result: Result, file: str) -> str:
        """The Markdown of one results file."""
        return "\n\n".join(self.tables(result, f"benchmarks/results/{file}"))

    def render_all(self, results: Mapping[str, Result]) -> list[str]:
        """The Markdown of all its results files, one after the other."""
        return [self.render(result, file) for file, result in results.items()]


def by(rows: Rows, column: str, *keys: str) -> Rows:
    """A row for each combination of `keys`; it holds the rows of that combination under their value in `column`."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        own = {key: row[key] for key in keys}
        combined = found.setdefault(tuple(own.values()), own)
        combined[row[column]] = row

    return [*found.values()]


def sources_line(results: Mapping[str, Result]) -> str:
    """Where the figures of several results files come from, in one line."""
    sources = []
    for file, result in results.items():
        origin = result["provenance"]
        threads = f"{origin['threads']} threads"
        sources.append(
            f"`benchmarks/results/{file}` (commit `{origin['commit'][:7]}`, {origin['date'][:10]}, {threads})"
        )

    return f"Sources: {'; '.join(sources)}."


def without_earlier(rows: Rows) -> Rows:
    """Rows that are not of an earlier drafter: files hold it for comparison, pages show what is there now."""
    return [row for row in rows if row["method"] != EARLIER]


def named(values: Iterable[str], template: str) -> dict[str, str]:
    """A column for each value, headed by the name that readers know it by; `@` in the template stands for the value."""
    columns = {}
    for value in values:
        heading = fill("{value:set}", {"value": value})
        columns[heading] = template.replace("@", value)

    return columns


def speed_by_set(result: Result) -> list[str]:
    """A table for each way of decoding: a line for each method, with speed-up and acceptance length of each prompt set."""
    measured = [row for row in result["rows"] if row.get("speedup") is not None]
    order = distinct(measured, "method")
    rows = sorted(by(measured, "set", "decoding", "method"), key=lambda row: order.index(row["method"]))
    shown = "{@/speedup:.2f}x ({@/speedup_interval:~.2f}), {@/acceptance_length_pooled:.2f} tokens"
    sets = named(distinct(measured, "set"), shown)

    tables = []
    for decoding in distinct(measured, "decoding"):
        tables.append(table({decoding: "{method}", **sets}, where(rows, decoding=decoding)))
    return tables


def setting(result: Result, plain: str, inflated: str) -> str:
    """What was measured, in words: the models as they are, or inflated to a shape."""
    shape = result["provenance"]["shape"]
    return plain if shape == "None" else f"{inflated} inflated to `{shape}`"
