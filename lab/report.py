"""Shows results of `falcon-spec bench`, `parity` and `lab.calibration` as Markdown tables, between markers of documents."""

from collections.abc import Iterable
from pathlib import Path

from lab.tables import fill, source_line, table
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import BASELINE
from transformers_falcon_spec.evaluation.summary import Record, changes_greedy_text

_RATES = {
    "speed-up (95 % interval)": "{speed-up}",
    "without prefill": "{decode_speedup:.2f}x",
    "gate": "{gate:.2f}x",
    "acceptance length": "{acceptance_length_pooled:.2f}",
    "identical": "{same}",
}
_COSTS = {
    "plain step": "{plain step}",
    "drafting": "{draft_seconds_per_step:1000*.1f}",
    "verifying": "{verify_seconds_per_step:1000*.1f}",
    "elsewhere": "{other_seconds_per_step:1000*.1f}",
    "overhead": "{overhead_share:.1%}",
}
_MEMORY = {
    "target": "{target}",
    "method": "{method}",
    "peak of the process, MiB": "{peak_bytes:MiB}",
    "peak on the device, MiB": "{peak_device_bytes:MiB}",
}


def markers(name: str | None = None) -> tuple[str, str]:
    """The lines between which tables stand; a document with several places names each."""
    words = f" {name}" if name else ""
    return f"<!-- results:begin{words} -->", f"<!-- results:end{words} -->"


def write_between_markers(document: Path, tables: Iterable[str], name: str | None = None) -> None:
    """Replace the text between the markers of a document, which must have them, by tables."""
    first, last = markers(name)
    lines = document.read_text(encoding="utf-8").split("\n")
    if first not in lines or last not in lines[lines.index(first) :]:
        raise OptionError(f"`{document}` must hold the lines `{first}` and `{last}`; the tables go between them.")

    begin = lines.index(first)
    end = lines.index(last, begin)
    document.write_text("\n".join([*lines[: begin + 1], "\n\n".join(tables), *lines[end:]]), encoding="utf-8")


def calibration(result: Record, path: str) -> str:
    """The tables of a results file of `lab.calibration`: errors before and after, and the temperatures."""
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
    fitted = fill("Temperatures by block position: greedy {greedy:.2f}, sampled {sampled:.2f}.", result["fit"])
    return "\n\n".join([table(columns, result["rows"]), fitted, source_line(result, path)])


def speed(result: Record, path: str) -> str:
    """The tables of speed-up, acceptance, and where the time of a step goes."""
    lead = _lead(result)
    rows = list(map(_shown, result["rows"]))
    parts = [
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids. "
        "The gate is 0.9 x\nacceptance length / (cost of a step in plain steps): what the measured costs allow.",
        table({**lead, **_RATES}, rows),
        "Where a step's time goes, in milliseconds:",
        table({**lead, **_COSTS}, rows),
    ]
    measured = [method for method in result["methods"] if method.get("peak_bytes") is not None]
    if measured:
        parts += ["Peak memory, each method in a process of its own:", table(_MEMORY, measured)]
    return "\n\n".join([*parts, source_line(result, path)])


def _lead(result: Record) -> dict[str, str]:
    """The first columns: target, method, set and decoding; target or method is left out if there is one only."""
    methods = [method for method in result["methods"] if method["method"] != BASELINE]
    lead = {}
    for key in ("target", "method"):
        if len({method[key] for method in methods}) > 1:
            lead[key] = f"{{{key}}}"

    return {**lead, "set": "{set:set}", "decoding": "{decoding}"}


def _shown(row: Record) -> Record:
    """A row as the table shows it."""
    same = fill("{num_identical}/{num_compared}", row)
    return {
        **row,
        "speed-up": fill("**{speedup:.2f}x** ({speedup_interval:~.2f})", row),
        "plain step": fill("{plain_seconds_per_step:1000*.1f}", row),
        "same": f"**{same}: greedy text changed**" if "num_compared" in row and changes_greedy_text(row) else same,
    }
