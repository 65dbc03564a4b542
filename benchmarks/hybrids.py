"""Texts of targets with recurrent layers, beside plain decoding, in each way in which people use them.

Command: python -m benchmarks.hybrids
Hardware and time: one CPU core, about an hour. Targets are tiny and random, in float32, made from
the table in `tests/families.py`; the ways are those of `tests/hybrids.py`. One drafter knows most of the coming text, another
one drafts at random; both draft in every step. Each line is kept in a `.jsonl` file beside the output, so that an interrupted
run goes on where it stopped. Writes `benchmarks/results/hybrids.json`; `python -m benchmarks.report` renders it into
`docs/results.md`.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.report import Report, Result, source_line, table
from benchmarks.running import run_cases
from tests.families import CHAINS, RECURRENT
from tests.hybrids import DRAFTERS, USES
from tests.tiny import make_target
from transformers_falcon_spec import GenerationStats

HERE = Path(__file__).parent
SEED = 7  # of weights
NUM_CALLS = 50  # in each way
COLUMNS = {
    "way": "{use}",
    "drafter": "{drafter}",
    "families": "{num_families}",
    "calls": "{num_calls}",
    "as without a drafter": "{num_same}",
    "tokens a step": "{tokens_per_step:.2f}",
}


def measure(family: str, use: str, drafter: str, seed: int = SEED, num_calls: int = NUM_CALLS) -> dict[str, Any]:
    """How many calls of one family give what plain decoding gives."""
    target = make_target(family, seed=seed)
    total, num_same = GenerationStats(), 0
    for call in range(num_calls):
        outcome = USES[use](target, call, DRAFTERS[drafter])
        num_same += outcome.is_same
        total = total + outcome.stats

    return {
        "family": family,
        "use": use,
        "drafter": drafter,
        "num_calls": num_calls,
        "num_same": num_same,
        "num_steps": total.num_steps,
        "num_accepted": total.num_accepted,
    }


def main() -> None:
    """Measure what is not measured yet, then write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "hybrids.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)

    settings = {"seed": SEED, "calls": NUM_CALLS}
    families = dict.fromkeys([*RECURRENT, *CHAINS])
    cases = list(product(families, USES, DRAFTERS))
    origin, rows = run_cases(args.output, settings, ("family", "use", "drafter"), cases, measure)

    result = {"provenance": origin, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tables(result: Result, path: str) -> list[str]:
    """A row for each way and drafter, over all families."""
    rows = []
    for use in USES:
        for drafter in DRAFTERS:
            own = [row for row in result["rows"] if (row["use"], row["drafter"]) == (use, drafter)]
            sums = {
                name: sum(row[name] for row in own) for name in ("num_calls", "num_same", "num_steps", "num_accepted")
            }
            tokens_per_step = 1 + sums["num_accepted"] / sums["num_steps"]
            names = {"use": use.replace("_", " "), "drafter": drafter, "num_families": len(own)}
            rows.append({**names, **sums, "tokens_per_step": tokens_per_step})

    return [table(COLUMNS, rows), source_line(result, path)]


REPORT = Report("docs/results.md#hybrids", ["hybrids.json"], tables)


if __name__ == "__main__":
    main()
