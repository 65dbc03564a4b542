"""The tuner against every fixed size of tree, at few and many threads, rows and tokens of context, all in interleaved runs.

Command: python -m benchmarks.circumstances; with --shape 0.3b --dtype bfloat16 on an inflated pair. Hardware and time: two CPU cores and
nothing else running, about fifteen minutes; resumes from its `.jsonl`. Prompts are questions that no drafter was trained on, as many in one as fit the context.
Writes `benchmarks/results/circumstances.json`, which `falcon-spec report` renders into docs/tuning.md.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import logging

from benchmarks.batches import padded
from benchmarks.budgets import add_pair, load_pair
from benchmarks.choose_tree import shape_options
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.methods import with_options
from transformers_falcon_spec.evaluation.prompts import Prompt, read_prompts
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance, weights_fingerprint

HERE = Path(__file__).parent
PLAIN, TUNED = "target alone", "tuned"
PROMPTS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("parity", "held_out")]
Batch = tuple[Tensor, Tensor]  # ids and mask
Runs = list[dict[str, float]]  # of each batch the seconds of every arm


def main() -> None:
    """Write every batch with every arm, under all circumstances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 896], help="tokens of the longest prompt")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decoding", default="greedy")
    parser.add_argument("--num_batches", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    output = args.output or HERE / "results" / f"circumstances{f'_{args.shape}' if args.shape else ''}.json"
    target, tokenizer, drafter = load_pair(args)
    arms = {PLAIN: None, **arms_of(drafter, args.nodes, args.passes)}
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    records = Records(
        output.with_suffix(".jsonl"),
        {"command": origin["command"], "weights": [weights_fingerprint(model) for model in (target, drafter)]},
    )
    prompts, rows = read_prompts(PROMPTS), []
    for threads, num_rows, context in product(args.threads, args.rows, args.contexts):
        torch.set_num_threads(threads)
        circumstances = {"threads": threads, "rows": num_rows, "context": context}
        batches = list(islice(packed(prompts, tokenizer, context, num_rows), args.num_batches + 1))
        done = measured(circumstances, batches, records, lambda *batch: write_all(target, *batch, arms, args))
        same = sum(entry["is_identical"] for entry in done)
        runs = [entry["run"] for entry in done]
        rows.append({**circumstances, "num_batches": len(runs), "num_identical": same, **compared(runs)})
        print(rows[-1])
    output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def measured(
    circumstances: dict[str, int],
    batches: list[Batch],
    records: Records,
    write: Callable[[int, Batch], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The entries of all batches but the first, which warms up; those that are there already are not written again."""
    done = [entry for entry in records.entries if entry["circumstances"] == circumstances]
    left = range(len(done) + 1, len(batches))
    if left:
        write(0, batches[0])
    for number in tqdm(left, desc=str(circumstances)):
        done.append({"circumstances": circumstances, **write(number, batches[number])})
        records.append(done[-1])
    return done


def write_all(
    target: Any, number: int, batch: Batch, arms: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The seconds of every arm for a batch, in random order, and whether all wrote the same."""
    ids, mask = batch
    seconds, texts = {}, []
    for name in random.Random(number).sample([*arms], len(arms)):
        timed = timed_generate(
            target, ids, args.max_new_tokens, decoding_options(args.decoding), 0, arms[name], attention_mask=mask
        )
        seconds[name] = timed.seconds
        texts.append(timed.output.sequences.tolist())
    return {"is_identical": all(text == texts[0] for text in texts), "run": seconds}


def arms_of(drafter: Any, nodes: list[int], passes: list[int]) -> dict[str, Any]:
    """The drafter with every size of tree, and with the tuner."""
    options = {f"{num_nodes} nodes, {num_passes} passes": shape_options("grown", drafter, num_nodes, num_passes)
               for num_passes in passes for num_nodes in nodes}  # fmt: skip
    options[TUNED] = SpeculationConfig(dynamic_tree=True)
    return {name: with_options(drafter, chosen) for name, chosen in options.items()}


def packed(prompts: list[Prompt], tokenizer: Any, context: int, num_rows: int) -> Iterator[Batch]:
    """Batches of prompts, each of as many questions as fit `context` tokens."""
    texts: list[Tensor] = []
    question = ""
    for prompt in prompts:
        longer = f"{question}\n\n{prompt.text}".strip()
        ids, longer_ids = (
            Prompt("packed", "0", (("user", text),)).input_ids(tokenizer) for text in (question, longer)
        )
        if longer_ids.shape[1] <= context:
            question = longer
        elif question:
            texts.append(ids)
            question = ""
        if len(texts) == num_rows:
            yield padded(texts, tokenizer.pad_token_id)
            texts = []


def compared(runs: Runs) -> dict[str, Any]:
    """Speed of every arm beside the target alone, and of the tuner beside the best of the fixed sizes."""
    arms = [name for name in runs[0] if name != PLAIN]
    speeds = {name: ratio(runs, name, PLAIN) for name in arms}
    best = max((name for name in arms if name != TUNED), key=speeds.__getitem__)
    return {
        "speedups": speeds,
        "best": best,
        "tuned_speedup_interval": bootstrap(runs, lambda chosen: ratio(chosen, TUNED, PLAIN), 0),
        "tuned_beside_best": ratio(runs, TUNED, best),
        "tuned_beside_best_interval": bootstrap(runs, lambda chosen: ratio(chosen, TUNED, best), 0),
    }


def ratio(runs: Runs, arm: str, other: str) -> float:
    """How many times as fast one arm writes the same text as another."""
    return float(sum(run[other] for run in runs) / sum(run[arm] for run in runs))


if __name__ == "__main__":
    main()
