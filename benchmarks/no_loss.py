"""What the tuner loses where drafting cannot pay: a drafter with random weights, text unlike the training mix, temperature 1.

Command: python -m benchmarks.no_loss. Hardware and time: two CPU cores and nothing else running, about fifteen minutes; resumes. All arms
are interleaved prompt by prompt; before, each writes some other prompts, so that what counts is what the tuner does once it has seen the
drafter. Writes `benchmarks/results/no_loss.json`, which `falcon-spec report` renders into docs/tuning.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.running import run_and_save
from transformers_falcon_spec import FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import Prompt, read_prompts

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
    parser.add_argument(
        "--num_warm_up", type=int, default=4, help="prompts of each file that teach the tuner and do not count"
    )
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
    prompts = read_prompts(args.prompts, args.num_warm_up + args.limit)
    lessons = [prompt for prompt in prompts if place_in_set(prompt, prompts) < args.num_warm_up]
    with tempfile.TemporaryDirectory() as folder:
        benchmark(target, tokenizer, methods, lessons, args).run(Path(folder) / "lessons.jsonl").complete()
    counted = [prompt for prompt in prompts if prompt not in lessons]
    run_and_save(benchmark(target, tokenizer, methods, counted, args), args.output, args)


def benchmark(target: Any, tokenizer: Any, methods: list[Method], prompts: list[Prompt], args: Any) -> Benchmark:
    """All methods on these prompts."""
    return Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)


def place_in_set(prompt: Prompt, prompts: list[Prompt]) -> int:
    """How many prompts of its set come before it."""
    return [other for other in prompts if other.set_name == prompt.set_name].index(prompt)


def random_twin(drafter: FalconSpecDrafter) -> FalconSpecDrafter:
    """A drafter of the same shape that was never trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(drafter)(drafter.config).eval()
    twin.name_or_path = "random weights"
    return twin


if __name__ == "__main__":
    main()
