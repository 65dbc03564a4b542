"""Acceptance length of grown trees by how many blocks their second pass feeds, beside static trees of the same size.

Command: python -m benchmarks.fed_blocks. Hardware and time: any, as no time is measured; five minutes on one CPU core. Prompts are held-out ones.
Writes `benchmarks/results/fed_blocks.json`; `LOG.md` says what follows from it.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import logging

from benchmarks.budgets import add_pair, load_pair
from benchmarks.choose_tree import shape_options
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters import grown_tree
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.methods import with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
PASSES = 2


def main() -> None:
    """Write every text with every tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--prompts", nargs="+", default=[str(HERE / "prompts" / "held_out.jsonl")])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fed_blocks.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer, drafter = load_pair(args)
    texts = [prompt.input_ids(tokenizer) for prompt in read_prompts(args.prompts, args.limit)]
    rows: list[dict[str, Any]] = []
    for decoding in args.decodings:

        def length(options: SpeculationConfig, decoding: str = decoding) -> dict[str, Any]:
            arm, counts = with_options(drafter, options), []
            for ids in texts:
                timed = timed_generate(target, ids, args.max_new_tokens, decoding_options(decoding), 0, arm)
                counts.append(timed.output.speculation)
            return {"acceptance_length": pooled(counts), "interval": bootstrap(counts, pooled, 0)}

        for num_nodes in args.nodes:
            shape = {"decoding": decoding, "nodes": num_nodes, "passes": PASSES}
            rows.append({**shape, "blocks": None, **length(shape_options("static", drafter, num_nodes, PASSES))})
            for num_blocks in args.blocks:
                with patch.object(grown_tree, "LEAST_BLOCKS", num_blocks):
                    rows.append({**shape, "blocks": num_blocks, **length(grown(drafter, num_nodes))})
    for row in rows:
        print(row)
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def grown(drafter: Any, num_nodes: int) -> SpeculationConfig:
    """Trees of that many nodes whose width does not ask for more blocks by itself."""
    return SpeculationConfig(
        tune=False, dynamic_tree=True, num_tree_nodes=num_nodes, tree_depth=PASSES * drafter.block_size
    )


def pooled(counts: list[Any]) -> float:
    """Tokens a step, over all texts."""
    return 1 + sum(stats.num_accepted for stats in counts) / sum(stats.num_steps for stats in counts)


if __name__ == "__main__":
    main()
