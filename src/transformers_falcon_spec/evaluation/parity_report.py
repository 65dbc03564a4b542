"""The parity report: counts of verdicts with confidence intervals, as JSON and as one HTML page."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .pages import render
from .parity import VERDICTS
from .summary import wilson_interval

Result = dict[str, Any]  # a `ParityResult` as a line of the records file holds it


def report_of(results: Sequence[Result], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file, which are also all that the page shows."""
    by_decoding = {name: [result for result in results if result["decoding"] == name] for name in decodings}
    rows = [row(name, found) for name, found in by_decoding.items()]
    return {"provenance": provenance, "totals": totals(results), "rows": rows}


def render_page(report: dict[str, Any]) -> str:
    """The report as one HTML file that needs nothing else."""
    return render("parity.html", report)


def checked_result(entry: Result, path: Path) -> Result:
    """A line of the records file as the report needs it.

    Raises:
        [`OptionError`]: the line does not describe its difference, as in files of older versions.
    """
    is_explained = entry["verdict"] == "identical" or entry.get("difference") is not None
    if entry["verdict"] not in VERDICTS or not is_explained:
        raise OptionError(
            f"`{path}` must say why texts differ, but its line for {entry['set_name']} {entry['prompt_id']} "
            "does not: an older version began it. Delete it, or write to another file."
        )
    return {"num_steps": 0, **entry}


def tally(results: Sequence[Result]) -> dict[str, Any]:
    """Count each verdict, with its share and 95 % interval, and the tokens a step of the identical texts."""
    counts = Counter(result["verdict"] for result in results)
    identical = _sums([result for result in results if result["verdict"] == "identical"])
    return {
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "num_prompts": len(results),
        **_sums(results),
        "tokens_per_step": identical["num_tokens"] / identical["num_steps"] if identical["num_steps"] else None,
        "shares": {
            verdict: {"share": count / len(results), "interval": wilson_interval(count, len(results))}
            for verdict, count in ((verdict, counts[verdict]) for verdict in VERDICTS)
        },
    }


def row(decoding: str, results: Sequence[Result]) -> dict[str, Any]:
    """The counts of one decoding, also for each prompt set, and its differences."""
    by_set: dict[str, Counter[str]] = {}
    for result in results:
        by_set.setdefault(result["set_name"], Counter())[result["verdict"]] += 1
    return {
        "decoding": decoding,
        **tally(results),
        "by_set": {name: {verdict: counts[verdict] for verdict in VERDICTS} for name, counts in by_set.items()},
        "differences": [result for result in results if result["verdict"] != "identical"],
    }


def totals(results: Sequence[Result]) -> dict[str, Any]:
    """The counts of all decodings; a prompt counts once, with its worst verdict, since its texts are dependent."""
    worst: dict[tuple[str, str], Result] = {}
    for result in sorted(results, key=lambda result: VERDICTS.index(result["verdict"])):
        worst[result["set_name"], result["prompt_id"]] = result
    return tally(list(worst.values())) | {"num_texts": len(results), **_sums(results)}


def _sums(results: Sequence[Result]) -> dict[str, int]:
    return {name: sum(result[name] for result in results) for name in ("num_tokens", "num_steps")}
