"""What bounds the speed-up on this machine: text as uncertain as the target's, read at the price of its forwards.

Command: python -m benchmarks.bounds
Hardware and time: two CPU cores, about five minutes. For positions in text that the target writes at temperature 0.7, the best tree
of every size is grown with the target's OWN distribution: no drafter can expect to have more of it accepted. Divided
by what a forward over such a tree costs in plain steps, that is the speed-up of a perfect drafter that takes no time, and,
with the time of the real drafter's pass added, of a perfect one of the same price. Writes `benchmarks/results/bounds.json`.
"""

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, logging

from benchmarks.report import Report, Result, source_line, table
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.generation.cache import drop_last, new_cache
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
DECODING = "temperature-0.7"
NODES = (2, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 150  # tokens before the tree where forwards are timed

Path_ = tuple[int, ...]


def best_lengths(probs_after: Callable[[Path_], Tensor], num_nodes: int, max_depth: int) -> list[float]:
    """Expected acceptance length of the best tree of 1, 2, ... `num_nodes` nodes, for a known distribution after each path.

    A node is worth the probability that its whole path is what the target goes on with; the best tree holds the best nodes.
    """
    open_nodes: list[tuple[float, Path_]] = [(-1.0, ())]
    lengths: list[float] = []
    while open_nodes and len(lengths) < num_nodes:
        negative, path = heapq.heappop(open_nodes)
        lengths.append((lengths[-1] if lengths else 0.0) - negative)
        if len(path) < max_depth:
            best = probs_after(path).topk(num_nodes)
            for prob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                heapq.heappush(open_nodes, (negative * prob, (*path, token)))
    return lengths


@torch.no_grad()
def lengths_at(target: PreTrainedModel, ids: Tensor, temperature: float, depths: list[int]) -> list[list[float]]:
    """[`best_lengths`] after the text `ids`, for each depth limit."""
    cache = new_cache(target.config)
    target(ids[:, :-1], past_key_values=cache, use_cache=True)
    known: dict[Path_, Tensor] = {}

    def probs_after(path: Path_) -> Tensor:
        if path not in known:
            tokens = torch.cat([ids[:, -1:], torch.tensor([path], dtype=torch.long)], dim=1)
            logits = target(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
            drop_last(cache, tokens.shape[1])
            known[path] = torch.softmax(logits.float() / temperature, dim=-1)
        return known[path]

    return [best_lengths(probs_after, max(NODES), depth) for depth in depths]


@torch.no_grad()
def forward_seconds(target: PreTrainedModel, repeats: int) -> dict[int, list[float]]:
    """Seconds of a forward over 1 token, as plain decoding reads it, and over trees of each size; sizes in turn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, target.config.vocab_size, (1, CONTEXT + max(NODES)), generator=generator)
    cache = new_cache(target.config)
    target(ids[:, :CONTEXT], past_key_values=cache, use_cache=True)
    seconds: dict[int, list[float]] = {size: [] for size in (1, *NODES)}
    for _ in range(repeats + 3):  # the first rounds warm up
        for size, found in seconds.items():
            mask = {} if size == 1 else {"attention_mask": torch.zeros(1, 1, size, CONTEXT + size)}
            positions = torch.full((1, size), CONTEXT)
            start = time.perf_counter()
            target(ids[:, CONTEXT : CONTEXT + size], past_key_values=cache, position_ids=positions, **mask)
            found.append(time.perf_counter() - start)
            drop_last(cache, size)
    return {size: found[3:] for size, found in seconds.items()}


def main() -> None:
    """Grow the trees, time the forwards, and divide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each set")
    parser.add_argument("--every", type=int, default=10, help="tokens between two positions in a text")
    parser.add_argument("--repeats", type=int, default=60, help="forwards of each size")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)
    drafter.generation_config.tune = False
    options = decoding_options(DECODING)
    seconds = forward_seconds(target, args.repeats)
    cost = {size: statistics.median(found) / statistics.median(seconds[1]) for size, found in seconds.items()}
    depths = {"any depth": max(NODES), "one block": drafter.config.block_size}
    rows: list[dict[str, Any]] = []
    for name in SETS:
        found: dict[str, list[list[float]]] = {depth: [] for depth in depths}
        draft_seconds = []
        for prompt in tqdm(read_prompts([str(HERE / "prompts" / f"{name}.jsonl")], args.limit), desc=name):
            ids = prompt.input_ids(tokenizer)
            run = timed_generate(target, ids, 128, options, 0, drafter)
            draft_seconds.append(run.output.speculation.draft_seconds / run.output.speculation.num_steps)
            text = run.output.sequences  # the target's own: the drafter changes no token
            for stop in range(ids.shape[1], text.shape[1], args.every):
                lengths = lengths_at(target, text[:, :stop], options["temperature"], list(depths.values()))
                for depth, values in zip(depths, lengths, strict=True):
                    found[depth].append(values)
        draft_cost = statistics.median(draft_seconds) / statistics.median(seconds[1])
        for depth, values in found.items():
            length = torch.tensor(values).mean(0)
            free = {size: float(length[size - 1]) / cost[size] for size in NODES}
            paid = {size: float(length[size - 1]) / (cost[size] + draft_cost) for size in NODES}
            rows.append({"set": name, "depth": depth, "num_places": len(values), "draft_cost": draft_cost,
                         "acceptance_length": {size: float(length[size - 1]) for size in NODES},
                         "bound_without_drafting": _best(free), "bound_with_drafting": _best(paid)})  # fmt: skip
    result = {
        "provenance": provenance(seed=0, decoding=DECODING, **vars(args)),
        "forward_cost": cost,
        "forward_seconds": seconds,
        "rows": rows,
    }
    (HERE / "results" / "bounds.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _best(bounds: dict[int, float]) -> dict[str, float]:
    size = max(bounds, key=bounds.__getitem__)
    return {"num_nodes": size, "speedup": bounds[size]}


def tables(result: Result, path: str) -> list[str]:
    """What a perfect drafter could reach."""
    sizes = [size for size in result["forward_cost"] if size != "1"]
    costs = {"nodes read": "cost in plain steps", **{size: f"{{forward_cost/{size}:.2f}}" for size in sizes}}
    columns = {
        "set": "{set:set}",
        "tree": "{depth}",
        **{f"length, {size} nodes": f"{{acceptance_length/{size}:.2f}}" for size in (16, 32)},
        "bound, drafting free": "{bound_without_drafting/speedup:.2f}x ({bound_without_drafting/num_nodes} nodes)",
        "bound, drafting as dear as ours": "{bound_with_drafting/speedup:.2f}x ({bound_with_drafting/num_nodes} nodes)",
    }
    return [
        "### What bounds the speed-up here",
        "A drafter that knew the target's own distribution: acceptance length of the best tree it could draft, and the speed-up that\n"
        f"is left at the measured price of a forward ({result['provenance']['decoding']}).",
        table(costs, [result]),
        table(columns, result["rows"]),
        source_line(result, path),
    ]


REPORT = Report("docs/benchmarks.md", ["bounds.json"], tables, order=1)


if __name__ == "__main__":
    main()
