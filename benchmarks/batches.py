"""Tokens per second of batches with and without the drafter: prompts of mixed length, a tree for each row.

Command: python -m benchmarks.batches
Hardware and time: two CPU cores, about nine minutes; resumes. Three methods write the same batches, greedy, in random order: the target alone, the
drafter with its tuner as `generate` uses it, and the drafter with every step drafted. A row's tokens are counted up to its own end,
so that padding earns nothing. Writes `benchmarks/results/batches.json` (`.jsonl`, while it runs).
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import logging

from benchmarks.report import Report, Result, source_line, table, total
from benchmarks.running import same_run
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.methods import decoding_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.records import Records

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
Run = dict[str, Any]


METHODS = ("target", "tuned", "every_step")


def padded(prompts: list[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask `[rows, tokens]` of prompts `[1, tokens]`, padded on the left."""
    rows = [prompt[0] for prompt in prompts]
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    return pad_sequence(rows, True, float(pad), "left"), mask


def texts(sequences: Tensor, prompt_len: int, eos: list[int]) -> list[list[int]]:
    """The new tokens of each row up to its end."""
    rows = sequences[:, prompt_len:].tolist()
    ends = [next((index + 1 for index, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def rate(runs: list[Run], method: str) -> float:
    """Tokens per second."""
    own = [run[method] for run in runs]
    return total(own, "num_tokens") / total(own, "seconds")


def summary(runs: list[Run], method: str) -> Run:
    """What one method with a drafter came to beside the target alone."""
    num_rows = num_identical = 0
    for run in runs:
        for expected, found in zip(run["target"]["texts"], run[method]["texts"], strict=True):
            num_rows += 1
            num_identical += found == expected

    def speedup(drawn: list[Run]) -> float:
        return rate(drawn, method) / rate(drawn, "target")

    return {
        "num_rows": num_rows,
        "num_identical": num_identical,
        "acceptance_length": fmean(run[method]["acceptance_length"] for run in runs),
        "tokens_per_second": rate(runs, method),
        "speedup": speedup(runs),
        "speedup_interval": bootstrap(runs, speedup, 0),
    }


def written(target: Any, drafter: Any, method: str, batch: tuple[Tensor, Tensor], max_new_tokens: int) -> Run:
    """One batch as one method writes it."""
    ids, mask = batch
    drafter.generation_config.tune = method == "tuned"
    assistant = None if method == "target" else drafter
    timed = timed_generate(target, ids, max_new_tokens, decoding_options("greedy"), 0, assistant, attention_mask=mask)
    eos = target.generation_config.eos_token_id
    new_ids = texts(timed.output.sequences, ids.shape[1], eos if isinstance(eos, list) else [eos])
    run = {"num_tokens": sum(map(len, new_ids)), "seconds": timed.seconds, "texts": new_ids}
    return run if assistant is None else {**run, "acceptance_length": timed.output.speculation.acceptance_length}


def main(argv: Sequence[str] | None = None) -> None:
    """Write every batch with every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="rows of a batch")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set; every size writes all of them")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "batches.json")
    args = parser.parse_args(argv)

    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)

    found = [read_prompts([str(HERE / "prompts" / f"{name}.jsonl")], args.limit) for name in SETS]
    mixed = chain.from_iterable(zip(*found, strict=True))  # sets in turn: prompts of mixed length
    prompts = [prompt.input_ids(tokenizer) for prompt in mixed]
    timed_generate(target, prompts[0], 8, decoding_options("greedy"), 0, drafter)  # the target is probed once, untimed

    def batch_written(place: tuple[int, int]) -> Run:
        size, start = place
        batch, order = padded(prompts[start : start + size], tokenizer.pad_token_id), random.Random(f"{size} {start}")

        row: Run = {"size": size, "start": start}
        for method in order.sample(METHODS, len(METHODS)):
            row[method] = written(target, drafter, method, batch, args.max_new_tokens)
        return row

    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    file = Records(args.output.with_suffix(".jsonl"), same_run(origin))

    rows = []
    for size in args.sizes:
        places = {f"{size} {start}": (size, start) for start in range(0, len(prompts) - size + 1, size)}
        runs = file.measured(places, batch_written, f"batches of {size}")

        row = {"size": size, "target_tokens_per_second": rate(runs, "target")}
        for method in METHODS[1:]:
            row[method] = summary(runs, method)
        rows.append(row)
        print(row)

    args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    file.path.unlink()


def tables(result: Result, path: str) -> list[str]:
    """Batches with and without the drafter."""
    words = {"tuned": "as the tuner chooses", "every_step": "in every step"}
    columns = {
        "rows": "{size}",
        "target alone": "{target_tokens_per_second:.0f} tokens/s",
        "drafting": "{words}",
        "tokens/s": "{tokens_per_second:.0f}",
        "speed-up (95 % interval)": "{speedup:.2f} ({speedup_interval:~.2f})",
        "acceptance length": "{acceptance_length:.2f}",
        "identical rows": "{num_identical}/{num_rows}",
    }

    rows = []
    for row in result["rows"]:
        for method in METHODS[1:]:
            rows.append({**row, **row[method], "words": words[method]})

    lead = "Greedy, prompts of mixed length, all methods write the same batches in turn."
    return [lead, table(columns, rows), source_line(result, path)]


REPORT = Report("docs/results.md#batches", ["batches.json"], tables)


if __name__ == "__main__":
    main()
