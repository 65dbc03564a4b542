"""What the tuner loses where drafting cannot pay: a drafter with random weights, text unlike the training mix, temperature 1.

Command: python -m benchmarks.no_loss. Hardware and time: two CPU cores and nothing else running, about fifteen minutes; resumes. All arms
are interleaved prompt by prompt. Writes `benchmarks/results/no_loss.json`, which `falcon-spec report` renders into docs/tuning.md.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.running import run_and_save
from transformers_falcon_spec import FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "unlike")]


def main() -> None:
    """Run the drafter and one that knows nothing, tuned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-1"])
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "no_loss.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter: Any = load_drafter(args.drafter, target)
    methods = []
    for name, weights in (("trained", drafter), ("random weights", random_twin(drafter))):
        for kind in (True, False):
            arm = with_options(weights, SpeculationConfig(dynamic_tree=kind))
            methods.append(with_drafter(f"{name}, {'grown' if kind else 'static'} tree, tuned", arm))
    prompts = read_prompts(args.prompts, args.limit)
    run_and_save(
        Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens), args.output, args
    )


def random_twin(drafter: FalconSpecDrafter) -> FalconSpecDrafter:
    """A drafter of the same shape that was never trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(drafter)(drafter.config).eval()
    twin.name_or_path = "random weights"
    return twin


if __name__ == "__main__":
    main()
