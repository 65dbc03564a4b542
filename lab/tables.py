"""Markdown tables from results, in which a column is a heading and a template that is filled from each row."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers_falcon_spec.evaluation.prompts import SET_NAMES

NONE = "-"
Result = dict[str, Any]
Row = Mapping[str, Any]
Columns = Mapping[str, str] | Sequence[tuple[str, str]]
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_FIELD = re.compile(r"\{(?P<path>[^{}:]+)(?::(?:(?P<factor>[\d.e-]+)\*)?(?P<spec>[^{}]*))?\}")


class _MissingError(Exception):
    """A template names what a row does not have."""


def fill(template: str, row: Row) -> str:
    """Fill a template with the values of a row; the result is a dash if the row lacks one of them.

    A field is a path of keys and, after a colon, a factor and a format, both optional. Lists are joined by spaces or,
    with `~` before the format, as the ends of an interval. The format `set` gives the readers' name of a prompt set;
    `MiB` and `GiB` divide bytes.

    Example:

    ```python
    >>> row = {"set": "gsm8k", "cost": {"seconds": 0.0125, "interval": [0.01, 0.015]}}
    >>> fill("{set:set}: {cost/seconds:1000*.1f} ms ({cost/interval:1000*~.0f})", row)
    'GSM8K: 12.5 ms (10 to 15)'
    >>> fill("{cost/tokens} tokens", row)
    '-'

    ```
    """

    def field(match: re.Match[str]) -> str:
        value: Any = row
        for key in match["path"].split("/"):
            value = value.get(key) if isinstance(value, Mapping) else value[int(key)]
            if value is None:
                raise _MissingError

        return _formatted(value, match["spec"] or "", float(match["factor"] or 1))

    try:
        return _FIELD.sub(field, template)
    except _MissingError:
        return NONE


def _formatted(value: Any, spec: str, factor: float) -> str:
    if spec == "set":
        return SET_NAMES.get(value, str(value))
    if spec in _UNITS:
        return f"{value / _UNITS[spec]:.1f}"
    if isinstance(value, (list, tuple)):
        parts = [_formatted(part, spec.removeprefix("~"), factor) for part in value]
        return (" to " if spec.startswith("~") else " ").join(parts)

    return format(value if factor == 1 else factor * value, spec)


def table(columns: Columns, rows: Iterable[Row]) -> str:
    """A Markdown table with a line for each row; what would end a cell or a line is escaped."""
    pairs = columns.items() if isinstance(columns, Mapping) else columns
    headings, templates = zip(*pairs, strict=True)
    lines = [_line(headings), _line(["---"] * len(headings))]
    for row in rows:
        cells = []
        for template in templates:
            in_one_line = " ".join(fill(template, row).split())
            cells.append(in_one_line.replace("|", "\\|"))
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a field, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def where(rows: Iterable[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The rows that hold these values."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def total(rows: Iterable[Mapping[str, Any]], key: str) -> Any:
    """The sum of a field."""
    return sum(row[key] for row in rows)


def machine(origin: Mapping[str, Any]) -> str:
    """The device of a provenance, without the list of a processor's further instructions."""
    return re.sub(r"(, [a-z0-9_]+)+\)$", ")", origin["device"])


def source_line(result: Result, path: str) -> str:
    """The line that says where the numbers of a results file come from."""
    origin = result["provenance"]
    versions = origin["versions"]
    known = [package for package in ("torch", "transformers") if package in versions]
    software = ", ".join(f"{package} {versions[package]}" for package in known)

    return (
        f"Source: `{path}`; commit `{origin['commit'][:7]}`, {origin['date'][:10]}, {machine(origin)}, "
        f"{origin['threads']} threads, seed {origin['seed']}, {software}."
    )
