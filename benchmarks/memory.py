"""Peak memory of a whole process that writes the same texts with and without the drafter.

Command: python benchmarks/memory.py
Hardware and time: two CPU cores, about a minute. Each arm runs in processes of its own, in turn; the figure is the
operating system's peak resident size, so it holds Python, torch and the allocator's reserve too. Writes
`benchmarks/results/memory.json`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from transformers import logging

from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.decoding import DECODINGS, timed_generate
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
ARMS = {"loaded": "target loaded, nothing written", "alone": "target alone", "drafted": "target with drafter"}


def main() -> None:
    """Run every arm `repeats` times in fresh processes, or be one of those processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "gsm8k.jsonl"))
    parser.add_argument("--limit", type=int, default=5, help="texts to write, 128 tokens each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", choices=list(ARMS), help="be the process of this arm and print its peak")
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(_peak(args)))
        return
    peaks: dict[str, list[dict[str, int]]] = {arm: [] for arm in ARMS}
    for _ in range(args.repeats):
        for arm in ARMS:
            command = [sys.executable, *sys.argv, "--arm", arm]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peaks[arm].append(json.loads(output.strip().split("\n")[-1]))
    rows = [{"name": f"peak, {text}", **_median(peaks[arm], "peak")} for arm, text in ARMS.items()]
    difference = [
        drafted["peak"] - alone["peak"] for drafted, alone in zip(peaks["drafted"], peaks["alone"], strict=True)
    ]
    rows.append({"name": "with drafter less alone", "bytes": statistics.median(difference), "runs": difference})
    rows.append({"name": "of it the drafter's weights", **_median(peaks["drafted"], "weights")})
    result = {
        "provenance": provenance(seed=0, **vars(args)),
        "description": [
            f"Peak resident size of whole processes, median of {args.repeats}, {args.limit} texts of 128 tokens."
        ],
        "rows": rows,
    }
    (HERE / "results" / "memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _peak(args: argparse.Namespace) -> dict[str, int]:
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target) if args.arm == "drafted" else None
    for prompt in read_prompts([args.prompts], args.limit) if args.arm != "loaded" else []:
        timed_generate(target, prompt.input_ids(tokenizer), 128, DECODINGS["greedy"], 0, drafter)
    weights = sum(weight.numel() * weight.element_size() for weight in drafter.parameters()) if drafter else 0
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "weights": weights}


def _median(runs: list[dict[str, int]], key: str) -> dict[str, object]:
    values = [run[key] for run in runs]
    return {"bytes": statistics.median(values), "runs": values}


if __name__ == "__main__":
    main()
