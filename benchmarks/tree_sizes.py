"""Grown best-first trees against static trees fitted at the same size, and which wins at which price of a node.

Command: python -m benchmarks.tree_sizes --held_out ../shared/data/answers/held_out.jsonl.gz; without it, trees are fitted on the prompts in
`benchmarks/prompts/held_out.jsonl`. The small pair decodes in float32; only counts are used, so other work may run beside it. Hours
(`benchmarks/README.md`); every run is kept at once, and the same command goes on.

For each number of passes acceptance by depth and rank is measured on held-out text, as `falcon-spec trees` does, and the best
static tree of each size follows from it. On the test prompts both kinds draft, and `benchmarks/prices.py` says what their counts would
cost. Writes `benchmarks/results/tree_sizes.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from benchmarks.gpu_prices import HELD_OUT, grown, static
from benchmarks.prices import Price, pass_bytes
from benchmarks.report import Report, Result, distinct, source_line, table, where
from benchmarks.running import SETS, Runs, beside, run_and_save
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, decoding_options, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import Prompt, read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_tokens_per_second
from transformers_falcon_spec.evaluation.tree_fit import TreeFit, acceptance
from transformers_falcon_spec.generation.loop import MAX_NODES
from transformers_falcon_spec.provenance import weights_fingerprint
from transformers_falcon_spec.records import Records

HERE = Path(__file__).parent
GROWN, STATIC = "grown", "static"
NUM_RANKS, MOST_WIDE = 10, 6  # of the trees that measure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, let both kinds write, and compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--held_out", default=HELD_OUT, help="text to fit on: prompts or conversations, maybe gzipped")
    parser.add_argument("--held_out_limit", type=int, default=60)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prices", nargs="+", default=["gpu-7b", "gpu-7b-compiled", "cpu-0.3b"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--limit", type=int, default=25, help="prompts of each file")
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tree_sizes.json")
    args = parser.parse_args(argv)

    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter: Any = load_drafter(args.drafter, target)

    rates = {passes: fitted(target, tokenizer, drafter, passes, args) for passes in args.passes}
    methods = methods_of(drafter, rates, args.nodes)
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, [*methods.values()], prompts, args.decodings, args.max_new_tokens)

    prices = list(map(Price.named, args.prices))
    num_bytes = {}
    for price in prices:
        num_bytes[price.name] = pass_bytes(with_drafter("drafter", drafter), target, price.shape, price.dtype)

    def winners(runs: Runs) -> dict[str, Any]:
        return {"winners": [winner(runs, methods, price, num_bytes) for price in prices]}

    run_and_save(benchmark, args.output, args, winners)


def fitted(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Any,
    num_passes: int,
    args: argparse.Namespace,
) -> Tensor:
    """Acceptance by depth and rank on held-out text, all decodings together: `[depths, ranks]`."""
    depth = num_passes * drafter.block_size
    width = min(MOST_WIDE, (MAX_NODES - 1) // (NUM_RANKS * depth))
    fit = TreeFit(target, tokenizer, drafter, num_passes, NUM_RANKS, width)
    settings = {"drafter": weights_fingerprint(drafter), "max_new_tokens": args.max_new_tokens, **fit.settings}
    records = Records(args.output.with_name(f"{args.output.stem}_fit_{num_passes}.jsonl"), settings)
    prompts = read_prompts([args.held_out], args.held_out_limit)
    texts = {f"{name} {prompt.prompt_id}": (name, prompt) for name in args.decodings for prompt in prompts}

    def counted(text: tuple[str, Prompt]) -> dict[str, Any]:
        log = fit.watch(text[1], decoding_options(text[0]), args.max_new_tokens, 0)
        return {"counts": log.counts(fit.depth)}

    entries = records.measured(texts, counted, f"fit, {num_passes} passes")
    return acceptance([entry["counts"] for entry in entries])


def methods_of(drafter: Any, rates: dict[int, Tensor], sizes: Sequence[int]) -> dict[tuple[str, int, int], Method]:
    """The drafter with both kinds of tree, every size and number of passes, by these three."""
    found = {}
    for num_passes, own in rates.items():
        for size in sizes:
            both = {GROWN: grown(drafter, size, num_passes), STATIC: static(drafter, own, size)}
            for kind, options in both.items():
                name = f"{kind}, {size} nodes, {num_passes} passes"
                found[kind, size, num_passes] = with_drafter(name, with_options(drafter, options))

    return found


def at(price: Price, runs: Runs, num_bytes: dict[str, int]) -> Runs:
    """Runs with their seconds at a price."""
    return [price.of_run(run, num_bytes[price.name]) for run in runs]


def winner(
    runs: Runs, methods: dict[tuple[str, int, int], Method], price: Price, num_bytes: dict[str, int]
) -> dict[str, Any]:
    """At a price, for each decoding: the best size and passes of both kinds, their tokens a second, and grown beside static."""
    found: dict[str, Any] = {"price": price.name, "title": price.title}
    for decoding in distinct(runs, "decoding"):
        best: dict[str, tuple[float, str, Runs]] = {}
        for (kind, _, _), method in methods.items():
            own = where(runs, decoding=decoding, method=method.name)
            if not price.can_price(own):
                continue
            timed = at(price, own, num_bytes)
            rate = pooled_tokens_per_second(timed)
            if kind not in best or rate > best[kind][0]:
                best[kind] = (rate, method.name, timed)

        row = beside(best[GROWN][2], best[STATIC][2])
        for kind, (rate, name, _) in best.items():
            row[kind] = {"rate": rate, "method": name}
        found[decoding] = row

    return found


def tables(result: Result, path: str) -> list[str]:
    """The best of both kinds at each price."""
    origin = result["provenance"]
    winners = result["winners"]

    rows = []
    for decoding in distinct(result["rows"], "decoding"):
        for each in winners:
            rows.append({"price": each["price"], "decoding": decoding, **each[decoding]})

    best = {"decoding": "{decoding}", "price": "{price}"}
    best |= {f"best {kind}": f"{{{kind}/method}}: {{{kind}/rate:.0f}} tokens/s" for kind in (GROWN, STATIC)}
    best["grown over static"] = "{ratio:.2f} ({interval:~.2f})"

    return [
        "### Grown trees beside static ones fitted at their size, computed",
        f"Tokens a step are measured: the embedded pair in float32, {origin['limit']} prompts a set. Tokens a second are computed from them (95 % interval over "
        "prompts); growing on the host costs nothing here. The best of both kinds at each price: "
        + "; ".join(f"`{each['price']}` is {each['title']}" for each in winners)
        + ".",
        table(best, rows),
        source_line(result, path),
    ]


REPORT = Report("docs/results.md#trees", ["tree_sizes.json"], tables, order=1)


if __name__ == "__main__":
    main()
