"""Collect finished training runs into one table: rate, steps, loss and held-out accuracy by place.

Command: python -m benchmarks.training_table --runs runs/rivals/falcon-8k runs/rivals/eagle1-8k
Hardware and time: any, a second. Reads the `training.json` that `falcon-spec train` leaves beside a drafter; its provenance (command,
commit, seed) stays with each row. Writes `benchmarks/results/training.json`, which `falcon-spec report` renders into docs/rivals.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
DESCRIPTION = (
    "The same conversations for all, 8 a step, cosine schedule, one run each, seed 42. Loss and share of best tokens that agree with the",
    "target's, one, two, three ... tokens ahead, on held-out answers. What a loss holds differs from method to method.",
)


def main() -> None:
    """Read, sort and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=Path, nargs="+", required=True, help="folders of trained drafters, each maybe as NAME=FOLDER"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "training.json")
    args = parser.parse_args()
    result = {
        "provenance": provenance(seed=42, runs=[str(run) for run in args.runs]),
        "description": DESCRIPTION,
        "rows": [row_of(run) for run in args.runs],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def row_of(entry: Path) -> dict[str, Any]:
    """What a run says of itself, and the rate that its command names."""
    row = outcome_of(str(entry))
    words = row["command"].split()
    return {**row, "learning_rate": float(words[words.index("--learning_rate") + 1])}


def outcome_of(entry: str) -> dict[str, Any]:
    """What came of the run `NAME=FOLDER`, and what it took."""
    name, _, folder = entry.rpartition("=")
    told = json.loads((Path(folder) / "training.json").read_text(encoding="utf-8"))
    last = next(point for point in reversed(told["curve"]) if "eval_accuracy" in point)
    places = sum(key.startswith("eval_accuracy_at_") for key in last)
    return {
        "name": name or Path(folder).name,
        "num_steps": last["step"],
        "loss": last["eval_loss"],
        "accuracy": [last[f"eval_accuracy_at_{place + 1}"] for place in range(places)],
        **{key: told[key] for key in ("command", "commit", "seed", "train_seconds", "num_examples")},
    }


if __name__ == "__main__":
    main()
