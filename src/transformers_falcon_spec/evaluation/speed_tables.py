"""Markdown tables of a results file of `falcon-spec bench`: speed, acceptance, time of a step, memory and failures."""

from typing import Any

from .methods import BASELINE
from .speed_results import Result, Row, changes_greedy_text, failure_of, failures, in_current_form, is_complete
from .tables import fill, source_line, table

_COSTS = {
    "plain step": "{plain step}",
    "drafting": "{draft_seconds_per_step:1000*.1f}",
    "verifying": "{verify_seconds_per_step:1000*.1f}",
    "elsewhere": "{other_seconds_per_step:1000*.1f}",
    "overhead": "{overhead_share:.1%}",
    "acceptance by depth": "{acceptance_by_depth:.2f}",
}
_MEMORY = {
    "target": "{target}",
    "method": "{arm}",
    "peak of the process, MiB": "{peak_bytes:MiB}",
    "peak on the device, MiB": "{peak_device_bytes:MiB}",
}


def speed(result: Result, path: str) -> str:
    """The tables of speed-up, acceptance, and where the time of a step goes."""
    result = in_current_form(result)
    lead, rows = _lead(result), [_shown(result, row) for row in result["rows"]]
    parts = [
        "### Speed against the target alone",
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids. "
        "The gate is 0.9 x\nacceptance length / (cost of a step in plain steps): what the measured costs allow.",
        table({**lead, **_rates(result)}, rows),
        "Where a step's time goes, in milliseconds:",
        table({**lead, **_COSTS}, rows),
    ]
    return "\n\n".join([*parts, *_memory(result), *_failed(result), source_line(result, path)])


def _lead(result: Result) -> dict[str, str]:
    """The first columns: target, method, set and decoding; target or method is left out if there is one only."""
    methods = [method for method in result["methods"] if method["arm"] != BASELINE]
    columns = {"target": "target", "method": "arm"}
    varying = {head: f"{{{key}}}" for head, key in columns.items() if len({each[key] for each in methods}) > 1}
    return {**varying, "set": "{set:set}", "decoding": "{decoding}"}


def _rates(result: Result) -> dict[str, str]:
    """The columns on speed and acceptance; results of earlier versions hold fewer numbers."""
    decode: dict[str, str] = {}
    lengths = {"acceptance length": "{acceptance_length_pooled:.2f}"}
    if any(row["acceptance_length_per_request"] is not None for row in result["rows"]):
        decode = {"without prefill": "{decode_speedup:.2f}x"}
        lengths = {
            "acceptance length, pooled": "{acceptance_length_pooled:.2f}",
            "mean over requests": "{acceptance_length_per_request:.2f}",
            "alpha": "{alpha:.2f}",
        }
    rates = {"speed-up (95 % interval)": "{speed-up}", **decode, "gate": "{gate:.2f}x", **lengths}
    return {**rates, "repeated 4-grams": "{repetition_rate:.0%}", "identical": "{same}"}


def _shown(result: Result, row: Row) -> dict[str, Any]:
    """A row as the table shows it: one whose runs are missing says why instead of giving numbers."""
    if not is_complete(row):
        why = failure_of(result, row)
        return {key: row[key] for key in ("target", "arm", "set", "decoding")} | {"speed-up": why, "plain step": why}
    same = fill("{num_identical}/{num_compared}", row)
    return {
        **row,
        "speed-up": fill("**{speedup:.2f}x** ({speedup_interval:~.2f})", row),
        "plain step": fill("{plain_seconds_per_step:1000*.1f}", row),
        "same": f"**{same}: greedy text changed**" if "num_compared" in row and changes_greedy_text(row) else same,
    }


def _memory(result: Result) -> list[str]:
    """The table of each method's peak memory, if it was measured."""
    measured = [method for method in result["methods"] if method.get("peak_bytes") is not None]
    return ["Peak memory, each method in a process of its own:", table(_MEMORY, measured)] if measured else []


def _failed(result: Result) -> list[str]:
    """A line for each method that did not finish."""
    found = [(each["arm"], each["target"], " ".join(each["failure"]["text"].split())) for each in failures(result)]
    lines = [f"- `{method}` on `{target}` {text}".replace("|", "\\|") for method, target, text in found]
    return ["Not finished:", "\n".join(lines)] if lines else []
