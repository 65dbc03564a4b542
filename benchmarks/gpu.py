"""The captured step on a GPU: Falcon beside eager, compiled and captured plain decoding.

Command: python -m benchmarks.gpu; `--minutes 10` stops after the turn in which that time ends, and the next call goes on. It needs torch,
Transformers and jaxtyping alone, and with `PYTHONPATH=src` no installation. Hardware and time: one GPU with room for a 7B target in bfloat16; all cells take hours,
the first ones come first. The pair is the embedded one at the cost of a large model (docs/results.md): the small models' acceptance. `--trained` names a
folder that holds `falcon5`; other drafters run in `benchmarks.race --device cuda`. Without CUDA the same script runs uncaptured on a CPU, at the shape 0.3b. Writes `benchmarks/results/gpu.json`
(`gpu_cpu.json`), which `python -m benchmarks.report` renders into docs/results.md; the lines beside it hold every turn.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.inflation import SHAPES
from benchmarks.on_gpu.cells import Cell, cells_of
from benchmarks.on_gpu.floor import copy_bandwidth
from benchmarks.on_gpu.goals import check_goals
from benchmarks.on_gpu.pairs import Pair, why_absent
from benchmarks.on_gpu.rows import cell_result
from benchmarks.on_gpu.runs import CellRun, Deadline, failures_of, turns_of
from benchmarks.on_gpu.tables import goals_table, tables
from benchmarks.report import Report
from transformers_falcon_spec.commands.loading import DTYPES
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.records import Records

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
PER_SET = 16  # prompts: sets in turn, so that a few turns hold all of them
FILES = {"cuda": "gpu.json", "cpu": "gpu_cpu.json"}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, most valuable first."""
    args = parsed(argv)
    logging.set_verbosity_error()
    device = torch.device(args.device)
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    settings = {key: str(getattr(args, key)) for key in ("shape", "dtype", "max_new_tokens")}
    records = Records(args.output.with_suffix(".jsonl"), {**settings, "device": origin["device"]})
    bench = Bench(args, device, records, copy_bandwidth(device), Deadline(args.minutes))
    print(f"{origin['device']}: a copy moves {bench.bandwidth / 1e9:.0f} GB/s")

    for cell in bench.cells:
        bench.measure(cell)
        write(args.output, bench, origin)
        if bench.deadline.is_over:
            print("The time is over; the same command goes on.")
            break

    print(goals_table(json.loads(args.output.read_text("utf-8"))["goals"]))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; what a machine decides follows from whether it has CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--models", type=Path, default=HERE.parent / "models", help="folder of the embedded pair")
    parser.add_argument("--trained", type=Path, help="folder that holds `falcon5` for its target")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--shape", choices=["small", *SHAPES], help="left out: 7b on CUDA, 0.3b on a CPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="left out: bfloat16 on CUDA")
    parser.add_argument("--cells", nargs="+", help="only cells whose names begin so")
    parser.add_argument(
        "--turns", type=int, help="turns of a cell, where fewer than planned; goals then count as not measured"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many minutes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    kind = torch.device(args.device).type
    args.shape = args.shape or ("7b" if kind == "cuda" else "0.3b")
    args.dtype = args.dtype or ("bfloat16" if kind == "cuda" else "float32")
    args.output = args.output or HERE / "results" / FILES[kind]
    return args


class Bench:
    """All cells on one device; a pair is kept as long as its shape is asked for."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, records: Records, bandwidth: float, deadline: Deadline
    ) -> None:
        self.args, self.device, self.records = args, device, records
        self.bandwidth, self.deadline = bandwidth, deadline
        wanted = tuple(args.cells or [""])
        self.every = cells_of(device.type, args.shape)
        self.cells = [cell for cell in self.every if cell.name.startswith(wanted)]
        self._pair: Pair | None = None
        found = [read_prompts([str(HERE / "prompts" / f"{name}.jsonl")], PER_SET) for name in SETS]
        self._prompts = [*chain.from_iterable(zip(*found, strict=True))]

    def pair(self, cell: Cell) -> Pair:
        """The pair of a cell's shape."""
        if self._pair is None or self._pair.shape != cell.shape:
            self._pair = None  # before the next one is built
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            kind: Any = (DTYPES[self.args.dtype], self.device)
            self._pair = Pair(self.args.models, self.args.trained, cell.shape, *kind)

        return self._pair

    def measure(self, cell: Cell) -> None:
        """Make what a cell lacks, as far as the time allows."""
        num_done = len(turns_of(cell, self.records.entries))
        planned = min(cell.planned, self.args.turns or cell.planned)
        ways = tuple(way for way in cell.ways if way.name not in self.absent(cell))
        if num_done >= planned or self.deadline.is_over or len(ways) < 2:  # noqa: PLR2004  nothing to compare
            return
        print(f"{cell.name}: {num_done} of {planned} turns are there", flush=True)
        pair = self.pair(cell)
        prompts = [prompt.input_ids(pair.tokenizer) for prompt in self._prompts]
        measured = replace(cell, num_turns=planned, ways=ways)
        CellRun(measured, pair, prompts, self.records, self.bandwidth, self.args.max_new_tokens).run(self.deadline)

    def absent(self, cell: Cell) -> dict[str, str]:
        """Ways of a cell whose drafters are not at hand, and why; a later call that has them measures their cells."""
        found = {way.name: why_absent(way, self.args.models, self.args.trained) for way in cell.ways}
        return {name: why for name, why in found.items() if why is not None}


def write(output: Path, bench: Bench, origin: dict[str, Any]) -> None:
    """Write what all turns so far come to."""
    on_cuda = bench.device.type == "cuda"
    entries = bench.records.entries
    found = [
        cell_result(cell, entries, {**failures_of(cell, entries), **bench.absent(cell)})
        for cell in bench.every
        if any(row["cell"] == cell.name for row in entries)
    ]
    result = {
        "provenance": origin,
        "on_cuda": on_cuda,
        "bandwidth": bench.bandwidth,
        "goals": check_goals(found, on_cuda=on_cuda),
        "cells": found,
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


REPORT = Report("docs/results.md#gpu", [*FILES.values()], tables)


if __name__ == "__main__":
    main()
