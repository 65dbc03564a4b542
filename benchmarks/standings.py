"""Who leads: drafters of ours beside the best rival, which is one method over all prompt sets together."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks.report import table
from benchmarks.running import Runs, beside, by_method
from transformers_falcon_spec.evaluation.methods import BASELINE
from transformers_falcon_spec.evaluation.summary import pooled_tokens_per_second

POOLED = "all sets"
COLUMNS = {
    "decoding": "{decoding}",
    "drafter": "{method}",
    "beside": "{other}",
    "times as fast (95 % interval)": "{ratio:.2f} ({interval:~.2f})",
    "rivals ahead": "{ahead}",
}


def standings(records: Runs, ours: Sequence[str]) -> list[dict[str, Any]]:
    """Each drafter of ours beside the best rival on all prompts together, for each decoding.

    `ahead` names the rivals that are faster by the point, with how many times as fast they are. Without rivals there is nothing to stand beside.

    Args:
        records (`list[dict]`): Runs with `decoding`, `method`, `set`, `prompt`, `num_tokens` and `seconds`.
        ours (`Sequence[str]`): Names of the drafters that are held against all others.
    """
    rows = []
    for decoding, runs in by_method(records).items():
        rivals = dict(runs)
        for method in (BASELINE, *ours):
            rivals.pop(method, None)
        if not rivals:
            continue

        best = max(rivals, key=lambda method: pooled_tokens_per_second(rivals[method]))
        for method in ours:
            if method in runs:
                row = {"decoding": decoding, "set": POOLED, "method": method, "other": best}
                rows.append({**row, **beside(runs[method], runs[best]), "ahead": ahead_of(runs[method], rivals)})

    return rows


def ahead_of(runs: Runs, rivals: dict[str, Runs]) -> str:
    """The rivals that are faster than `runs` by the point, the fastest first, or `none`."""
    rate = pooled_tokens_per_second(runs)
    ahead = []
    for name, each in rivals.items():
        ratio = pooled_tokens_per_second(each) / rate
        if ratio > 1:
            ahead.append((ratio, name))

    ahead.sort(key=itemgetter(0), reverse=True)
    return ", ".join(f"{name} {ratio:.2f}" for ratio, name in ahead) or "none"


def standings_table(rows: list[dict[str, Any]]) -> str:
    """The table of [`standings`] beside the best rival, on all sets together; results files have the rest."""
    return table(COLUMNS, [row for row in rows if row["set"] == POOLED and row["ahead"] is not None])
