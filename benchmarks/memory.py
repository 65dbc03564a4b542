"""Peak memory of a whole process that writes the same texts with and without the drafter.

Command: python -m benchmarks.memory
Hardware and time: two CPU cores, about a minute. Each method runs in processes of its own, in turn; the figure is the
operating system's peak resident size, so it holds Python, torch and the allocator's reserve too. Writes
`benchmarks/results/memory.json`.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.report import Report, Result, source_line, table
from transformers_falcon_spec.commands.memory import MemoryRun, Peak
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
METHODS = {"loaded": "target loaded, nothing written", "alone": "target alone", "drafted": "target with drafter"}


def main() -> None:
    """Run every method `repeats` times in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "gsm8k.jsonl"))
    parser.add_argument("--limit", type=int, default=5, help="texts to write, 128 tokens each")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    common = {"target": args.target, "prompts": [args.prompts], "threads": torch.get_num_threads()}
    runs = {
        "loaded": MemoryRun(**common, source=None, limit=0),
        "alone": MemoryRun(**common, source=None, limit=args.limit),
        "drafted": MemoryRun(**common, source=args.drafter, limit=args.limit),
    }
    peaks: dict[str, list[Peak]] = {method: [] for method in METHODS}
    for _ in range(args.repeats):
        for method, run in runs.items():
            peaks[method].append(run.measure())
    rows = [_median(f"peak, {text}", [peak.peak_bytes for peak in peaks[method]]) for method, text in METHODS.items()]
    pairs = zip(peaks["drafted"], peaks["alone"], strict=True)
    rows.append(
        _median("with drafter less alone", [drafted.peak_bytes - alone.peak_bytes for drafted, alone in pairs])
    )
    rows.append(_median("of it the drafter's weights", [peak.weight_bytes for peak in peaks["drafted"]]))
    result = {
        "provenance": provenance(seed=0, **vars(args)),
        "description": [
            f"Peak resident size of whole processes, median of {args.repeats}, {args.limit} texts of 128 tokens."
        ],
        "rows": rows,
    }
    (HERE / "results" / "memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _median(name: str, values: list[int]) -> dict[str, object]:
    return {"name": name, "bytes": statistics.median(values), "runs": values}


def tables(result: Result, path: str) -> list[str]:
    """Peak memory."""
    columns = {"": "{name}", "peak memory, MiB": "{bytes:MiB}"}
    return ["### Memory", *result["description"], table(columns, result["rows"]), source_line(result, path)]


REPORT = Report("docs/benchmarks.md", ["memory.json"], tables, order=1)


if __name__ == "__main__":
    main()
