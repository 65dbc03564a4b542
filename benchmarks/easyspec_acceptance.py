"""EasySpec: acceptance length by group size, chains and trees, with and without calibration, attention alone or whole layers at once.

Command: python -m benchmarks.easyspec_acceptance --draft_model FOLDER
Hardware and time: any; only counts are kept, so that it may run beside other work. Resumes, and more kinds, sizes or prompts join what is
there. The target writes held-out texts once, greedily; what a drafter would be accepted of them is then found without the target, as
the loop would ask for drafts. Writes `benchmarks/results/easyspec_acceptance.json`, which `falcon-spec report` renders into
docs/easyspec.md.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import logging

from transformers_falcon_spec import LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.drafters.easyspec.groups import build_groups
from transformers_falcon_spec.evaluation.drafted_texts import Text
from transformers_falcon_spec.evaluation.group_fit import Replay, Steps
from transformers_falcon_spec.evaluation.group_texts import written_texts
from transformers_falcon_spec.evaluation.methods import with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.provenance import provenance, weights_fingerprint

HERE = Path(__file__).parent
KINDS = {"chain": 1, "tree": 4}  # nodes of a depth that grow children
ATTENTION = "attention at once"  # EasySpec; the others are its ablations
VARIANTS: dict[str, dict[str, bool]] = {
    ATTENTION: {},
    "without calibration": {"calibrate": False},
    "whole layers at once": {"whole_layers": True},
}
Pair = tuple[Steps, Steps]  # of one text: of an arm, and of the one it is held against


def main() -> None:
    """Replay every text with every arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--draft_model", required=True, help="folder of a language model")
    parser.add_argument("--prompts", nargs="+", default=[str(HERE / "prompts" / "held_out.jsonl")])
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--group_sizes", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--num_tree_nodes", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "easyspec_acceptance.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter: Any = LayerParallelDrafter.from_pretrained(args.draft_model, target=target, backend="sequential")
    same = {name: getattr(args, name) for name in ("depth", "num_tree_nodes", "max_new_tokens")}
    weights = {"weights": [weights_fingerprint(model) for model in (target, drafter)]}
    records = Records(args.output.with_suffix(".jsonl"), {**same, **weights})
    texts, _ = written_texts(target, tokenizer, read_prompts(args.prompts, args.limit), args.max_new_tokens, records)
    arms = {arm: replay(target, drafter, *arm[:2], args) for arm in arms_of(args.kinds, args.group_sizes)}
    counts = counted(texts, arms, len(drafter.layered.layers), records)
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    groups = {size: build_groups(len(drafter.layered.layers), size) for size in args.group_sizes}
    result = {"provenance": origin, "num_texts": len(texts), "groups": groups, "rows": rows_of(counts)}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        low, high = row["acceptance_length_interval"]
        arm = f"{row['kind']:6s} {row['variant']:22s} groups of {row['group_size']}"
        print(f"{arm} {row['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) {row.get('difference', 0.0):+.2f}")


Arm = tuple[str, str, int]  # kind of draft, variant, group size


def arms_of(kinds: Sequence[str], sizes: Sequence[int]) -> list[Arm]:
    """All arms; layers that stand alone leave nothing to ablate."""
    return [arm for arm in product(kinds, VARIANTS, sizes) if arm[1] == ATTENTION or arm[2] > 1]


def replay(target: Any, drafter: Any, kind: str, variant: str, args: argparse.Namespace) -> Replay:
    """Counts what the drafter would be accepted of with drafts of a kind."""
    options = SpeculationConfig(
        tune=False, tree_depth=args.depth, tree_top_k=KINDS[kind], num_tree_nodes=args.num_tree_nodes
    )
    return Replay(target, with_options(drafter, options, **VARIANTS[variant]), options, args.max_new_tokens)


def counted(
    texts: dict[str, Text], arms: dict[Arm, Replay], num_layers: int, records: Records
) -> dict[Arm, list[Steps]]:
    """What each text takes with each arm; what `records` holds already for the same groups is not counted again."""
    groups = {arm: build_groups(num_layers, arm[2]) for arm in arms}
    known = {
        (tuple(entry["arm"]), entry["text"]): Steps(**entry["steps"])
        for entry in records.entries
        if "arm" in entry and entry.get("groups") == groups.get(tuple(entry["arm"]))
    }
    for arm, (name, text) in tqdm(list(product(arms, texts.items())), desc="replays", unit="text"):
        if (arm, name) not in known:
            steps = known[arm, name] = arms[arm].steps(text, groups[arm])
            records.append({"arm": arm, "groups": groups[arm], "text": name, "steps": asdict(steps)})
    return {arm: [known[arm, name] for name in texts] for arm in arms}


def rows_of(counts: dict[Arm, list[Steps]]) -> list[dict[str, Any]]:
    """Acceptance length of every arm, and its difference from that of the arm that it is held against, text by text."""
    rows = []
    for (kind, variant, size), steps in counts.items():
        other = (kind, ATTENTION, 1 if variant == ATTENTION else size)
        row = {
            "kind": kind,
            "variant": variant,
            "group_size": size,
            "acceptance_length": length(steps),
            "acceptance_length_interval": bootstrap(steps, length, 0),
        }
        if size > 1 and other in counts:
            pairs = list(zip(steps, counts[other], strict=True))
            row |= {"difference": difference(pairs), "difference_interval": bootstrap(pairs, difference, 0)}
        rows.append(row)
    return rows


def length(steps: Sequence[Steps]) -> float:
    """Acceptance length over texts."""
    return sum(steps, Steps(0, 0, 0, 0)).acceptance_length


def difference(pairs: Sequence[Pair]) -> float:
    """How much longer the first of each pair is."""
    return length([pair[0] for pair in pairs]) - length([pair[1] for pair in pairs])


if __name__ == "__main__":
    main()
