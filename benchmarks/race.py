"""The race: the embedded drafter, others trained alike and what stock Transformers offers, in one run at a large model's cost.

Command: python -m benchmarks.race --trained ../shared/models/trained; `--trained` names a folder with drafters for `models/reference-target`, all of
which take part. Hardware and time: two CPU cores and nothing else running, hours; every run is kept at once, and the same command goes on. All methods
are as they come, tuned where they can be, and interleaved prompt by prompt. The type is that in which the target alone is faster on this
machine, measured first. Writes `benchmarks/results/race.json`, which `python -m benchmarks.report` renders into docs/rivals.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel, logging

from benchmarks.budgets import SETS
from benchmarks.inflation import SHAPES, Shape, inflate, inflate_drafter
from benchmarks.report import Report, Result, source_line, speed_by_set, table
from benchmarks.running import Runs, beside, by_method, run_and_save
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.commands.loading import DTYPES, load_target
from transformers_falcon_spec.commands.methods import PROMPT_LOOKUP, TREES, MethodEntry
from transformers_falcon_spec.drafters.checkpoint import kind_of
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import BASELINE, Method, stock_assistant, stock_dflash, with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import pooled_tokens_per_second

HERE = Path(__file__).parent
EMBEDDED = "models/falcon-reference"
UNTRAINED = ("models/lookahead", PROMPT_LOOKUP)
STOCK_DFLASH = MuseGlimmerAssistantConfig.model_type
POOLED = "all sets"
TIMED_TOKENS = 12  # of the target alone in each type


def main(argv: Sequence[str] | None = None) -> None:
    """Let all run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trained", type=Path, required=True, help="folder of drafters; those of Falcon are held against the rest"
    )
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.3b", help="inflate all models to this shape")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="left out: the faster one for the target alone"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7", "temperature-1"])
    parser.add_argument("--limit", type=int, default=25, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "race.json")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    small, tokenizer = load_target(args.target, "float32", "cpu")
    shape = SHAPES[args.shape]
    args.dtype = args.dtype or faster_dtype(small, shape)
    methods = [inflated(entry, small, shape, DTYPES[args.dtype]) for entry in entries_of(args.trained)]
    ours = [method.name for method in methods if isinstance(method.assistant, FalconSpecDrafter)]
    target = inflate(small, shape, dtype=DTYPES[args.dtype])
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    run_and_save(benchmark, args.output, args, lambda runs: {"standings": standings(runs, ours)})


def entries_of(trained: Path) -> list[MethodEntry]:
    """Who takes part: the embedded drafter, every folder with a configuration, and what needs no training.

    DFlash drafters of Transformers take part in the stock loop, and as `NAME-tree` in this package's.
    """
    folders = sorted(str(config.parent) for config in trained.glob("*/config.json"))
    if not folders:
        raise OptionError(
            f"`--trained` must hold folders of drafters, but `{trained}` holds none with a `config.json`."
        )
    twice = [f"{Path(folder).name}-tree={TREES}:{folder}" for folder in folders if kind_of(folder) == STOCK_DFLASH]
    return [MethodEntry.parse(source) for source in (EMBEDDED, *folders, *twice, *UNTRAINED)]


def inflated(entry: MethodEntry, target: PreTrainedModel, shape: Shape, dtype: torch.dtype) -> Method:
    """The method for the inflated `target`, which is given small."""
    method = entry.load(target)
    if method.assistant is None:
        return method
    large: Any = inflate_drafter(method.assistant, target, shape, dtype=dtype)
    large.name_or_path = entry.source
    makers: dict[str, Any] = {"stock assistant": stock_assistant, "stock block diffusion": stock_dflash}
    return makers.get(method.kind, with_drafter)(entry.name, large)


def faster_dtype(small: PreTrainedModel, shape: Shape) -> str:
    """The type in which the target alone writes faster here, after one run to warm up."""
    seconds = {}
    for name in ("float32", "bfloat16"):
        target: Any = inflate(small, shape, dtype=DTYPES[name])
        for _ in range(2):
            start = perf_counter()
            target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=TIMED_TOKENS, min_new_tokens=TIMED_TOKENS)
            seconds[name] = perf_counter() - start
    return min(seconds, key=lambda name: seconds[name])


def standings(records: Runs, ours: Sequence[str]) -> list[dict[str, Any]]:
    """Each drafter of ours beside the fastest other one, for each decoding, on all prompts together and on each set.

    Drafters of ours after the first, the embedded one, also stand beside that.
    """
    rows = []
    for decoding, runs in by_method(records).items():
        for name in (POOLED, *dict.fromkeys(run["set"] for run in records)):
            chosen = {method: [run for run in each if name in (POOLED, run["set"])] for method, each in runs.items()}
            rates = {method: pooled_tokens_per_second(each) for method, each in chosen.items()}
            rival = max(
                (method for method in rates if method not in (BASELINE, *ours)), key=lambda method: rates[method]
            )
            for method in ours:
                for other in (rival, ours[0]) if method != ours[0] else (rival,):
                    ratio = beside(chosen[method], chosen[other])
                    rows.append({"decoding": decoding, "set": name, "method": method, "other": other, **ratio})
    return rows


def tables(result: Result, path: str) -> list[str]:
    """Speed of all, and who leads."""
    origin = result["provenance"]
    columns = {
        "decoding": "{decoding}",
        "prompts": "{set:set}",
        "Falcon": "{method}",
        "beside": "{other}",
        "times as fast": "{ratio:.2f} ({interval:~.2f})",
    }
    return [
        "### The race",
        f"All inflated to `{origin['shape']}`, {origin['dtype']}, {origin['limit']} prompts a set, {origin['max_new_tokens']} tokens each: times as fast as the target "
        "alone (95 % interval), and tokens a step.",
        *speed_by_set(result),
        "Falcon drafters beside the fastest method of another kind, and beside the embedded one.",
        table(columns, result["standings"]),
        source_line(result, path),
    ]


REPORT = Report("docs/rivals.md", ["race.json"], tables, order=-1)


if __name__ == "__main__":
    main()
