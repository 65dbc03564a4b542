"""What each verifier keeps of a draft on the embedded pair, at temperature 0.7, in interleaved runs.

Command: python -m benchmarks.verifiers
Hardware and time: two CPU cores, about four minutes; resumes. The trees are the drafter's own, drawn where the rule needs draws.
Writes `benchmarks/results/verifiers.json`, which `falcon-spec report` renders into docs/verifiers.md.
"""

import argparse
import copy
from pathlib import Path

from transformers import logging

from benchmarks.running import run_and_save
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.generation.options import VERIFIERS

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


if __name__ == "__main__":
    main()
