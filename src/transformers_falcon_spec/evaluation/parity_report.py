"""The parity report: totals with confidence intervals, the JSON, and one HTML page made from it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .evidence import Check, Evidence, Float32Reading
from .pages import render
from .parity import VERDICTS, Choice, Difference, ParityResult
from .summary import wilson_interval


def report_of(results: Sequence[ParityResult], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The content of the JSON report, from which the HTML page is made, too."""
    by_decoding = {name: [result for result in results if result.decoding == name] for name in decodings}
    return {
        "provenance": provenance,
        "totals": totals(results),
        "rows": [row(name, found) for name, found in by_decoding.items()],
    }


def render_page(report: dict[str, Any]) -> str:
    """One HTML file that needs nothing else; everything that comes from a model or a prompt is escaped."""
    return render("parity.html", report)


def read_result(entry: dict[str, Any], path: Path) -> ParityResult:
    """One result from the line that `asdict` made of it.

    Raises:
        [`OptionError`]: the line says of a difference less than the report needs; older versions wrote such lines.
    """
    difference = entry.get("difference")
    if entry["verdict"] not in VERDICTS or (entry["verdict"] != "identical" and difference is None):
        raise OptionError(
            f"`{path}` must say why texts differ, but its line for {entry['set_name']} {entry['prompt_id']} does not: an "
            "older version began it. Delete it, or write to another file."
        )
    known = {name: entry[name] for name in (field.name for field in fields(ParityResult)) if name in entry}
    return ParityResult(**{**known, "difference": difference and _difference(difference)})


def _difference(stored: dict[str, Any]) -> Difference:
    evidence = stored["evidence"]
    if evidence is not None:
        float32 = evidence["float32"]
        evidence = Evidence(**{**evidence, "float32": float32 and Float32Reading(**float32)})
    parts = {
        "plain": Choice(**stored["plain"]),
        "drafted": Choice(**stored["drafted"]),
        "checks": [Check(**check) for check in stored["checks"]],
        "evidence": evidence,
    }
    return Difference(**{**stored, **parts})


def tally(results: Sequence[ParityResult]) -> dict[str, Any]:
    """Counts of each verdict, its share with a 95 % interval, and how many tokens a step of an identical text brought."""
    counts = Counter(result.verdict for result in results)
    identical = [result for result in results if result.verdict == "identical"]
    num_steps = sum(result.num_steps for result in identical)
    shares = {
        verdict: {
            "share": counts[verdict] / len(results),
            "interval": wilson_interval(counts[verdict], len(results)),
        }
        for verdict in VERDICTS
    }
    return {
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "num_prompts": len(results),
        **{name: sum(getattr(result, name) for result in results) for name in ("num_tokens", "num_steps")},
        "tokens_per_step": sum(result.num_tokens for result in identical) / num_steps if num_steps else None,
        "shares": shares,
    }


def row(decoding: str, results: Sequence[ParityResult]) -> dict[str, Any]:
    """One decoding: its counts, also for each prompt set, and its differences."""
    by_set = {name: Counter(r.verdict for r in results if r.set_name == name) for name in _sets(results)}
    return {
        "decoding": decoding,
        **tally(results),
        "by_set": {name: {verdict: counts[verdict] for verdict in VERDICTS} for name, counts in by_set.items()},
        "differences": [asdict(result) for result in results if result.verdict != "identical"],
    }


def totals(results: Sequence[ParityResult]) -> dict[str, Any]:
    """All decodings together. A prompt counts once, with its worst verdict: its texts are not independent of each other."""
    worst: dict[tuple[str, str], ParityResult] = {}
    for result in results:
        key = (result.set_name, result.prompt_id)
        if key not in worst or VERDICTS.index(result.verdict) > VERDICTS.index(worst[key].verdict):
            worst[key] = result
    return tally(list(worst.values())) | {
        "num_texts": len(results),
        **{name: sum(getattr(result, name) for result in results) for name in ("num_tokens", "num_steps")},
    }


def _sets(results: Sequence[ParityResult]) -> list[str]:
    return list(dict.fromkeys(result.set_name for result in results))
