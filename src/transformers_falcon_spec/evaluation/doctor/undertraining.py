"""Whether a drafter has learned too little: its first drafted tokens, and the rows that it read in training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...drafters.compatibility.mismatches import Finding
from ...training.run_plan import MOST_STEPS, ROWS_PER_STEP
from ..summary import wilson_interval
from .expectation import TRAINING_RECORD
from .findings import UNDERTRAINED, Section
from .weight_files import folder_of

# What training reads unless told otherwise, and the share of best first guesses that were right then, small target.
TRAINED_ROWS, TRAINED_SHARE = MOST_STEPS * ROWS_PER_STEP, 0.75
FAR_BELOW = 0.5  # of that share


def training_record(name: str) -> dict[str, Any]:
    """The record of the training of the drafter called `name`; empty where there is none."""
    path = (folder_of(name) or Path(name)) / TRAINING_RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def num_rows_read(record: Mapping[str, Any]) -> int | None:
    """The rows that a drafter read, those of each epoch counted; None where its record does not say so."""
    epochs = max((row["epoch"] for row in record.get("curve", []) if "epoch" in row), default=None)
    return None if epochs is None or "num_examples" not in record else round(epochs * record["num_examples"])


def undertraining(num_rows: int | None, acceptance: Section, explained_by: Sequence[str]) -> Finding | None:
    """The fault of a drafter that read few rows and whose first tokens are kept far too seldom to be luck."""
    if num_rows is None or num_rows >= TRAINED_ROWS or explained_by or not acceptance["by_depth"]:
        return None
    share, num_steps = acceptance["by_depth"][0], acceptance["num_steps"]
    if wilson_interval(round(share * num_steps), num_steps)[1] >= FAR_BELOW * TRAINED_SHARE:
        return None
    missing = TRAINED_ROWS - num_rows
    return Finding(
        UNDERTRAINED,
        f"The drafter has learned too little: {share:.0%} of its first tokens are kept, and it read {num_rows:,} "
        f"rows in its training. Of a small Falcon that read {TRAINED_ROWS:,}, about {TRAINED_SHARE:.0%} of the best "
        "first tokens were right.",
        f"Train it on with about {missing:,} more rows, {missing // ROWS_PER_STEP:,} steps of {ROWS_PER_STEP}; "
        "conversations that it has not read teach more than the same ones again: `falcon-spec train --drafter ...`.",
    )
