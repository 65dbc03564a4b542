"""What benchmarks have in common that run arms prompt by prompt: resume, sum up, say where figures come from, print."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.summary import summarize
from transformers_falcon_spec.provenance import provenance


def run_and_save(
    benchmark: Benchmark,
    output: Path,
    args: argparse.Namespace,
    more: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda _records: {},
) -> None:
    """Measure what is not yet in the `.jsonl` beside `output`, and write `output`, with `more` that follows from the runs."""
    outcome = benchmark.run(output.with_suffix(".jsonl"))
    records = outcome.complete()
    rows = summarize(records)
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    result = {"provenance": origin, "methods": benchmark.describe(outcome), "rows": rows, **more(records)}
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in sorted(rows, key=lambda row: (row["decoding"], row["set"], -row["speedup"])):
        low, high = row["speedup_interval"]
        speed = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"
        length = f"{row['acceptance_length_pooled']:.2f}"
        print(f"{row['decoding']:16s} {row['set']:10s} {row['arm']:30s} {speed}, length {length}")
