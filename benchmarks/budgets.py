"""Speed against the size of the draft tree: the best static tree of each size, a grown one, and the tuner, on one pair.

Command: python -m benchmarks.budgets; with --shape 0.3b --dtype bfloat16 on an inflated pair, the small pair's acceptance at a large
model's cost. Hardware and time: two
CPU cores and nothing else running, about 30 minutes; resumes. All methods are interleaved prompt by prompt. Writes
`benchmarks/results/budgets.json` (`budgets_<shape>.json`), which `python -m benchmarks.report` renders into docs/tuning.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from benchmarks.inflation import SHAPES, inflate, inflate_drafter
from benchmarks.report import Report, Result, distinct, setting, source_line, speed_by_set, table
from benchmarks.running import beside, by_method, run_and_save
from transformers_falcon_spec import DraftTree, SpeculationConfig
from transformers_falcon_spec.commands.loading import DTYPES, load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_tokens_per_second
from transformers_falcon_spec.training.top_k_accuracy import MAX_RANK, rank_shares

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]


def main() -> None:
    """Run every size and the tuner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 12, 16, 32, 64, 128, 256])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--limit", type=int, default=6, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    output = args.output or HERE / "results" / f"budgets{f'_{args.shape}' if args.shape else ''}.json"
    target, tokenizer, drafter = load_pair(args)
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods_of(drafter, args), prompts, args.decodings, args.max_new_tokens)
    run_and_save(benchmark, output, args, lambda records: {"beside_best_static": beside_best_static(records)})


def add_pair(parser: argparse.ArgumentParser) -> None:
    """The options that [`load_pair`] reads."""
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--shape", choices=[*SHAPES], help="inflate the pair to this shape; left out: as it is")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")


def load_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, Any, Any]:
    """Target, tokenizer and drafter, inflated if asked; the drafter knows its folder either way."""
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter: Any = load_drafter(args.drafter, target)
    if not args.shape:
        dtype = DTYPES[args.dtype]
        return target.to(dtype).to(args.device), tokenizer, drafter.to(dtype).to(args.device)
    kind = {"dtype": DTYPES[args.dtype], "device": args.device}
    large: Any = inflate_drafter(drafter, target, SHAPES[args.shape], **kind)
    large.name_or_path = args.drafter
    return inflate(target, SHAPES[args.shape], **kind), tokenizer, large


def methods_of(drafter: Any, args: argparse.Namespace) -> list[Method]:
    """The drafter with every size of both kinds of tree, and with the tuner in charge."""
    options = {
        f"{kind}, {num_nodes} nodes, {num_passes} passes": shape_options(kind, drafter, num_nodes, num_passes)
        for kind in ("static", "grown")
        for num_passes in args.passes
        for num_nodes in args.nodes
    }
    options |= {"tuned": SpeculationConfig(dynamic_tree=True), "tuned, static": SpeculationConfig(dynamic_tree=False)}
    return [with_drafter(name, with_options(drafter, chosen)) for name, chosen in options.items()]


def shape_options(kind: str, drafter: Any, num_nodes: int, num_passes: int) -> SpeculationConfig:
    """Options for trees of that many nodes, static or grown; large ones consider more nodes of a depth."""
    if kind == "grown":
        grown = {"tree_depth": num_passes * drafter.block_size, "tree_top_k": max(num_nodes // 4, 4)}
        return SpeculationConfig(tune=False, dynamic_tree=True, num_tree_nodes=num_nodes, **grown)
    acceptance = measured_acceptance(Path(drafter.name_or_path), drafter.block_size, num_passes)
    tree = DraftTree.best_first(acceptance, num_nodes)
    return SpeculationConfig(tune=False, dynamic_tree=False, draft_tree=tree.to_json())


def measured_acceptance(folder: Path, block_size: int, num_passes: int) -> torch.Tensor:
    """Share of held-out rows whose best token stood at each rank, by depth: `[depths, ranks]`."""
    curve = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"]
    last = next(entry for entry in reversed(curve) if "eval_rank_0_at_1" in entry)
    return rank_shares(last, block_size, MAX_RANK, prefix="eval").repeat(num_passes, 1)


def beside_best_static(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each decoding, the best grown size and the tuner beside the best static size, on the prompts of all sets together.

    The best sizes are the best of these very runs, which flatters both; the tuner has one method of each kind.
    """
    rows = []
    for decoding, runs in by_method(records).items():
        speeds = {method: pooled_tokens_per_second(own) for method, own in runs.items()}
        static, grown = (
            max((method for method in speeds if method.startswith(kind)), key=speeds.__getitem__)
            for kind in ("static", "grown")
        )
        for method in (grown, "tuned", "tuned, static"):
            ratio = beside(runs[method], runs[static])
            rows.append({"decoding": decoding, "method": method, "best_static": static, **ratio})
    return rows


def tables(result: Result, path: str) -> list[str]:
    """The tuner and the best grown size, compared with the best static size; a run of few sizes is shown set by set as well."""
    origin = result["provenance"]
    where = f"{setting(result, 'the embedded pair', 'the pair')}, {origin['dtype']}, {origin['threads']} threads"
    best = {
        "decoding": "{decoding}",
        "best static size": "{best_static}",
        "compared with it": "{method}",
        "times as fast (95 % interval)": "{ratio:.2f} ({interval:~.2f})",
    }
    sizes = distinct(result["rows"], "method")
    return [
        f"### Static, grown and tuned trees: {where}, {origin['limit']} prompts a set",
        *(speed_by_set(result) if len(sizes) <= FEW else []),
        "All prompts together; the best sizes are the best of these very runs:",
        table(best, result["beside_best_static"]),
        source_line(result, path),
    ]


FEW = 4
_MEASURED = ("", "_0.3b")
REPORT = Report("docs/tuning.md", [f"budgets{what}.json" for what in _MEASURED], tables)


if __name__ == "__main__":
    main()
