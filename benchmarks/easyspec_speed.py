"""EasySpec: groups of layers at once beside the same layers in order, and both beside stock assisted generation with the same draft model.

Command: python -m benchmarks.easyspec_speed --draft_model FOLDER; with --shape 0.3b the target alone is inflated, so that the draft
model is small beside it, as in practice. Hardware and time: two CPU cores and nothing else running, about ten minutes; resumes. Methods
are interleaved prompt by prompt; single drafted passes are timed in turns after one text. Writes
`benchmarks/results/easyspec_speed.json` (`easyspec_speed_<shape>.json`), which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from benchmarks.inflation import SHAPES, inflate
from benchmarks.report import Report, Result, distinct, named, setting, source_line, table, where
from benchmarks.running import SETS, beside, by_method, run_and_save, times_as_fast
from lab.layer_groups import in_order
from transformers_falcon_spec import GenerationStats, LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import DTYPES, load_target
from transformers_falcon_spec.drafters.easyspec import Backend, build_groups
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import BASELINE, Method, stock_assistant, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_stats, pooled_tokens_per_second
from transformers_falcon_spec.generation.slot_cache import SlotCache
from transformers_falcon_spec.generation.timed import synchronize

HERE = Path(__file__).parent
DEPTH = 5  # tokens that drafts of a fixed shape are deep
KINDS = {"chain": {"tree_top_k": 1}, "tree": {"tree_top_k": 4, "num_tree_nodes": 16}}
STOCK, STOCK_CHAIN = "stock", "stock, chain"
ORDER, AT_ONCE = "sequential", "fused"


def main() -> None:
    """Time single passes, then write every prompt with every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--draft_model", required=True, help="folder of a language model")
    parser.add_argument("--shape", choices=[*SHAPES], help="inflate the target to this shape; left out: as it is")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--group_sizes", type=int, nargs="+", default=[2, 4], help="1 is added")
    parser.add_argument("--decodings", nargs="+", default=["greedy"])
    parser.add_argument("--limit", type=int, default=5, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=200, help="passes that are timed")
    parser.add_argument("--context", type=int, default=256, help="tokens before them, at most")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    output = args.output or HERE / "results" / f"easyspec_speed{f'_{args.shape}' if args.shape else ''}.json"
    target, tokenizer = load_pair(args)
    drafter: Any = LayerParallelDrafter.from_pretrained(args.draft_model, target=target)
    prompts = read_prompts(args.prompts, args.limit)
    ids = torch.cat([prompt.input_ids(tokenizer) for prompt in prompts], dim=1)[:, : args.context].to(target.device)
    passes = [row for width in (1, 4) for row in pass_rows(drafter, ids, width, args.group_sizes, args.repeats)]
    benchmark = Benchmark(
        target, tokenizer, [*methods_of(drafter, args.group_sizes)], prompts, args.decodings, args.max_new_tokens
    )
    run_and_save(
        benchmark,
        output,
        args,
        lambda records: {"context": ids.shape[1], "passes": passes, "side_by_side": side_by_side(records)},
    )


def load_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target, inflated if asked but for its vocabulary, which stock assisted generation wants to be the draft model's; tokenizer."""
    target, tokenizer = load_target(args.target, "float32", "cpu")
    kind: dict[str, Any] = {"dtype": DTYPES[args.dtype], "device": args.device}
    if not args.shape:
        return target.to(**kind), tokenizer
    return inflate(target, replace(SHAPES[args.shape], vocab_size=target.config.vocab_size), **kind), tokenizer


def methods_of(drafter: LayerParallelDrafter, sizes: Sequence[int]) -> Iterator[Method]:
    """Stock assisted generation as it comes and with our chain; drafts of one shape with all groups and backends; the tuner."""
    chain: Any = copy.copy(drafter.model)  # the same weights
    chain.generation_config = copy.deepcopy(chain.generation_config)
    chain.generation_config.update(
        num_assistant_tokens=DEPTH, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    yield stock_assistant(STOCK, drafter.model)
    yield stock_assistant(STOCK_CHAIN, chain)
    fixed = {kind: SpeculationConfig(tune=False, tree_depth=DEPTH, **shape) for kind, shape in KINDS.items()}

    for kind, options in {**fixed, "tuned": SpeculationConfig()}.items():
        for size in (1, *sizes):
            for backend in (ORDER, AT_ONCE) if size > 1 and kind in KINDS else (AT_ONCE,):
                yield with_drafter(name_of(kind, size, backend), grouped(drafter, options, size, backend))


def grouped(drafter: LayerParallelDrafter, options: SpeculationConfig, size: int, backend: str) -> Any:
    """The drafter with groups of a size, which attend layer by layer or at once."""
    changed = with_options(drafter, options)
    changed.config = copy.copy(drafter.config)
    changed.config.layer_groups = build_groups(len(drafter.layered.layers), size)
    return in_order(changed) if backend == ORDER else changed


def name_of(kind: str, size: int, backend: str) -> str:
    """A method's name; layers that stand alone have no backend."""
    return f"{kind}, groups of {size}, {backend}" if size > 1 else f"{kind}, groups of 1"


class TimedPass:
    """A drafter pass that can be repeated: `num_tokens` tokens that all follow the text `ids` `[1, tokens]`."""

    def __init__(
        self,
        drafter: LayerParallelDrafter,
        ids: torch.Tensor,
        num_tokens: int,
        backend: Backend,
        is_exact: bool,
    ) -> None:
        self.drafter, self._backend, self._is_exact = drafter, backend, is_exact
        self._num_read = ids.shape[1]
        self._cache = SlotCache(len(backend.groups), 1, self._num_read + num_tokens, ids.device)
        self._ids = ids[:, -1:].repeat(1, num_tokens)
        self._read(ids, torch.arange(self._num_read), 0, is_exact=True)

    def seconds(self) -> float:
        """Make the pass and time it; the cache stays as it was."""
        num_tokens = self._ids.shape[1]
        start = _now()
        self._read(self._ids, torch.full((num_tokens,), self._num_read), self._num_read, self._is_exact)
        return _now() - start

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, positions: torch.Tensor, num_cached: int, is_exact: bool) -> None:
        self._cache.view.write_from(num_cached)
        self._cache.see(num_cached + ids.shape[1])
        positions = positions.to(ids.device)[None]
        cached = torch.arange(num_cached, device=ids.device)[None]
        slots = torch.cat([cached, positions], dim=-1)
        allowed = slots[:, None] <= positions[..., None]
        states = self.drafter.read(ids, allowed, positions, slots, self._cache, self._backend, is_exact)
        self.drafter.logits(states)


def _now() -> float:
    synchronize()
    return time.perf_counter()


def time_passes(passes: Mapping[str, TimedPass], repeats: int) -> list[dict[str, float]]:
    """Seconds of passes by name, all of them once in every turn, in random order; a first turn as a warm-up is left out.

    Nothing is timed inside a pass, so that backends of any kind can be compared.
    """
    order = random.Random(0)
    turns = [
        {name: passes[name].seconds() for name in order.sample([*passes], len(passes))} for _ in range(repeats + 1)
    ]
    return turns[1:]


def pass_rows(
    drafter: LayerParallelDrafter, ids: torch.Tensor, width: int, sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Seconds of a drafted pass over `width` tokens by group size: in order, at once, and layer after layer without groups."""

    def timed_pass(size: int, backend: str) -> TimedPass:
        in_groups = grouped(drafter, SpeculationConfig(), size, backend)
        return TimedPass(drafter, ids, width, in_groups.backend(), is_exact=False)

    passes = {"alone": timed_pass(1, ORDER)}
    for size in sizes:
        for backend in (ORDER, AT_ONCE):
            passes[f"{size} {backend}"] = timed_pass(size, backend)

    turns = time_passes(passes, repeats)

    rows = []
    for size in sizes:
        ordered, fused = f"{size} {ORDER}", f"{size} {AT_ONCE}"
        rows.append(
            {
                "width": width,
                "group_size": size,
                "num_groups": len(build_groups(len(drafter.layered.layers), size)),
                "alone_seconds": median(turn["alone"] for turn in turns),
                f"{ORDER}_seconds": median(turn[ordered] for turn in turns),
                f"{AT_ONCE}_seconds": median(turn[fused] for turn in turns),
                "beside_sequential": times_as_fast(turns, fused, ordered),
                "beside_alone": times_as_fast(turns, fused, "alone"),
            }
        )

    return rows


def side_by_side(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every method on all prompts together: speed, what it keeps, what drafting takes, and its speed beside that of others."""
    rows = []
    for decoding, runs in by_method(records).items():
        for method, own in sorted(runs.items()):
            if method == BASELINE:
                continue
            ratios = {}
            for what, other in rivals(method).items():
                if other in runs and other != method:
                    ratios[what] = beside(own, runs[other])

            rows.append({"decoding": decoding, "method": method, **counts(own), "beside": ratios})

    return rows


def rivals(method: str) -> dict[str, str]:
    """What a method is held against: the target alone, its own groups in order, its model without groups, stock with the same model."""
    kind = method.partition(", groups")[0]
    found = {"the target alone": BASELINE, "stock": STOCK, "stock, chain": STOCK_CHAIN}
    if method.startswith(STOCK):
        return found
    return {**found, "sequential": method.replace(AT_ONCE, ORDER), "groups of 1": name_of(kind, 1, AT_ONCE)}


def counts(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed and acceptance of one method; stock passes are not counted."""
    stats = sum((pooled_stats(run) for run in runs), GenerationStats())
    return {
        "num_prompts": len(runs),
        "tokens_per_second": pooled_tokens_per_second(runs),
        "acceptance_length": stats.acceptance_length,
        "draft_seconds_per_step": stats.draft_seconds / max(stats.num_steps, 1),
        "draft_seconds_per_pass": stats.draft_seconds / stats.num_passes if stats.num_passes else None,
    }


RATIO = "{@/ratio:.2f}x ({@/interval:~.2f})"
BESIDE = ("the target alone", "stock", "groups of 1")  # what the table shows; results files have the others


def tables(result: Result, path: str) -> list[str]:
    """Seconds of single passes, then every method beside the others it is held against."""
    origin, rows = result["provenance"], result["side_by_side"]
    passes = {
        "tokens": "{width}",
        "groups of": "{group_size}",
        "groups": "{num_groups}",
        "without groups": "{alone_seconds:1000*.2f}",
        "sequential": "{sequential_seconds:1000*.2f}",
        "fused": "{fused_seconds:1000*.2f}",
        "beside sequential": RATIO.replace("@", "beside_sequential"),
        "beside no groups": RATIO.replace("@", "beside_alone"),
    }
    columns = {
        "method": "{method}",
        "acceptance length": "{acceptance_length:.2f}",
        "drafting, ms a step": "{draft_seconds_per_step:1000*.1f}",
    }
    pair = setting(result, "the reference target", "the target")
    blocks = [
        f"### Speed beside {pair}, {origin['dtype']}, {origin['threads']} threads",
        f"One drafted pass after {result['context']} tokens, milliseconds (medians), and how many times as fast (95 % interval) the fused one is:",
        table(passes, result["passes"]),
    ]

    for decoding in distinct(rows, "decoding"):
        chosen = where(rows, decoding=decoding)
        others = [what for what in BESIDE if any(what in row["beside"] for row in chosen)]
        blocks += [
            f"Interleaved runs, {decoding}, {chosen[0]['num_prompts']} prompts; times as fast (95 % interval) as what the column names:",
            table({**columns, **named(others, RATIO.replace("@", "beside/@"))}, chosen),
        ]

    return [*blocks, source_line(result, path)]


REPORT = Report("docs/results.md#easyspec", ["easyspec_speed.json", "easyspec_speed_0.3b.json"], tables)


if __name__ == "__main__":
    main()
