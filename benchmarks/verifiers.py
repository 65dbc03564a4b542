"""What each verifier keeps of a draft on the embedded pair, at temperature 0.7, in interleaved runs.

Command: python -m benchmarks.verifiers
Hardware and time: two CPU cores, about four minutes; resumes. The trees are the drafter's own, drawn where the rule needs draws.
Writes `benchmarks/results/verifiers.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import copy
from pathlib import Path

from transformers import logging

from benchmarks.report import Report, Result, source_line, table
from benchmarks.running import run_and_save
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.generation.verifier import VERIFIERS

HERE = Path(__file__).parent


def main() -> None:
    """Run every verifier on the same prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument(
        "--prompts", nargs="+", default=[str(HERE / "prompts" / f"{name}.jsonl") for name in ("held_out", "mt_bench")]
    )
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "verifiers.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)

    methods = []
    for verifier in VERIFIERS:
        options = copy.deepcopy(drafter.generation_config)
        options.verifier, options.tune = verifier, False
        methods.append(with_drafter(verifier, with_options(drafter, options)))

    benchmark = Benchmark(target, tokenizer, methods, read_prompts(args.prompts, args.limit), ["temperature-0.7"])
    run_and_save(benchmark, args.output, args)


def tables(result: Result, path: str) -> list[str]:
    """What each rule keeps of a draft, and what a step of it costs."""
    columns = {
        "`verifier`": "`{method}`",
        "set": "{set:set}",
        "tokens per step (95 % interval)": "{acceptance_length_pooled:.2f} ({acceptance_length_pooled_interval:~.2f})",
        "cost of a step in plain steps": "{step_cost:.2f}",
        "speed-up (95 % interval)": "{speedup:.2f}x ({speedup_interval:~.2f})",
    }
    rows = sorted(result["rows"], key=lambda row: row["set"])
    return [table(columns, rows), source_line(result, path)]


REPORT = Report("docs/results.md#verifiers", ["verifiers.json"], tables)


if __name__ == "__main__":
    main()
