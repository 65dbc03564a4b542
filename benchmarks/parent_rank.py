"""Is a static tree better if acceptance may depend on the rank of the parent? Fitted on half of the held-out prompts, judged on the other.

Command: python benchmarks/parent_rank.py --passes 1 2
Hardware and time: two CPU cores, about ten minutes. A node that follows a second choice may be accepted less often than one that
follows a first. Both trees are the likeliest nodes, by chances `[depth][rank]` and by `[depth][rank of the parent][rank]`. What each would
have kept in every step of the other half is read from the ranks that the target's tokens had there. Writes
`benchmarks/results/parent_rank.json`.
"""

import argparse
import heapq
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import logging

from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.tree_fit import TreeFit, acceptance
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
NUM_SAMPLES = 2000  # of the bootstrap
Steps = list[list[int | None]]
Places = set[tuple[int, ...]]  # nodes by the ranks on the way to them


def main() -> None:
    """Measure, fit both trees of every size, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 32, 64])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "parent_rank.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)
    prompts = read_prompts([args.prompts], args.limit)
    rows = []
    for num_passes, decoding in product(args.passes, args.decodings):
        fit = TreeFit(target, tokenizer, drafter, num_passes, args.ranks, args.width)
        options = decoding_options(decoding)
        texts = [fit.watch(prompt, options, args.max_new_tokens, 0).steps for prompt in tqdm(prompts, desc=decoding)]
        for num_nodes in args.nodes:
            rows.append({"passes": num_passes, "decoding": decoding, "num_nodes": num_nodes})
            rows[-1] |= compare(texts, fit.depth, args.ranks, num_nodes)
            print(rows[-1])
        origin = provenance(seed=0, dtype="float32", **{key: str(value) for key, value in vars(args).items()})
        args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def compare(texts: list[Steps], depth: int, num_ranks: int, num_nodes: int) -> dict[str, Any]:
    """Acceptance lengths on texts of odd place of both trees, fitted to the others, and their difference with its interval."""
    counts = by_parent([step for steps in texts[::2] for step in steps], depth, num_ranks)
    simple = paths_of(DraftTree.best_first(acceptance([counts.sum(1).tolist()]), num_nodes))
    refined = likeliest(rates_by_parent(counts), num_nodes)
    kept = [
        [sum(len(prefix(step, tree)) + 1 for step in steps) for tree in (simple, refined)] for steps in texts[1::2]
    ]
    tokens, steps = torch.tensor(kept, dtype=torch.double), torch.tensor([len(text) for text in texts[1::2]])
    chosen = torch.randint(len(kept), (NUM_SAMPLES, len(kept)), generator=torch.Generator().manual_seed(0))
    lengths = tokens[chosen].sum(1) / steps[chosen].sum(1, keepdim=True)
    gains = lengths[:, 1] / lengths[:, 0] - 1
    simple_length, refined_length = (tokens.sum(0) / steps.sum()).tolist()
    return {
        "simple_length": simple_length,
        "refined_length": refined_length,
        "gain": refined_length / simple_length - 1,
        "gain_interval": torch.quantile(gains, torch.tensor([0.025, 0.975], dtype=torch.double)).tolist(),
        "num_common": len(simple & refined),
    }


def by_parent(steps: Steps, depth: int, num_ranks: int) -> torch.Tensor:
    """Counts `[depths, ranks of the parent, ranks + 1]`; the root counts as rank 0."""
    counts = torch.zeros(depth, num_ranks, num_ranks + 1, dtype=torch.long)
    for step in steps:
        above = 0
        for place, rank in enumerate(step):
            if rank is None:
                break
            counts[place, above, rank] += 1
            above = rank
    return counts


def rates_by_parent(counts: torch.Tensor) -> torch.Tensor:
    """Chances `[depths, ranks of the parent, ranks]`; where little was asked they lean on those of all parents together."""
    together = counts.sum(1, keepdim=True) + 0.5
    pulled = counts + 4 * together / together.sum(-1, keepdim=True)
    return (pulled / pulled.sum(-1, keepdim=True))[..., :-1]


def likeliest(rates: torch.Tensor, num_nodes: int) -> Places:
    """The likeliest nodes: no chance exceeds that of the parent, so they are a tree."""
    found: Places = set()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(found) < num_nodes:
        chance, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) < len(rates):
            below = rates[len(path), path[-1] if path else 0].tolist()
            for rank, rate in enumerate(below):
                heapq.heappush(waiting, (chance * rate, (*path, rank)))
    return found


def paths_of(tree: DraftTree) -> Places:
    """The same form of a static tree."""
    ranks = tree.ranks[0].tolist()
    return {tuple(ranks[above] for above in tree.path_to(node)[1:]) for node in range(len(tree))}


def prefix(step: list[int | None], tree: Places) -> list[int | None]:
    """How far a tree follows a step."""
    num = 0
    while num < len(step) and tuple(step[: num + 1]) in tree:
        num += 1
    return step[:num]


if __name__ == "__main__":
    main()
