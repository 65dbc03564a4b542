"""What reading a tree costs, in plain one-token steps, by its size: for the small target and for it inflated to larger shapes.

Command: python -m benchmarks.tree_cost --shapes small 0.3b 1b
Hardware and time: two CPU cores, about ten minutes for 0.3b in float32. Targets are built in memory; `hybrid` is a Qwen3.5 of 564M parameters with
random weights, three of four layers recurrent, for `--output benchmarks/results/tree_cost_hybrid.json`. Each round reads one plain step, and
one tree of every size with stock and with packed weights, in random order after the same text, so that a change of the machine's speed meets
all of them. A cost is the ratio of medians; its interval resamples rounds. Trees are read as in `generate`, with a mask; plain steps as plain
decoding makes them. A tree costs the target the same whoever drafted it, Falcon, Eagle or Medusa; what drafting costs is in `falcon-spec bench`.
`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before the command measures what a processor without AVX-512 would do. Writes
`benchmarks/results/tree_cost.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig, logging

from benchmarks.inflation import SHAPES, Shape, inflate
from benchmarks.report import Report, Result, source_line, table
from tests.runs import prefilled
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.commands.loading import DTYPES, load_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.packed_linear import AUTO, PackedReads
from transformers_falcon_spec.generation.stock_cache import drop_last
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.transformers_versions import CACHE

HERE = Path(__file__).parent
NODES = (1, 2, 4, 8, 16, 32, 64)
NUM_WARM_UP = 3  # rounds
STOCK, PACKED = "stock", "packed"  # weights with which a tree is read
PLAIN = (STOCK, 0)  # the plain step
HYBRID = Qwen3_5TextConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
)
READS = (PLAIN, *((weights, num) for weights in (STOCK, PACKED) for num in NODES))

Round = dict[tuple[str, int], float]  # seconds by weights and number of nodes


def binary_tree(num_nodes: int, device: torch.device) -> DraftTree:
    """A tree whose nodes have two children each: bushy and deep, so that its mask is no special case."""
    tree = DraftTree.from_lists([-1, *((node - 1) // 2 for node in range(1, num_nodes))])
    return DraftTree(tree.parents.to(device), tree.ranks.to(device))


@torch.no_grad()
def rounds_of(model: PreTrainedModel, context: int, repeats: int, seed: int = 0) -> list[Round]:
    """Seconds of every read after `context` tokens, `repeats` times, each time in another order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (1, context + max(NODES)), generator=generator) % model.config.vocab_size
    ids = ids.to(model.device)
    target = prefilled(model, ids[:, :context])
    step = {
        "attention_mask": torch.ones_like(ids[:, : context + 1]),
        "position_ids": torch.full_like(ids[:, :1], context),
    }

    packed = {STOCK: PackedReads([], False), PACKED: PackedReads([model], AUTO)}

    def read(weights: str, num_nodes: int) -> object:
        if (weights, num_nodes) == PLAIN:
            return model(ids[:, context : context + 1], **{CACHE: target.cache}, use_cache=True, **step)
        tree = binary_tree(num_nodes, ids.device)  # a new one: what follows from its parents is part of the cost
        with packed[weights].reading(num_nodes > 1):
            return target.read(ids[:, context : context + num_nodes], tree)

    order, draws = list(READS), random.Random(seed)

    rounds: list[Round] = []
    with closing(packed[PACKED]):
        for _ in tqdm(range(NUM_WARM_UP + repeats), leave=False):
            draws.shuffle(order)
            found: Round = {}
            for weights, num_nodes in order:
                found[weights, num_nodes] = _seconds(functools.partial(read, weights, num_nodes))
                if num_nodes:
                    target.keep(num_nodes, [()])
                else:
                    drop_last(target.cache, 1)

            rounds.append(found)

    return rounds[NUM_WARM_UP:]


def _seconds(work: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary_rows(name: str, model: PreTrainedModel, rounds: list[Round], seed: int = 0) -> list[dict[str, Any]]:
    """A row for each kind of weights: medians, and each size's cost in plain steps with its 95 % interval."""
    facts: dict[str, Any] = {"shape": name, "num_parameters": model.num_parameters()}
    if name != "hybrid":
        facts["sizes"] = asdict(Shape.of(model.config))
    plain_seconds = statistics.median(found[PLAIN] for found in rounds)
    rows = []
    for weights in (STOCK, PACKED):
        costs = []
        for num_nodes in NODES:
            pairs = [(found[weights, num_nodes], found[PLAIN]) for found in rounds]
            costs.append({"num_nodes": num_nodes, "cost": _ratio(pairs), "interval": bootstrap(pairs, _ratio, seed)})

        seconds = {num: [found[weights, num] for found in rounds] for num in NODES}
        rows.append({**facts, "weights": weights, "plain_seconds": plain_seconds, "costs": costs, "seconds": seconds})

    return rows


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    trees, plain = zip(*pairs, strict=True)
    return statistics.median(trees) / statistics.median(plain)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every shape, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--shapes", nargs="+", choices=["small", "hybrid", *SHAPES], default=["small", "0.3b"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=200, help="tokens before the tree")
    parser.add_argument("--repeats", type=int, default=40, help="rounds")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tree_cost.json")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.context < 1:
        raise OptionError(
            f"`--repeats` and `--context` must be at least 1, but they are {args.repeats}, {args.context}."
        )

    logging.set_verbosity_error()
    small, _tokenizer = load_target(args.target, "float32", "cpu")

    rows = []
    for name in args.shapes:
        if name == "hybrid":
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(HYBRID, dtype=DTYPES[args.dtype]).eval().to(args.device)
        else:
            shape = Shape.of(small.config) if name == "small" else SHAPES[name]
            model = inflate(small, shape, dtype=DTYPES[args.dtype], device=args.device)

        found = summary_rows(name, model, rounds_of(model, args.context, args.repeats))
        del model  # before the next one is built
        for row in found:
            print(name, row["weights"], *(f"{cost['num_nodes']}: {cost['cost']:.2f}x" for cost in row["costs"]))
        rows += found

    settings = {name: str(value) for name, value in vars(args).items()}
    result = {"provenance": provenance(seed=0, **settings), "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tables(result: Result, path: str) -> list[str]:
    """What a tree of each size costs at each shape, in plain steps."""
    sizes = enumerate(cost["num_nodes"] for cost in result["rows"][0]["costs"])
    columns = {
        "target": "{shape}",
        "parameters": "{num_parameters:1e-6*.0f} M",
        "plain step": "{plain_seconds:1000*.1f} ms",
        "weights": "{weights}",
        **{f"{size} node{'s' * (size > 1)}": f"{{costs/{index}/cost:.2f}}" for index, size in sizes},
    }
    origin = result["provenance"]
    lead = (
        f"Cost of reading a tree in plain steps, {origin['dtype']}, after {origin['context']} tokens; the file has the intervals. All but `small` "
        "are inflated, and `hybrid` has random weights."
    )
    return [lead, table(columns, result["rows"]), source_line(result, path)]


REPORT = Report(
    "docs/results.md#tree_cost", ["tree_cost.json", "tree_cost_avx2.json", "tree_cost_hybrid.json"], tables
)


if __name__ == "__main__":
    main()
