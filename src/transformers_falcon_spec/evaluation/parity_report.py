"""The parity report: counts of verdicts with confidence intervals, as JSON and as one HTML page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .pages import render
from .parity import VERDICTS, Choice, Difference, ParityResult
from .summary import wilson_interval
from .tie_checks import Check, Float32Comparison, StepComparison


def report_of(results: Sequence[ParityResult], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file, which are also all that the page shows."""
    by_decoding = {name: [result for result in results if result.decoding == name] for name in decodings}
    return {
        "provenance": provenance,
        "totals": totals(results),
        "rows": [row(name, found) for name, found in by_decoding.items()],
    }


def render_page(report: dict[str, Any]) -> str:
    """The report as one HTML file that needs nothing else."""
    return render("parity.html", report)


def read_result(entry: dict[str, Any], path: Path) -> ParityResult:
    """A result from its line in the records file.

    Raises:
        [`OptionError`]: the line does not describe its difference, as in files of older versions.
    """
    difference = entry.get("difference")
    if entry["verdict"] not in VERDICTS or (entry["verdict"] != "identical" and difference is None):
        raise OptionError(
            f"`{path}` must say why texts differ, but its line for {entry['set_name']} {entry['prompt_id']} "
            "does not: an older version began it. Delete it, or write to another file."
        )
    known = {name: entry[name] for name in (field.name for field in fields(ParityResult)) if name in entry}
    return ParityResult(**{**known, "difference": difference and _difference(difference)})


def _difference(stored: dict[str, Any]) -> Difference:
    comparison = stored["evidence"]
    if comparison is not None:
        float32 = comparison["float32"]
        comparison = StepComparison(**{**comparison, "float32": float32 and Float32Comparison(**float32)})
    parts = {
        "plain": Choice(**stored["plain"]),
        "drafted": Choice(**stored["drafted"]),
        "checks": [Check(**check) for check in stored["checks"]],
        "evidence": comparison,
    }
    return Difference(**{**stored, **parts})


def tally(results: Sequence[ParityResult]) -> dict[str, Any]:
    """Count each verdict, with its share and 95 % interval, and the tokens a step of the identical texts."""
    counts = Counter(result.verdict for result in results)
    identical = [result for result in results if result.verdict == "identical"]
    num_steps = sum(result.num_steps for result in identical)
    return {
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "num_prompts": len(results),
        **_sums(results),
        "tokens_per_step": sum(result.num_tokens for result in identical) / num_steps if num_steps else None,
        "shares": {
            verdict: {"share": count / len(results), "interval": wilson_interval(count, len(results))}
            for verdict, count in ((verdict, counts[verdict]) for verdict in VERDICTS)
        },
    }


def row(decoding: str, results: Sequence[ParityResult]) -> dict[str, Any]:
    """The counts of one decoding, also for each prompt set, and its differences."""
    by_set: dict[str, Counter[str]] = {}
    for result in results:
        by_set.setdefault(result.set_name, Counter())[result.verdict] += 1
    return {
        "decoding": decoding,
        **tally(results),
        "by_set": {name: {verdict: counts[verdict] for verdict in VERDICTS} for name, counts in by_set.items()},
        "differences": [asdict(result) for result in results if result.verdict != "identical"],
    }


def totals(results: Sequence[ParityResult]) -> dict[str, Any]:
    """The counts of all decodings; a prompt counts once, with its worst verdict, since its texts are dependent."""
    worst: dict[tuple[str, str], ParityResult] = {}
    for result in results:
        key = (result.set_name, result.prompt_id)
        if key not in worst or VERDICTS.index(result.verdict) > VERDICTS.index(worst[key].verdict):
            worst[key] = result
    return tally(list(worst.values())) | {"num_texts": len(results), **_sums(results)}


def _sums(results: Sequence[ParityResult]) -> dict[str, int]:
    return {name: sum(getattr(result, name) for result in results) for name in ("num_tokens", "num_steps")}
