"""Markdown tables from results, in which a column is a heading and a template that is filled from each row."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .prompts import SET_NAMES

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
    pairs = [*(columns.items() if isinstance(columns, Mapping) else columns)]
    header = [[heading for heading, _ in pairs], ["---"] * len(pairs)]
    body = [[" ".join(fill(cell, row).split()).replace("|", "\\|") for _, cell in pairs] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [*header, *body])


def source_line(result: Result, path: str) -> str:
    """The line that says where the numbers of a results file come from."""
    origin = result["provenance"]
    versions = ", ".join(f"{package} {number}" for package, number in origin["versions"].items())
    return (
        f"Source: `{path}`; commit `{origin['commit'][:12]}`, {origin['date'][:10]}, {origin['device']}, "
        f"{origin['threads']} threads, seed {origin['seed']}; {versions}."
    )


def parity(result: Result, path: str, title: str | None = None) -> str:
    """The table of a results file of `falcon-spec parity`: how many texts are the target's own, by decoding."""
    dtype, limit = (result["provenance"].get(key) for key in ("dtype", "max_new_tokens"))
    columns = {
        "decoding": "{decoding}",
        "prompts": "{num_prompts}",
        "tokens": "{num_tokens}",
        "tokens a step": "{tokens_per_step:.2f}",
        "identical": "{identical}",
        "proven ties": "{tie}",
        "different": "{bug}",
    }
    heading = f"### The same text{f': {title}' if title else ''}"
    limits = f"At most {limit} new tokens a text, {dtype}."
    return "\n\n".join([heading, limits, table(columns, result["rows"]), source_line(result, path)])


def calibration(result: Result, path: str) -> str:
    """The tables of a results file of `falcon-spec calibrate`: errors before and after, and the temperatures."""
    columns = [
        ("decoding", "{decoding}"),
        ("lists", "{num_lists}"),
        ("error of the best node, before", "{before/best_nodes/error:.3f}"),
        ("after", "{after/best_nodes/error:.3f}"),
        ("luck alone", "{after/best_nodes/error_by_luck:.3f}"),
        ("error of 8 nodes, before", "{before/all_nodes/error:.4f}"),
        ("after", "{after/all_nodes/error:.4f}"),
        ("loss before", "{before/loss:.3f}"),
        ("saved (95 % interval)", "{loss_saved:.3f} ({loss_saved_interval:~.3f})"),
    ]
    folds = [{"what": f"all but fold {n}", **fit} for n, fit in enumerate(result["fits_of_folds"], start=1)]
    names = {"greedy, by place": "{greedy:.2f}", "sampled, by place": "{sampled:.2f}"}
    fitted = table({"temperatures fitted to": "{what}", **names}, [{"what": "all prompts", **result["fit"]}, *folds])
    return "\n\n".join([table(columns, result["rows"]), fitted, source_line(result, path)])
