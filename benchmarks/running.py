"""What benchmarks have in common that run methods prompt by prompt: resume, sum up, say where figures come from, print."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_speedup, summarize
from transformers_falcon_spec.provenance import current_commit, provenance
from transformers_falcon_spec.records import Records

SETS = [str(Path(__file__).parent / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]
Runs = list[dict[str, Any]]
Turns = list[dict[str, float]]  # seconds of every method


def by_method(records: Runs) -> dict[str, dict[str, Runs]]:
    """For each decoding the runs of every method."""
    found: dict[str, dict[str, Runs]] = {}
    for record in records:
        found.setdefault(record["decoding"], {}).setdefault(record["method"], []).append(record)
    return found


def beside(runs: Runs, others: Runs) -> dict[str, Any]:
    """How many times as fast one method is as another, prompt by prompt over all sets."""
    found = {(run["set"], run["prompt"]): run for run in others}
    pairs = [(run, found[run["set"], run["prompt"]]) for run in runs]
    interval = bootstrap(pairs, pooled_speedup, 0)
    return {"num_prompts": len(pairs), "ratio": pooled_speedup(pairs), "interval": interval}


def times_as_fast(turns: Turns, method: str, other: str) -> dict[str, Any]:
    """The middle ratio over turns, and its interval."""

    def ratio(chosen: Turns) -> float:
        return median(turn[other] / turn[method] for turn in chosen)

    return {"ratio": ratio(turns), "interval": bootstrap(turns, ratio, 0)}


def same_run(origin: dict[str, Any]) -> dict[str, Any]:
    """What of its provenance a run must share with the one that it goes on from."""
    return {name: value for name, value in origin.items() if name not in ("date", "command", "output")}


def check_commit(runs: Path) -> None:
    """Refuse to go on with runs of another commit, which no table would show together: [`OptionError`]."""
    if not runs.is_file():
        return

    others = set()
    for line in runs.read_text(encoding="utf-8").splitlines():
        row = json.loads(line) if line.endswith("}") else {}
        if row.get("commit", current_commit()) != current_commit():
            others.add(row["commit"])

    if others:
        raise OptionError(
            f"`{runs.name}` must hold runs of one commit, but it has some of {sorted(others)}, and this is "
            f"{current_commit()}. Go on in a checkout of that commit, or delete the file."
        )


def run_cases(
    output: Path,
    settings: dict[str, Any],
    names: Sequence[str],
    cases: Sequence[tuple[str, ...]],
    measure: Callable[..., dict[str, Any]],
) -> tuple[dict[str, Any], Runs]:
    """Measure the cases that the `.jsonl` beside `output` does not hold yet; returns the provenance and all rows.

    `names` are the fields of a row that say which case it is. The commit is that of the code that has been loaded, whatever is committed meanwhile.
    """
    origin = provenance(**settings)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    records = Records(output.with_suffix(".jsonl"), settings | versions)
    known = {tuple(row[name] for name in names) for row in records.entries}
    coming = [case for case in cases if case not in known]
    for case in tqdm(coming, desc="cases"):
        records.append(measure(*case))

    return origin, records.entries


def run_and_save(
    benchmark: Benchmark,
    output: Path,
    args: argparse.Namespace,
    more: Callable[[Runs], dict[str, Any]] = lambda _records: {},
) -> None:
    """Measure what is not yet in the `.jsonl` beside `output`, and write `output`, with `more` that follows from the runs."""
    check_commit(output.with_suffix(".jsonl"))
    records = benchmark.run(output.with_suffix(".jsonl"))
    rows = summarize(records)
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    result = {"provenance": origin, "methods": benchmark.describe(records), "rows": rows, **more(records)}
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for row in sorted(rows, key=lambda row: (row["decoding"], row["set"], -row["speedup"])):
        low, high = row["speedup_interval"]
        speed = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"
        length = f"{row['acceptance_length_pooled']:.2f}"
        print(f"{row['decoding']:16s} {row['set']:10s} {row['method']:30s} {speed}, length {length}")
