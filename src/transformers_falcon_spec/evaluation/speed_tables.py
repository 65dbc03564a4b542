"""The results of `falcon-spec bench` as Markdown: speed, acceptance, where the time of a step goes, memory, and what failed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .methods import BASELINE
from .speed_results import Result, Row, changes_greedy_text, failure_of, failures, is_whole, today
from .tables import SET_NAMES, source_line, table

NONE = "-"


@dataclass(frozen=True)
class Column:
    """A column: its heading, and its cell of a row."""

    heading: str
    cell: Callable[[Row], str]


def speed(result: Result, name: str) -> str:
    """Speed-up, acceptance, and where the time of a step goes."""
    result = today(result)
    lead = _lead(result)
    parts = [
        "### Speed against the target alone",
        "",
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids. The gate is 0.9 x",
        "acceptance length / (cost of a step in plain steps): what the measured costs allow.",
        "",
        _rows(result, lead, _rates(result)),
        "",
        "Where a step's time goes, in milliseconds:",
        "",
        _rows(result, lead, _COSTS),
        "",
        *_memory(result),
        *_failed(result),
        source_line(result, name),
    ]
    return "\n".join(parts)


def _lead(result: Result) -> list[Column]:
    """What tells rows apart, as far as they differ."""
    methods = [method for method in result["methods"] if method["arm"] != BASELINE]
    several = {key: len({method[key] for method in methods}) > 1 for key in ("target", "arm")}
    columns = [
        Column(heading, _text_of(key)) for key, heading in (("target", "target"), ("arm", "method")) if several[key]
    ]
    return [
        *columns,
        Column("set", _set_name),
        Column("decoding", _text_of("decoding")),
    ]


def _rates(result: Result) -> list[Column]:
    """Speed and acceptance; results of earlier versions hold fewer numbers."""
    has_requests = any(row["acceptance_length_per_request"] is not None for row in result["rows"])
    lengths = [Column("acceptance length", _number("acceptance_length_pooled", ".2f"))]
    if has_requests:
        lengths = [
            Column("acceptance length, pooled", _number("acceptance_length_pooled", ".2f")),
            Column("mean over requests", _number("acceptance_length_per_request", ".2f")),
            Column("alpha", _number("alpha", ".2f")),
        ]
    decode = [Column("without prefill", _number("decode_speedup", ".2f", "x"))] if has_requests else []
    return [
        Column("speed-up (95 % interval)", _speedup),
        *decode,
        Column("gate", _number("gate", ".2f", "x")),
        *lengths,
        Column("repeated 4-grams", _number("repetition_rate", ".0%")),
        Column("identical", _identical),
    ]


def _set_name(row: Row) -> str:
    name = str(row["set"])
    return SET_NAMES.get(name, name)


def _text_of(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _number(key: str, form: str, unit: str = "", factor: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        return NONE if row.get(key) is None else f"{factor * row[key]:{form}}{unit}"

    return cell


def _speedup(row: Row) -> str:
    if "speedup" not in row:
        return NONE
    low, high = row["speedup_interval"]
    return f"**{row['speedup']:.2f}x** ({low:.2f} to {high:.2f})"


def _identical(row: Row) -> str:
    if "num_compared" not in row:
        return NONE
    counts = f"{row['num_identical']}/{row['num_compared']}"
    return f"**{counts}: greedy text changed**" if changes_greedy_text(row) else counts


_COSTS = [
    Column("plain step", _number("plain_seconds_per_step", ".1f", factor=1000)),
    Column("drafting", _number("draft_seconds_per_step", ".1f", factor=1000)),
    Column("verifying", _number("verify_seconds_per_step", ".1f", factor=1000)),
    Column("elsewhere", _number("other_seconds_per_step", ".1f", factor=1000)),
    Column("overhead", _number("overhead_share", ".1%")),
    Column("acceptance by depth", lambda row: " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])),
]


def _rows(result: Result, lead: list[Column], columns: list[Column]) -> str:
    """A table; a row that lacks runs says why instead of giving numbers that others cannot be held against."""
    body = []
    for row in result["rows"]:
        cells = [column.cell(row) for column in columns]
        if not is_whole(row):
            cells = [failure_of(result, row), *[NONE] * (len(columns) - 1)]
        body.append([_escaped(cell) for cell in [*(column.cell(row) for column in lead), *cells]])
    return table([column.heading for column in [*lead, *columns]], body)


def _memory(result: Result) -> list[str]:
    """Peak memory of each method, where it was measured."""
    measured = [method for method in result["methods"] if method.get("peak_bytes") is not None]
    if not measured:
        return []
    header = ["target", "method", "peak of the process, MiB", "peak on the device, MiB"]
    body = [
        [method["target"], method["arm"], *(_mebibytes(method[key]) for key in ("peak_bytes", "peak_device_bytes"))]
        for method in measured
    ]
    return ["Peak memory, each method in a process of its own:", "", table(header, body), ""]


def _mebibytes(num_bytes: int | None) -> str:
    return NONE if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def _failed(result: Result) -> list[str]:
    """A line for each method that did not finish."""
    found: list[dict[str, Any]] = failures(result)
    lines = [f"- `{method['arm']}` on `{method['target']}` {_escaped(method['failure']['text'])}" for method in found]
    return ["Not finished:", "", *lines, ""] if lines else []


def _escaped(cell: str) -> str:
    """Text of an exception must not end a cell or a line."""
    return " ".join(cell.split()).replace("|", "\\|")
