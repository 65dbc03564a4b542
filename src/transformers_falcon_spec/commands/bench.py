"""`falcon-spec bench`: interleaved runs of a target alone and with drafters, over prompt files; JSON out."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import logging

from ..evaluation.benchmark import Benchmark
from ..evaluation.prompts import read_prompts
from ..evaluation.summary import summarize
from ..provenance import provenance
from .loading import load_drafters, load_target


@dataclass
class BenchCommand:
    """What to measure and where to write it."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafters: list[str] = field(metadata={"help": "Folders or Hub names, each maybe as NAME=FOLDER."})
    prompts: list[str] = field(metadata={"help": "JSON lines files; each is a prompt set named after its file."})
    output: str = field(metadata={"help": "JSON file to write; runs go to the same name with .jsonl and are resumed."})
    decodings: list[str] = field(
        default_factory=lambda: ["greedy", "temperature-0.7"], metadata={"help": "Names of decodings; see the docs."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens of a text."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    repeats: int = field(default=1, metadata={"help": "Runs of each prompt, arm and decoding."})
    baseline: bool = field(
        default=True, metadata={"help": "Also run the target alone; without it there is no speed-up."}
    )
    seed: int = field(default=0, metadata={"help": "Of sampling, order and intervals."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; None leaves torch's choice."})
    dtype: str = field(default="float32", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})


def run(command: BenchCommand) -> None:
    """Measure, summarise, write, show."""
    logging.set_verbosity_error()
    if command.threads:
        torch.set_num_threads(command.threads)
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    drafters = load_drafters(command.drafters, target)
    output = Path(command.output)
    benchmark = Benchmark(
        target=target,
        tokenizer=tokenizer,
        drafters=drafters,
        prompts=read_prompts(command.prompts, command.limit),
        decodings=command.decodings,
        max_new_tokens=command.max_new_tokens,
        repeats=command.repeats,
        seed=command.seed,
        with_baseline=command.baseline,
    )
    records = benchmark.run(output.with_suffix(".jsonl"))
    rows = summarize(records, {name: drafter.block_size for name, drafter in drafters.items()}, command.seed)
    settings = {
        **vars(command),
        "dtype": str(target.dtype),
        "trees": {n: d.num_nodes for n, d in drafters.items()},
    }
    output.write_text(
        json.dumps({"provenance": provenance(**settings), "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("drafter", "decoding", "set", "acceptance length", "speed-up", "identical")
    for row in rows:
        low, high = row.get("speedup_interval", (0, 0))
        speedup = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})" if "speedup" in row else "-"
        same = f"{row['num_identical']}/{row['num_compared']}" if "speedup" in row else "-"
        table.add_row(row["arm"], row["decoding"], row["set"], f"{row['acceptance_length']:.2f}", speedup, same)
    Console().print(table)
