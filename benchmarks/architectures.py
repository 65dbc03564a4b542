"""The matrix of architectures: what a target of each family can verify, how exactly, and whether the text stays its own.

Command: python -m benchmarks.architectures
Hardware and time: one CPU core, about two minutes. Targets are tiny and random, made from the table in
`tests/families.py`; nothing is downloaded. For each family and attention implementation

* the probe gives its verdict in float32: `tree` (a whole tree in one forward), `paths` (one row for
  each path), `chain` (one path), `plain` (nothing is drafted) or `refused`, with the
  largest error of a tree's logits and, as a measure, the error of the same reading with a wrong mask;
* `generate` runs in float64, greedy and at temperature 1 with a seed, without and with a drafter that knows part of the
  truth, and the tokens are compared one by one.

Each line is kept in a `.jsonl` file beside the output, so that an interrupted run goes on where it stopped. Writes
`benchmarks/results/architectures.json`; `python -m benchmarks.report` renders it into `docs/results.md`.
"""

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from benchmarks.report import Report, Result, Rows, by, distinct, source_line, total
from benchmarks.running import run_cases
from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import FAMILIES
from tests.tiny import in_double, make_target
from transformers_falcon_spec import GenerationStats
from transformers_falcon_spec.errors import GenerationError, TargetError
from transformers_falcon_spec.generation.probe import check_kind, probe

HERE = Path(__file__).parent
SEED = 7  # of weights and draws
NUM_TOKENS = 24  # that each run writes
ATTENTIONS = ("eager", "sdpa")
MODES: tuple[dict[str, Any], ...] = ({"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0})
NUM_NODES = 12  # of a draft tree, root included


def measure(family: str, attention: str, seed: int = SEED, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """One line of the matrix."""
    row = {"family": family, "config": FAMILIES[family].config, "attention": attention}
    try:
        target = make_target(family, seed=seed, attn_implementation=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return {**row, "verdict": "not offered"}

    try:
        check_kind(target)
        capability = probe(target)
    except (GenerationError, TargetError) as error:
        return {**row, "verdict": "refused", "reason": _refusal(target, str(error))}

    verdict = capability.form
    errors = {"tree_error": capability.tree_error, "control_error": capability.control_error}
    if capability.form != "tree":
        errors = {"reason": capability.reason}
    return {**row, "verdict": verdict, **errors, **compare(in_double(target), seed, num_tokens)}


def compare(target: PreTrainedModel, seed: int, num_tokens: int) -> dict[str, Any]:
    """Texts without and with a drafter, token by token."""
    stats, num_compared, num_equal = GenerationStats(), 0, 0
    for mode in MODES:
        options = {**mode, "seed": seed, "max_new_tokens": num_tokens}
        plain = runs.plain(target, **options).sequences
        drafted = runs.drafted(target, InformedDrafter(RandomDrafter(NUM_NODES), plain), **options)
        num_compared += num_tokens
        num_equal += int((plain == drafted.sequences)[0, -num_tokens:].sum())
        stats = stats + drafted.speculation

    return {
        "num_tokens": num_compared,
        "num_equal": num_equal,
        "acceptance_length": stats.acceptance_length,
    }


def _refusal(target: PreTrainedModel, reason: str) -> str:
    """`reason`, after making sure that `generate` refuses the target too."""
    try:
        runs.drafted(target, RandomDrafter(), max_new_tokens=2)
    except (GenerationError, TargetError):
        return reason

    raise RuntimeError(f"The probe refuses `{type(target).__name__}`, but `generate` ran.")


def main() -> None:
    """Measure what is not measured yet, then write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "architectures.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)

    settings = {"seed": SEED, "tokens": NUM_TOKENS}
    cases = list(product(FAMILIES, ATTENTIONS))
    origin, rows = run_cases(args.output, settings, ("family", "attention"), cases, measure)

    order = {family: index for index, family in enumerate(FAMILIES)}
    rows = sorted(rows, key=lambda row: (order[row["family"]], row["attention"]))
    result = {"provenance": origin, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tables(result: Result, path: str) -> list[str]:
    """One paragraph for each verdict, which names its families; of another version the counts alone."""
    offered = [row for row in result["rows"] if row["verdict"] != "not offered"]
    families = by(offered, "attention", "family", "config")
    if path.endswith("_oldest.json"):
        return [*_in_short(result, families, offered), source_line(result, path)]

    groups: dict[str, Rows] = {}
    for family in families:
        rows = _rows_of(family)
        verdict = " or ".join(distinct(rows, "verdict"))
        groups.setdefault(verdict, []).append({"family": family["family"], "rows": rows})

    paragraphs = [_paragraph(verdict, group) for verdict, group in groups.items()]
    return [*paragraphs, source_line(result, path)]


def _rows_of(family: dict[str, Any]) -> Rows:
    """What a family showed with each implementation of attention that it has."""
    return [family[attention] for attention in ATTENTIONS if attention in family]


def _paragraph(verdict: str, group: Rows) -> str:
    """The families of a verdict, how many of their tokens are plain decoding's, and the largest error of a tree."""
    names, rows = [], []
    for family in group:
        names.append(f"`{family['family']}`")
        rows += family["rows"]

    families = "1 family" if len(group) == 1 else f"{len(group)} families"
    heading = f"**{verdict.capitalize()}** ({families}): {', '.join(names)}."
    num_equal, num_tokens = _equal_tokens(rows)
    if not num_tokens:
        return heading
    equal = f" {num_equal} of {num_tokens} tokens equal."
    if verdict != "tree":  # the errors of others are those of no tree that is ever read
        return heading + equal
    share = max(row["tree_error"] / row["control_error"] for row in rows)
    return f"{heading}{equal} Largest error of a tree: {share:.0e} of that of a wrong mask."


def _equal_tokens(rows: Rows) -> tuple[int, int]:
    """How many tokens are plain decoding's, and of how many; rows that wrote nothing have neither."""
    writing = [row for row in rows if "num_tokens" in row]
    return total(writing, "num_equal"), total(writing, "num_tokens")


def _in_short(result: Result, families: Rows, offered: Rows) -> list[str]:
    """How many families have each verdict, and where texts left the target's own."""
    verdicts = Counter(_rows_of(family)[-1]["verdict"] for family in families)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    num_equal, num_tokens = _equal_tokens(offered)
    version = result["provenance"]["versions"]["transformers"]
    return [f"### On Transformers {version}", f"{counts}; {num_equal} of {num_tokens} tokens equal."]


REPORT = Report("docs/results.md#architectures", ["architectures.json", "architectures_oldest.json"], tables)


if __name__ == "__main__":
    main()
