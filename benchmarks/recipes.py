"""Recipes beside each other: drafters trained at the same cost, timed on the target at a large model's cost.

Command: python -m benchmarks.recipes --runs default=runs/recipes/default paper=runs/recipes/paper eagle3=runs/recipes/eagle3; the folders
come from `falcon-spec train` with the same data, seed, batch size and `--max_steps` (`--recipe default`, `--recipe paper`, `--method eagle`). Hardware and
time: two CPU cores and nothing else running, about ten minutes; resumes. Every drafter grows its trees, tuned and at the fixed sizes of
`--nodes` in as many passes as a depth of `--depth` takes; all methods are interleaved prompt by prompt. Writes
`benchmarks/results/recipes.json`, which `python -m benchmarks.report` renders into docs/train_your_own.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.inflation import SHAPES, inflate, inflate_drafter
from benchmarks.report import Report, Result, by, distinct, named, source_line, table
from benchmarks.running import Runs, beside, by_method, run_and_save
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.commands.loading import DTYPES, load_drafter, load_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]
TUNED = "tuned"


def main() -> None:
    """Time every drafter, and say how the first stands beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="NAME=FOLDER; the first is held against the others")
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.3b", help="inflate the pairs to this shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "recipes.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    trained = [outcome_of(run) for run in args.runs]
    check_costs(trained)
    small, tokenizer = load_target(args.target, "float32", "cpu")
    kind: dict[str, Any] = {"dtype": DTYPES[args.dtype], "device": args.device}
    target = inflate(small, SHAPES[args.shape], **kind)
    methods = []
    for run in args.runs:
        name, _, folder = run.rpartition("=")
        large = inflate_drafter(load_drafter(folder, small), small, SHAPES[args.shape], **kind)
        methods += methods_of(name, large, args)
    prompts = read_prompts(args.prompts, args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    names = [row["name"] for row in trained]
    run_and_save(benchmark, args.output, args, lambda runs: {"trained": trained, "beside": beside_first(runs, names)})


def outcome_of(entry: str) -> dict[str, Any]:
    """What came of the run `NAME=FOLDER`, and what it took."""
    name, _, folder = entry.rpartition("=")
    record = json.loads((Path(folder) / "training.json").read_text(encoding="utf-8"))
    last = next(point for point in reversed(record["curve"]) if "eval_accuracy" in point)
    num_positions = sum(key.startswith("eval_accuracy_at_") for key in last)
    return {
        "name": name or Path(folder).name,
        "num_steps": last["step"],
        "loss": last["eval_loss"],
        "accuracy": [last[f"eval_accuracy_at_{position}"] for position in range(1, num_positions + 1)],
        **{key: record[key] for key in ("command", "commit", "seed", "train_seconds", "num_examples")},
    }


def check_costs(trained: list[dict[str, Any]]) -> None:
    """Refuse runs that did not see the same number of conversations, or not as many steps."""
    costs = {row["name"]: (row["num_steps"], row["num_examples"]) for row in trained}
    if len(set(costs.values())) > 1:
        raise OptionError(
            f"Recipes are compared at the same cost, but steps and conversations are {costs}. Train them alike."
        )


def methods_of(name: str, drafter: Any, args: argparse.Namespace) -> list[Method]:
    """One drafter with the tuner in charge, and at every fixed size."""
    options = {TUNED: SpeculationConfig(dynamic_tree=True)}
    for nodes in args.nodes:
        shape = {"num_tree_nodes": nodes, "tree_depth": args.depth}
        options[f"{nodes} nodes"] = SpeculationConfig(dynamic_tree=True, tune=False, **shape)
    return [with_drafter(f"{name}, {kind}", with_options(drafter, chosen)) for kind, chosen in options.items()]


def beside_first(records: Runs, names: list[str]) -> list[dict[str, Any]]:
    """How many times as fast the first drafter is as each other, at equal settings, on the prompts of all sets together."""
    rows = []
    for decoding, runs in by_method(records).items():
        for kind in dict.fromkeys(method.rpartition(", ")[2] for method in runs if ", " in method):
            first = runs[f"{names[0]}, {kind}"]
            for other in names[1:]:
                ratio = beside(first, runs[f"{other}, {kind}"])
                rows.append({"decoding": decoding, "kind": kind, "first": names[0], "other": other, **ratio})
    return rows


def tables(result: Result, path: str) -> list[str]:
    """What training came to, speed and acceptance length, and the first recipe beside the others."""
    origin, trained, ratios = result["provenance"], result["trained"], result["beside"]
    costs = {"drafter": "{name}", "training": "{train_seconds:.0f} min", "accuracy": "{accuracy:.3f}"}
    minutes = [{**row, "train_seconds": row["train_seconds"] / 60} for row in trained]
    shown = "{@/speedup:.2f} ({@/speedup_interval:~.2f}), {@/acceptance_length_pooled:.2f}"
    speeds = {"decoding": "{decoding}", "drafter": "{method}", **named(distinct(result["rows"], "set"), shown)}
    beside_columns = {
        "decoding": "{decoding}",
        "trees": "{kind}",
        "drafters": "{first} beside {other}",
        "times as fast": "{ratio:.2f} ({interval:~.2f})",
    }
    return [
        "### Recipes at the same cost",
        f"{trained[0]['num_steps']} steps each on the same {trained[0]['num_examples']} conversations, one run each, seed {trained[0]['seed']}; accuracies on held-out\n"
        "answers, one, two ... tokens ahead. Minutes are those of a machine with other work.",
        table(costs, minutes),
        f"The pairs inflated to `{origin['shape']}`, {origin['dtype']}, {origin['threads']} threads, grown trees, {origin['limit']} prompts a set: speed-up over the target alone\n"
        "(95 % interval) and acceptance length.",
        table(speeds, by(result["rows"], "set", "decoding", "method")),
        f"All prompts together, {ratios[0]['num_prompts']} of them, times as fast (95 % interval):",
        table(beside_columns, ratios),
        source_line(result, path),
    ]


REPORT = Report("docs/train_your_own.md", ["recipes.json"], tables)


if __name__ == "__main__":
    main()
