"""DiffuSpec against the clock: its own ways to draft and other methods side by side in one run, and where the time of a round goes.

Command: python -m benchmarks.diffuspec_speed --drafters prefix=FOLDER full=FOLDER --proxy_texts runs/data/train.jsonl
--methods falcon=models/falcon-reference sps=FOLDER; what `falcon-spec bench` calls a method is one here. With --shape 0.3b --dtype bfloat16
target and drafters are inflated, all but prompt lookup and DFlash, which has no inflated kind: the small pair's acceptance at a large
model's cost. Hardware and time: two CPU cores and nothing else running, about five minutes, inflated about as long with --limit 2 --max_new_tokens 48
--variants "CPS and adaptive length" "tree 16 nodes"; resumes. Methods are interleaved prompt by prompt. With
--decodings temperature-0.7 --variants CPS neither "tree 16 nodes" "drawn marginals" --output benchmarks/results/diffuspec_speed_sampling.json drawn
drafts stand beside searched ones. Writes `benchmarks/results/diffuspec_speed.json`
(`diffuspec_speed_<shape>.json`), which `python -m benchmarks.report` renders into docs/diffuspec.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from benchmarks.diffuspec_variants import (
    ADAPTIVE,
    BOTH,
    CPS,
    MARGINAL,
    NEITHER,
    TREE,
    Proxies,
    proxies_of,
    variants_of,
)
from benchmarks.inflation import SHAPES, inflate, inflate_drafter
from benchmarks.inflation.__main__ import load_small_drafter
from benchmarks.report import Report, Result, by, distinct, named, setting, source_line, table
from benchmarks.running import Runs, beside, by_method, run_and_save
from transformers_falcon_spec import DiffusionDrafter, GenerationStats
from transformers_falcon_spec.commands.loading import DTYPES, load_drafter, load_target
from transformers_falcon_spec.commands.methods import PROMPT_LOOKUP, MethodEntry, parse_methods
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import BASELINE, Method, stock_assistant, with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_stats, pooled_tokens_per_second

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]
TUNED = ", tuned"  # drafts where it pays, else as long as the variant says
SHOWN = [
    BOTH,
    CPS,
    ADAPTIVE,
    NEITHER,
    "fixed length k 4",
    "passes S 2",
    "confidence stop 0.45",
    TREE,
    CPS + TUNED,
    TREE + TUNED,
]


def main() -> None:
    """Write every prompt with every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafters", nargs="+", required=True, help="diffusion drafters, each as NAME=FOLDER")
    parser.add_argument("--proxy_texts", type=Path, required=True, help="conversations that the proxy is fitted to")
    parser.add_argument("--proxy_limit", type=int, help="use so many of them; left out: all")
    parser.add_argument("--variants", nargs="+", default=SHOWN, help="ways to draft of each diffusion drafter")
    parser.add_argument("--methods", nargs="*", default=[], help="others, as `falcon-spec bench` takes them")
    parser.add_argument("--shape", choices=[*SHAPES], help="inflate all to this shape; left out: as they are")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--decodings", nargs="+", default=["greedy"])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    output = args.output or HERE / "results" / f"diffuspec_speed{f'_{args.shape}' if args.shape else ''}.json"
    small, tokenizer = load_target(args.target, "float32", "cpu")
    models = Models(small, args.shape, DTYPES[args.dtype], args.device)
    drafters: Any = {name: models.of(drafter) for name, drafter in load_drafters(args.drafters, small).items()}
    proxies = proxies_of(args.proxy_texts, tokenizer, models.target.config.vocab_size, args.proxy_limit)
    methods = [
        method for name, drafter in drafters.items() for method in own_methods(name, drafter, args.variants, proxies)
    ]
    methods += [models.method(entry) for entry in parse_methods(args.methods, {BASELINE: args.target})]
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(models.target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    run_and_save(benchmark, output, args, lambda records: {"side_by_side": side_by_side(records)})


def load_drafters(names: list[str], target: PreTrainedModel) -> dict[str, DrafterModel]:
    """Drafters by name: `NAME=FOLDER`, or a folder whose last part is the name.

    Raises:
        [`OptionError`]: two drafters have the same name.
    """
    drafters: dict[str, DrafterModel] = {}
    for entry in names:
        name, _, folder = entry.rpartition("=")
        name = name or folder.rstrip("/").rpartition("/")[2]
        if name in drafters:
            raise OptionError(f"Two drafters are called `{name}`. Name them: `--drafters one=FOLDER other=FOLDER`.")
        drafters[name] = load_drafter(folder, target)
    return drafters


class Models:
    """Target and drafters in one type, on one device and, with a shape, at the size of a large model."""

    def __init__(self, small: PreTrainedModel, shape: str | None, dtype: Any, device: str) -> None:
        self.small, self.shape = small, SHAPES[shape] if shape else None
        self.kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.target: Any = inflate(small, self.shape, **self.kind) if self.shape else small.to(**self.kind)

    def of(self, drafter: Any) -> Any:
        """A drafter or draft model of the small target beside the target that is measured."""
        return inflate_drafter(drafter, self.small, self.shape, **self.kind) if self.shape else drafter.to(**self.kind)

    def method(self, entry: MethodEntry) -> Method:
        """A method as the command line names it."""
        if self.shape is None or entry.source.partition(":")[0] == PROMPT_LOOKUP:
            return entry.load(self.target)
        drafter = self.of(load_small_drafter(entry.source, self.small))
        is_ours = isinstance(drafter, DrafterModel)
        return with_drafter(entry.name, drafter) if is_ours else stock_assistant(entry.name, drafter)


def own_methods(name: str, drafter: DiffusionDrafter, variants: Sequence[str], proxies: Proxies) -> Iterator[Method]:
    """Ways to draft of one diffusion drafter.

    Raises:
        [`OptionError`]: there is no such variant.
    """
    found = {variant.name: variant for variant in (*variants_of(drafter), MARGINAL)}
    for variant in variants:
        if variant.removesuffix(TUNED) not in found:
            raise OptionError(
                f"A variant of `{name}` must be one of {sorted(found)}, maybe with `{TUNED}` behind it, but it is {variant!r}."
            )
        own = found[variant.removesuffix(TUNED)].of(drafter, proxies, tune=variant.endswith(TUNED))
        yield with_drafter(f"{name}: {variant}", own)


def side_by_side(records: Runs) -> list[dict[str, Any]]:
    """Every method on all prompts together: speed beside the target alone, what it keeps, and where the time of a round goes."""
    return [
        {"decoding": decoding, "method": name, **phases(own), "beside_target": beside(own, runs[BASELINE])}
        for decoding, runs in by_method(records).items()
        for name, own in runs.items()
        if name != BASELINE
    ]


def phases(runs: Runs) -> dict[str, Any]:
    """Speed and acceptance of one method, and seconds of a round by phase. Searching is a part of drafting, and drafting of stock methods their forwards."""
    stats = sum((pooled_stats(run) for run in runs), GenerationStats())
    num_rounds = max(stats.num_steps, 1)
    round_seconds = (stats.total_seconds - stats.prefill_seconds) / num_rounds
    return {
        "num_prompts": len(runs),
        "tokens_per_second": pooled_tokens_per_second(runs),
        "acceptance_length": stats.acceptance_length,
        "draft_seconds": (stats.draft_seconds - stats.search_seconds) / num_rounds,
        "search_seconds": stats.search_seconds / num_rounds,
        "verify_seconds": stats.verify_seconds / num_rounds,
        "other_seconds": stats.other_seconds / num_rounds,
        "search_share": stats.search_seconds / num_rounds / round_seconds if round_seconds else 0.0,
    }


RATIO = "{beside_target/ratio:.2f}x ({beside_target/interval:~.2f})"


def tables(result: Result, path: str) -> list[str]:
    """Every method against the target alone, by set, and the share of a round that searching takes."""
    origin, rows = result["provenance"], result["side_by_side"]
    sets = {(row["decoding"], row["method"]): row for row in by(result["rows"], "set", "decoding", "method")}
    where = setting(result, "the reference target", "the target")
    blocks = [f"### Speed with {where}, {origin['dtype']}, {origin['threads']} threads"]
    for decoding in distinct(rows, "decoding"):
        chosen = [{**sets[decoding, row["method"]], **row} for row in rows if row["decoding"] == decoding]
        for row in chosen:
            row["shown_share"] = f"{100 * row['search_share']:.1f} %" if row["search_seconds"] else None
        by_set = distinct([row for row in result["rows"] if row["decoding"] == decoding], "set")
        speeds = {
            "method": "{method}",
            "tokens/s": "{tokens_per_second:.1f}",
            "acceptance length": "{acceptance_length:.2f}",
            "all sets": RATIO,
            **named(by_set, "{@/speedup:.2f}x ({@/speedup_interval:~.2f})"),
            "searching": "{shown_share}",
        }
        blocks += [
            f"Interleaved runs, {decoding}, {chosen[0]['num_prompts']} prompts, at most {origin['max_new_tokens']} tokens; times as fast as the target alone (95 % interval), and the share of a round that searching takes:",
            table(speeds, sorted(chosen, key=lambda row: -row["beside_target"]["ratio"])),
        ]
    return [*blocks, source_line(result, path)]


_MEASURED = ("", "_sampling", "_0.3b")
REPORT = Report("docs/diffuspec.md", [f"diffuspec_speed{what}.json" for what in _MEASURED], tables)


if __name__ == "__main__":
    main()
