"""Reinforcement learning with drafted rollouts: tokens a step over the run, with a drafter that is distilled on the way and one that is not.

Command: python examples/10_grpo.py --output benchmarks/results/grpo.json, and the same with --frozen --output benchmarks/results/grpo_frozen.json
Hardware and time: one CPU core, about three minutes each.
The example writes the results files, which `python -m benchmarks.report` renders into docs/results.md.
"""

from itertools import pairwise
from typing import Any

from benchmarks.report import Report, Result, Rows, source_line, table, total

NUM_PARTS = 4


def parts_of(rows: Rows) -> list[dict[str, Any]]:
    """A row for each part of the run."""
    edges = [len(rows) * number // NUM_PARTS for number in range(NUM_PARTS + 1)]
    parts = []
    for start, end in pairwise(edges):
        inside = rows[start:end]
        by_step = sorted(1 + row["num_accepted"] / row["num_steps"] for row in inside)
        parts.append(
            {
                "first": start + 1,
                "last": end,
                "reward": total(inside, "reward") / len(inside),
                "acceptance_length": 1 + total(inside, "num_accepted") / total(inside, "num_steps"),
                "range": [by_step[0], by_step[-1]],
                "milliseconds": 1e3 * total(inside, "seconds") / total(inside, "num_tokens"),
                "plain_milliseconds": 1e3 * total(inside, "plain_seconds") / total(inside, "num_plain_tokens"),
                "num_identical": total(inside, "num_identical"),
                "num_rows": total(inside, "num_rows"),
            }
        )
    return parts


def tables(result: Result, path: str) -> list[str]:
    """What the drafter did for the rollouts in each part of the run."""
    drafter = "frozen" if result["provenance"]["frozen"] else "distilled on the way"
    columns = {
        f"drafter {drafter}: steps": "{first} to {last}",
        "reward": "{reward:.2f}",
        "tokens a step (least to most of a training step)": "{acceptance_length:.2f} ({range:~.2f})",
        "processor time of a token": "{milliseconds:.2f} ms",
        "without the drafter": "{plain_milliseconds:.2f} ms",
        "identical": "{num_identical}/{num_rows}",
    }
    return [table(columns, parts_of(result["rows"])), source_line(result, path)]


REPORT = Report("docs/results.md#rollouts", ["grpo.json", "grpo_frozen.json"], tables)
