"""Tokens a second that drafters would reach on a GPU that is not at hand: measured acceptance, at measured prices.

Command: python -m benchmarks.gpu_prices --drafters models/falcon-reference models/lookahead trained/*; with --equal_readings
--output benchmarks/results/paper.json it makes the paper's comparison, of drafters that were trained alike. The small pair decodes in
float32; only counts are used, so other work may run beside it. Hours (`benchmarks/README.md`); every run is kept at once, and the same command goes on.

1. The size of a drafter's tree and its number of passes are chosen on held-out prompts, for each price by tokens a second, all decodings together.
2. So drafted, all methods answer the test prompts, and `benchmarks/prices.py` says what the counts would cost.

Writes `benchmarks/results/gpu_prices.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, logging

from benchmarks.entrants import Entrant, entries_of, loaded, measured_acceptance, training_of
from benchmarks.price_tables import tables
from benchmarks.prices import Price, has_weights, nodes_read, pass_bytes
from benchmarks.report import Report, distinct, total, where
from benchmarks.running import SETS, Runs, run_and_save
from benchmarks.standings import standings
from transformers_falcon_spec import DFlashDrafter, DraftTree, FalconSpecDrafter, MedusaDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_acceptance_length, pooled_tokens_per_second

HERE = Path(__file__).parent
HELD_OUT = str(HERE / "prompts" / "held_out.jsonl")
PRICES = ["gpu-7b", "gpu-7b-slow-passes", "gpu-7b-compiled"]
SAME = 1.01  # the most readings over the fewest that are equally many
MOST_PASSES, DEPTH = 3, 8  # drafters of blocks choose among so many passes, or as many as reach the paper's depth
TOKEN_PASSES = (4, 6, 8)  # those of one token a pass choose among these


@dataclass(frozen=True)
class Variant:
    """A drafter with trees of one size, or as it comes where it has no sizes; `num_bytes` are those of a pass, by price."""

    who: str
    method: Method
    num_nodes: int | None = None
    num_passes: int | None = None


def main(argv: Sequence[str] | None = None) -> None:
    """Choose passes, let all write, and compute."""
    args = parsed(argv)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    small, tokenizer = load_target(args.target, "float32", "cpu")

    methods: dict[str, Method] = {}
    trained, with_weights, ours = [], [], []
    entries = entries_of(args.drafters)
    for entry in entries:
        method = in_our_loop(entry, loaded(entry, small), small)
        methods[entry.name] = method

        training = training_of(entry)
        if training is not None:
            trained.append(training)
        if has_weights(method):
            with_weights.append(entry.name)
        if isinstance(method.assistant, FalconSpecDrafter):
            ours.append(entry.name)

    if args.equal_readings:
        check_readings(trained, with_weights)

    variants = []
    for entry in entries:
        variants += variants_of(entry, methods[entry.name], args.nodes)

    prices = list(map(Price.named, args.prices))
    num_bytes: dict[str, dict[str, int]] = {}
    for price in prices:
        num_bytes[price.name] = {}
        for name, method in methods.items():
            num_bytes[price.name][name] = pass_bytes(method, small, price.shape, price.dtype)

    def benchmark(who: list[Variant], prompts: Sequence[str], limit: int, decodings: list[str]) -> Benchmark:
        taking_part = [each.method for each in who]
        return Benchmark(small, tokenizer, taking_part, read_prompts(prompts, limit), decodings, args.max_new_tokens)

    held_out = args.output.with_name(f"{args.output.stem}_held_out.jsonl")
    trials = benchmark(variants, [args.held_out], args.held_out_limit, args.decodings[:2]).run(held_out)
    chosen: dict[str, list[Variant]] = {}
    for price in prices:
        chosen[price.name] = best_variants(variants, trials, price, num_bytes[price.name])
    variants = [each for each in variants if any(each in best for best in chosen.values())]

    def found(runs: Runs) -> dict[str, Any]:
        at_prices = []
        for price in prices:
            at_prices.append(computed(chosen[price.name], runs, price, num_bytes[price.name], ours))
        return {
            "trained": trained,
            "variants": [described(each, runs) for each in variants],
            "prices": at_prices,
        }

    run = benchmark(variants, args.prompts, args.limit, args.decodings)
    run_and_save(run, args.output, args, found)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", required=True, help="their folders; prompt lookup takes part, too")
    parser.add_argument("--equal_readings", action="store_true", help="refuse drafters that read unequally much")
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--prices", nargs="+", default=PRICES, help="names in prices.json; runs are kept")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--limit", type=int, default=25, help="prompts of each file")
    parser.add_argument("--held_out", default=HELD_OUT, help="prompts on which sizes and passes are chosen")
    parser.add_argument("--held_out_limit", type=int, default=8)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7", "temperature-1"])
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu_prices.json")
    return parser.parse_args(argv)


def check_readings(trained: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Refuse drafters that did not read the same number of conversations, went on from another training, or do not say.

    Args:
        trained (`list[dict]`): Of drafters with a `training.json`, what [`training_of`] says.
        names (`Sequence[str]`): All drafters with weights.

    Raises:
        [`OptionError`]: they were not trained alike.
    """
    readings = {row["method"]: row["num_readings"] for row in trained}
    begun = [row["method"] for row in trained if row["start"] is not None]
    untold = [name for name in names if name not in readings]
    if begun or untold or max(readings.values(), default=0) > SAME * min(readings.values(), default=0):
        raise OptionError(
            f"Drafters must be trained on equally many readings, but those are {readings}, those that went on from other "
            f"drafters are {begun}, and those without a `training.json` are {untold}. Train them alike, or name others by "
            "`--methods`."
        )


def in_our_loop(entry: Entrant, method: Method, target: PreTrainedModel) -> Method:
    """The method; a language model drafts trees in this package's loop instead of a chain in the stock one."""
    if method.kind != "stock assistant":
        return method
    return Entrant(entry.name, f"layer-parallel:1:{entry.source}", is_in_our_loop=True).load(target)


def variants_of(entry: Entrant, method: Method, sizes: Iterable[int]) -> list[Variant]:
    """A drafter with every size of tree and number of passes to choose from; others as they come."""
    drafter: Any = method.assistant
    if method.is_stock:
        return [Variant(entry.name, method)]

    options: dict[tuple[int, int], SpeculationConfig] = {}
    if isinstance(drafter, MedusaDrafter):
        rates = measured_acceptance(Path(entry.source), drafter.block_size)
        for size in sizes:
            options[size, 1] = static(drafter, rates, size)
    elif drafter.can_grow_trees:
        for size, num_passes in product(sizes, passes_of(drafter)):
            options[size, num_passes] = grown(drafter, size, num_passes)
    else:
        untuned = with_drafter(entry.name, with_options(drafter, varied(drafter)))
        return [Variant(entry.name, untuned)]

    variants = []
    for (size, num_passes), chosen in options.items():
        name = f"{entry.name}, {size} nodes, {num_passes} passes"
        sized = with_drafter(name, with_options(drafter, chosen))
        variants.append(Variant(entry.name, sized, size, num_passes))

    return variants


def passes_of(drafter: Any) -> tuple[int, ...]:
    """The numbers of passes to choose from; DFlash drafts one block."""
    if isinstance(drafter, DFlashDrafter):
        return (1,)
    if drafter.block_size == 1:
        return TOKEN_PASSES
    return tuple(range(1, max(MOST_PASSES, DEPTH // drafter.block_size) + 1))


def varied(drafter: Any, **changes: Any) -> SpeculationConfig:
    """The drafter's own options, untuned, with others of the tree; a branch of repeated text stays as it is."""
    options = copy.deepcopy(drafter.generation_config)
    for name, value in {"tune": False, **changes}.items():
        setattr(options, name, value)
    return cast(SpeculationConfig, options)


def grown(drafter: Any, num_nodes: int, num_passes: int) -> SpeculationConfig:
    """Options for best-first trees of one size."""
    shape = {"num_tree_nodes": num_nodes, "tree_depth": num_passes * drafter.block_size}
    return varied(drafter, dynamic_tree=True, draft_tree=None, tree_top_k=max(num_nodes // 4, 4), **shape)


def static(drafter: Any, rates: Tensor, num_nodes: int) -> SpeculationConfig:
    """Options for the best static tree of a size by acceptance `[depths, ranks]`."""
    return varied(drafter, dynamic_tree=False, draft_tree=DraftTree.best_first(rates, num_nodes).to_json())


def best_variants(variants: list[Variant], runs: Runs, price: Price, num_bytes: dict[str, int]) -> list[Variant]:
    """Of each drafter the variant with the most tokens a second at a price, all decodings together.

    Raises:
        [`OptionError`]: the trees of some drafter are all larger than what was measured for the price.
    """
    best: dict[str, tuple[float, Variant]] = {}
    for each in variants:
        if not price.can_price(where(runs, method=each.method.name)):
            continue
        rate = pooled_tokens_per_second(priced(each, runs, price, num_bytes))
        if each.who not in best or rate > best[each.who][0]:
            best[each.who] = (rate, each)

    missing = sorted({each.who for each in variants} - {*best})
    if missing:
        raise OptionError(
            f"`--nodes` must hold a size within the {max(price.seconds)} nodes of the price `{price.name}`, but all trees of "
            f"{missing} are larger. Add a smaller one."
        )

    return [each for _, each in best.values()]


def priced(variant: Variant, runs: Runs, price: Price, num_bytes: dict[str, int]) -> Runs:
    """The runs of a variant with their seconds at a price, in the name of the drafter."""
    found = []
    for run in where(runs, method=variant.method.name):
        found.append({**price.of_run(run, num_bytes[variant.who]), "method": variant.who})
    return found


def described(variant: Variant, runs: Runs) -> dict[str, Any]:
    """A variant, and what was measured of it: acceptance length of each decoding on each set and on all, nodes read, passes taken."""
    own = where(runs, method=variant.method.name)
    counts = [run["speculation"] for run in own]
    row: dict[str, Any] = {
        "who": variant.who,
        "method": variant.method.name,
        "num_nodes": variant.num_nodes,
        "nodes_read": nodes_read(own),
        "passes_a_step": total(counts, "num_passes") / max(total(counts, "num_steps"), 1),
    }

    for decoding in distinct(own, "decoding"):
        chosen = where(own, decoding=decoding)
        lengths: dict[str, Any] = {
            "pooled": pooled_acceptance_length(chosen),
            "interval": bootstrap(chosen, pooled_acceptance_length, 0),
        }
        for name in distinct(chosen, "set"):
            lengths[name] = pooled_acceptance_length(where(chosen, set=name))
        row[decoding] = lengths

    return row


def computed(
    variants: list[Variant], runs: Runs, price: Price, num_bytes: dict[str, int], ours: list[str]
) -> dict[str, Any]:
    """At one price: tokens a second of each drafter for each decoding, and who leads."""
    rows, all_priced = [], []
    for decoding in distinct(runs, "decoding"):
        own = where(runs, decoding=decoding)
        for each in variants:
            if not price.can_price(where(own, method=each.method.name)):
                continue
            found = priced(each, own, price, num_bytes)
            rows.append({"decoding": decoding, "variant": each.method.name, **rates_by_set(found, price)})
            all_priced += found

    plain_seconds = price.read_seconds(1)
    shares = {who: price.pass_seconds(each) / plain_seconds for who, each in num_bytes.items()}
    has_rivals = bool(set(num_bytes) - set(ours))

    return {
        "name": price.name,
        "title": price.title,
        "plain": 1 / plain_seconds,
        "pass_bytes": num_bytes,
        "pass_share": shares,
        "rows": rows,
        "standings": standings(all_priced, ours) if has_rivals else [],
    }


def rates_by_set(runs: Runs, price: Price) -> dict[str, Any]:
    """Tokens a second on all prompts with the interval over prompts, and times as fast as the target alone."""
    rate = pooled_tokens_per_second(runs)
    rates: dict[str, Any] = {
        "tokens_per_second": rate,
        "interval": bootstrap(runs, pooled_tokens_per_second, 0),
        "times_plain": rate * price.read_seconds(1),
    }
    for name in distinct(runs, "set"):
        rates[name] = pooled_tokens_per_second(where(runs, set=name))
    return rates


REPORT = Report("docs/results.md#rivals", ["gpu_prices.json", "paper.json"], tables, order=1)


if __name__ == "__main__":
    main()
