"""What each verifier keeps of a draft on the embedded pair, at temperature 0.7, in interleaved runs.

Command: python benchmarks/verifiers.py
Hardware and time: two CPU cores, about four minutes. The trees are the drafter's own, drawn where the rule needs draws.
Writes `benchmarks/results/verifiers.json`, which `falcon-spec report` renders into docs/verifiers.md.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path

from transformers import logging

from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import summarize
from transformers_falcon_spec.generation.options import VERIFIERS
from transformers_falcon_spec.provenance import provenance

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
        arm = copy.copy(drafter)  # the same weights
        arm.generation_config = copy.deepcopy(drafter.generation_config)
        arm.generation_config.verifier, arm.generation_config.tune = verifier, False
        methods.append(with_drafter(verifier, arm))
    benchmark = Benchmark(target, tokenizer, methods, read_prompts(args.prompts, args.limit), ["temperature-0.7"])
    with tempfile.TemporaryDirectory() as folder:
        outcome = benchmark.run(Path(folder) / "runs.jsonl")
    rows = summarize(outcome.complete())
    result = {
        "provenance": provenance(seed=0, **{name: str(value) for name, value in vars(args).items()}),
        "methods": benchmark.describe(outcome),
        "rows": rows,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        low, high = row["acceptance_length_pooled_interval"]
        length = f"{row['acceptance_length_pooled']:.2f} ({low:.2f} to {high:.2f})"
        print(f"{row['set']:10s} {row['arm']:20s} {length}, {row['speedup']:.2f}x")


if __name__ == "__main__":
    main()
