"""The parity report: counts of verdicts with confidence intervals, as JSON and as one HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .parity import VERDICTS
from .summary import wilson_interval

Result = dict[str, Any]  # a `ParityResult` as a line of the records file holds it


def report_of(results: Sequence[Result], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file, which are also all that the page shows."""
    rows = [_row(name, [result for result in results if result["decoding"] == name]) for name in decodings]
    return {"provenance": provenance, "totals": _totals(results), "rows": rows}


def checked_result(entry: Result, path: Path) -> Result:
    """A line of the records file; one that does not describe its difference, of an older version, is refused."""
    is_explained = entry["verdict"] == "identical" or entry.get("difference") is not None
    if entry["verdict"] not in VERDICTS or not is_explained:
        raise OptionError(
            f"`{path}` must say why texts differ, but its line for {entry['set_name']} {entry['prompt_id']} "
            "does not: an older version began it. Delete it, or write to another file."
        )
    return {"num_steps": 0, **entry}


def _tally(results: Sequence[Result]) -> dict[str, Any]:
    """Count each verdict, with its share and 95 % interval, and the tokens a step of the identical texts."""
    counts = _counts(results)
    identical = _sums([result for result in results if result["verdict"] == "identical"])
    return {
        **counts,
        "num_prompts": len(results),
        **_sums(results),
        "tokens_per_step": identical["num_tokens"] / identical["num_steps"] if identical["num_steps"] else None,
        "shares": {
            verdict: {"share": count / len(results), "interval": wilson_interval(count, len(results))}
            for verdict, count in counts.items()
        },
    }


def _row(decoding: str, results: Sequence[Result]) -> dict[str, Any]:
    """The counts of one decoding, also for each prompt set, and its differences."""
    sets = dict.fromkeys(result["set_name"] for result in results)
    return {
        "decoding": decoding,
        **_tally(results),
        "by_set": {name: _counts([result for result in results if result["set_name"] == name]) for name in sets},
        "differences": [result for result in results if result["verdict"] != "identical"],
    }


def _totals(results: Sequence[Result]) -> dict[str, Any]:
    """The counts of all decodings; a prompt counts once, with its worst verdict, since its texts are dependent."""
    by_verdict = sorted(results, key=lambda result: VERDICTS.index(result["verdict"]))
    worst = {(result["set_name"], result["prompt_id"]): result for result in by_verdict}
    return _tally(list(worst.values())) | {"num_texts": len(results), **_sums(results)}


def _counts(results: Sequence[Result]) -> dict[str, int]:
    return {verdict: sum(result["verdict"] == verdict for result in results) for verdict in VERDICTS}


def _sums(results: Sequence[Result]) -> dict[str, int]:
    return {name: sum(result[name] for result in results) for name in ("num_tokens", "num_steps")}
