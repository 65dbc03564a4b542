"""Choose drafter and tree on held-out prompts: speed-up of each against the target alone, interleaved.

Command: python benchmarks/choose_tree.py --drafters models/falcon-reference
Hardware and time: two CPU cores, about six minutes for one drafter. Static trees are fitted to the acceptance by rank in
`training.json`; grown ones follow the drafter's probabilities in every step. Writes `benchmarks/results/tree.json`; with `--save`
the fastest shape of each drafter becomes its own.
"""

import argparse
import copy
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from transformers_falcon_spec import DraftTree, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafters, load_target, save_tree
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import summarize
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.top_k_accuracy import MAX_RANK, rank_shares

HERE = Path(__file__).parent


def measured_acceptance(folder: Path, block_size: int, num_passes: int) -> torch.Tensor:
    """Share of held-out rows whose best token stood at each rank, by depth: `[depths, ranks]`."""
    curve = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"]
    last = next(entry for entry in reversed(curve) if "eval_rank_0_at_1" in entry)
    return rank_shares(last, block_size, MAX_RANK, prefix="eval").repeat(num_passes, 1)


def main() -> None:
    """Measure every size, and store the fastest if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafters", nargs="+", default=["models/falcon-reference"], help="NAME=FOLDER, or a folder")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--kinds", nargs="+", default=["static", "grown"], choices=["static", "grown"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 12, 16, 24, 32])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--decodings", nargs="+", default=["temperature-0.7"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tree.json")
    parser.add_argument("--save", action="store_true", help="put the fastest tree into each drafter's config")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafters = load_drafters(args.drafters, target)
    arms = {name: arm for drafter in drafters.items() for name, arm in shapes(*drafter, args).items()}
    methods = [with_drafter(name, arm) for name, arm in arms.items()]
    benchmark = Benchmark(target, tokenizer, methods, read_prompts([args.prompts], args.limit), args.decodings)
    with tempfile.TemporaryDirectory() as folder:
        outcome = benchmark.run(Path(folder) / "runs.jsonl")
    rows = summarize(outcome.complete())
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    result = {"provenance": origin, "methods": benchmark.describe(outcome), "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    ordered = sorted(rows, key=lambda row: -row["speedup"])
    for row in ordered:
        low, high = row["speedup_interval"]
        length = row["acceptance_length_pooled"]
        print(f"{row['arm']:40s} {row['speedup']:.2f}x ({low:.2f} to {high:.2f}), length {length:.2f}")
    for name, drafter in drafters.items() if args.save else []:
        best = next(row["arm"] for row in ordered if row["arm"].startswith(f"{name}: "))
        save_shape(Path(drafter.name_or_path), arms[best].generation_config)


def shapes(name: str, drafter: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The drafter with every shape of tree, by what the shape is called."""
    arms = {}
    for num_passes, kind, num_nodes in product(args.passes, args.kinds, args.nodes):
        arm = copy.copy(drafter)  # the same weights
        arm.generation_config = shape_options(kind, drafter, num_nodes, num_passes)
        arms[f"{name}: {kind}, {num_nodes} nodes, {num_passes} passes"] = arm
    return arms


def shape_options(kind: str, drafter: Any, num_nodes: int, num_passes: int) -> SpeculationConfig:
    """Options for trees of that many nodes, static or grown; large ones consider more nodes of a depth."""
    if kind == "grown":
        grown = {"tree_depth": num_passes * drafter.block_size, "tree_top_k": max(num_nodes // 4, 4)}
        return SpeculationConfig(tune=False, dynamic_tree=True, num_tree_nodes=num_nodes, **grown)
    acceptance = measured_acceptance(Path(drafter.name_or_path), drafter.block_size, num_passes)
    tree = DraftTree.best_first(acceptance, num_nodes)
    return SpeculationConfig(tune=False, dynamic_tree=False, draft_tree=tree.to_json())


def save_shape(folder: Path, options: SpeculationConfig) -> None:
    """Make a shape the drafter's own: a static tree goes into `config.json`, how trees grow into `generation_config.json`."""
    if options.dynamic_tree:
        options.save_pretrained(folder)
        return
    assert options.draft_tree is not None  # the other kind
    save_tree(folder, options.draft_tree)


if __name__ == "__main__":
    main()
