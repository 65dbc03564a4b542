"""Speed with packed weights on a CPU, beside the stock layers and beside the target alone, in one run.

Command: python -m benchmarks.packed; with --shape 0.3b on an inflated pair, the small pair's acceptance at a large model's cost, and --dtype bfloat16.
`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before it shows what a processor without AVX-512 would do. Hardware and time: two CPU cores and
nothing else running, three minutes, inflated ten; resumes. The target alone and the tuned drafter with either layers are interleaved prompt by
prompt. Each command adds its case to `benchmarks/results/packed.json`, which `python -m benchmarks.report` renders into docs/scale.md.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.budgets import SETS, add_pair, load_pair
from benchmarks.report import Report, Result, source_line, table
from benchmarks.running import Runs, beside, by_method
from transformers_falcon_spec import GenerationStats, SpeculationConfig
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import BASELINE, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_stats, pooled_tokens_per_second
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
STOCK, PACKED = "stock layers", "packed weights"
OTHERS = {"target": BASELINE, "stock": STOCK}
CASE = ("shape", "dtype", "device")  # what tells cases apart


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "packed.json")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    target, tokenizer, drafter = load_pair(args)
    options = {STOCK: SpeculationConfig(pack_weights=False), PACKED: SpeculationConfig()}
    methods = [with_drafter(name, with_options(drafter, chosen)) for name, chosen in options.items()]
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    name = f"{args.output.stem}_{args.shape or 'small'}_{args.dtype}_{torch.backends.cpu.get_cpu_capability().lower()}"
    records = benchmark.run(args.output.with_name(f"{name}.jsonl")).complete()
    case = {**{key: str(origin[key]) for key in CASE}, "provenance": origin, "rows": rows_of(records)}
    add_case(args.output, case)
    for row in case["rows"]:
        print(
            row["decoding"], row["method"], *(f"{row[key]['ratio']:.2f}x" for key in ("beside_target", "beside_stock"))
        )


def rows_of(records: Runs) -> list[dict[str, Any]]:
    """For each decoding and both kinds of layers: speed beside the target alone and beside the stock layers, of all prompts together."""
    rows = []
    for decoding, runs in by_method(records).items():
        for method in (STOCK, PACKED):
            stats = sum((pooled_stats(run) for run in runs[method]), GenerationStats())
            facts = {
                "target_tokens_per_second": pooled_tokens_per_second(runs[BASELINE]),
                "tokens_per_second": pooled_tokens_per_second(runs[method]),
                "acceptance_length": stats.acceptance_length,
                "packed_bytes": max(run["speculation"]["packed_bytes"] for run in runs[method]),
            }
            ratios = {f"beside_{name}": beside(runs[method], runs[other]) for name, other in OTHERS.items()}
            rows.append({"decoding": decoding, "method": method, **facts, **ratios})
    return rows


def add_case(output: Path, case: dict[str, Any]) -> None:
    """Write a case into the results, in the place of an older one of the same name."""
    cases = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.exists() else []
    others = [each for each in cases if any(each[key] != case[key] for key in CASE)]
    result = {"provenance": case["provenance"], "cases": [*others, case]}
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def shown_rows(result: Result) -> list[dict[str, Any]]:
    """The rows of all cases, each with what its case says."""
    return [
        {**case, **row, "shape": "embedded" if case["shape"] == "None" else f"at the cost of {case['shape']}"}
        for case in result["cases"]
        for row in case["rows"]
    ]


def tables(result: Result, path: str) -> list[str]:
    """Every case, with either layers."""
    columns = {
        "pair": "{shape}",
        "processor": "{device}",
        "type": "{dtype}",
        "decoding": "{decoding}",
        "prompts": "{beside_target/num_prompts}",
        "target alone": "{target_tokens_per_second:.1f} tokens/s",
        "layers": "{method}",
        "tokens a step": "{acceptance_length:.2f}",
        "beside the target alone": "{beside_target/ratio:.2f}x ({beside_target/interval:~.2f})",
        "beside the stock layers": "{beside_stock/ratio:.2f}x ({beside_stock/interval:~.2f})",
        "copies": "{packed_bytes:1e-6*.0f} MB",
    }
    lead = f"The embedded drafter, tuned, three prompt sets together, {result['provenance']['max_new_tokens']} tokens each (95 % interval); the file names the commit of each case."
    return [lead, table(columns, shown_rows(result)), source_line(result, path)]


REPORT = Report("docs/scale.md", ["packed.json"], tables, order=1)


if __name__ == "__main__":
    main()
