"""Acceptance by depth of every drafter at equal node budgets: what each keeps of drafts that cost the target the same.

Command: python -m benchmarks.depths --methods falcon=models/falcon-reference eagle=FOLDER sps=FOLDER prompt-lookup
Hardware and time: any; only counts are kept, no seconds, so that it may run beside other work. Resumes. Falcon and Eagle grow their
trees, Medusa takes the best static tree for the acceptance in its `training.json`, Lookahead divides its nodes evenly between
window and guesses, stock methods draft chains. Writes `benchmarks/results/depths.json`, which `falcon-spec report` renders into
docs/rivals.md.
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import logging

from benchmarks.choose_tree import measured_acceptance
from transformers_falcon_spec import DraftTree, LookaheadConfig, LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.commands.methods import MethodEntry
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, prompt_lookup, stock_assistant, with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import summarize
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]
GROWN_DEPTH = 6  # of Falcon's and Eagle's trees
NGRAM_LEN = 3  # of Lookahead: every guess and every column takes two nodes


def main() -> None:
    """Run every method at every budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--methods", nargs="+", required=True, help="as `falcon-spec bench` takes them")
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--limit", type=int, default=10, help="prompts of each file")
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "depths.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    entries = [MethodEntry.parse(entry) for entry in args.methods]
    methods = [
        arm
        for entry in entries
        for num_nodes in args.nodes
        if (arm := at_budget(entry.load(target), Path(entry.source), num_nodes)) is not None
    ]
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, with_baseline=False)
    outcome = benchmark.run(args.output.with_suffix(".jsonl"))
    rows = [{**row, **named(row["arm"])} for row in summarize(outcome.complete())]
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    result = {"provenance": origin, "methods": benchmark.describe(outcome), "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        depths = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
        print(
            f"{row['set']:10s} {row['decoding']:16s} {row['arm']:28s} {row['acceptance_length_pooled']:.2f}  {depths}"
        )


def at_budget(method: Method, folder: Path, num_nodes: int) -> Method | None:
    """The method with drafts of `num_nodes` nodes, root and guests included; None where it has no such draft."""
    name = f"{method.name} @ {num_nodes}"
    if method.kind == "drafter":
        return with_drafter(name, drafter_at(method.assistant, folder, num_nodes))
    if method.kind == "stock prompt lookup":
        return prompt_lookup(name, num_nodes - 1)
    if method.kind == "stock block diffusion":
        return replace(method, name=name) if method.num_nodes == num_nodes else None
    assistant: Any = copy.copy(method.assistant)  # the same weights
    assistant.generation_config = copy.deepcopy(assistant.generation_config)
    assistant.generation_config.num_assistant_tokens = num_nodes - 1
    return stock_assistant(name, assistant)


def drafter_at(drafter: Any, folder: Path, num_nodes: int) -> Any:
    """A drafter with the weights of another and drafts of `num_nodes` nodes."""
    if isinstance(drafter, LookaheadDrafter):
        share = num_nodes // (2 * (NGRAM_LEN - 1))
        sizes = {"window_size": share, "num_guesses": share, "ngram_len": NGRAM_LEN}
        return LookaheadDrafter(LookaheadConfig(**{**drafter.config.to_diff_dict(), **sizes}))
    drafter = copy.copy(drafter)
    if drafter.can_grow_trees:
        grown = {"tree_depth": min(GROWN_DEPTH, num_nodes - 1), "tree_top_k": max(num_nodes // 4, 4)}
        drafter.generation_config = SpeculationConfig(dynamic_tree=True, tune=False, num_tree_nodes=num_nodes, **grown)
    else:
        tree = DraftTree.best_first(measured_acceptance(folder, drafter.block_size, 1), num_nodes)
        drafter.generation_config = SpeculationConfig(draft_tree=tree.to_json(), tune=False)
    return drafter


def named(arm: str) -> dict[str, Any]:
    """Method and budget of an arm."""
    name, _, num_nodes = arm.rpartition(" @ ")
    return {"method": name, "num_nodes": int(num_nodes)}


if __name__ == "__main__":
    main()
