"""The results of `falcon-spec bench` as Markdown: speed, acceptance, where the time of a step goes, memory, and what failed."""

from typing import Any

from .methods import BASELINE
from .speed_results import Result, Row, changes_greedy_text, failure_of, failures, is_complete, today
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
    """Speed-up, acceptance, and where the time of a step goes."""
    result = today(result)
    lead, rows = _lead(result), [_shown(result, row) for row in result["rows"]]
    parts = [
        "### Speed against the target alone",
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids. The gate is 0.9 x\n"
        "acceptance length / (cost of a step in plain steps): what the measured costs allow.",
        table({**lead, **_rates(result)}, rows),
        "Where a step's time goes, in milliseconds:",
        table({**lead, **_COSTS}, rows),
        *_memory(result),
        *_failed(result),
        source_line(result, path),
    ]
    return "\n\n".join(parts)


def _lead(result: Result) -> dict[str, str]:
    """The first columns: target, method, set and decoding; target or method is left out where there is one."""
    methods = [method for method in result["methods"] if method["arm"] != BASELINE]
    columns = {"target": "target", "method": "arm"}
    several = {
        heading: f"{{{key}}}" for heading, key in columns.items() if len({method[key] for method in methods}) > 1
    }
    return {**several, "set": "{set:set}", "decoding": "{decoding}"}


def _rates(result: Result) -> dict[str, str]:
    """Speed and acceptance; results of earlier versions hold fewer numbers."""
    has_requests = any(row["acceptance_length_per_request"] is not None for row in result["rows"])
    pooled, decode = "{acceptance_length_pooled:.2f}", {"without prefill": "{decode_speedup:.2f}x"}
    lengths = {"acceptance length": pooled}
    if has_requests:
        lengths = {
            "acceptance length, pooled": pooled,
            "mean over requests": "{acceptance_length_per_request:.2f}",
            "alpha": "{alpha:.2f}",
        }
    return {
        "speed-up (95 % interval)": "{speed-up}",
        **(decode if has_requests else {}),
        "gate": "{gate:.2f}x",
        **lengths,
        "repeated 4-grams": "{repetition_rate:.0%}",
        "identical": "{same}",
    }


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
    """Peak memory of each method, where it was measured."""
    measured = [method for method in result["methods"] if method.get("peak_bytes") is not None]
    return ["Peak memory, each method in a process of its own:", table(_MEMORY, measured)] if measured else []


def _failed(result: Result) -> list[str]:
    """A line for each method that did not finish."""
    lines = [
        f"- `{method['arm']}` on `{method['target']}` {' '.join(method['failure']['text'].split())}".replace(
            "|", "\\|"
        )
        for method in failures(result)
    ]
    return ["Not finished:", "\n".join(lines)] if lines else []
