"""DiffuSpec: acceptance length by path search, adaptive length, beam, tau, M_max, lambda, length, passes, proxy, and path against tree.

Command: python -m benchmarks.diffuspec_ablation --drafters prefix=FOLDER full=FOLDER --proxy_texts runs/data/train.jsonl. One factor at a
time around the paper's path search. Hardware and time: any; only counts are kept, so that it may run beside other work, about ten
minutes on a core; resumes, and more factors, drafters or prompts join what is there. The target writes texts once, greedily; what drafts would
be accepted of them is then found without the target, as the loop would ask for them. Writes `benchmarks/results/diffuspec_ablation.json`,
which `falcon-spec report` renders into docs/diffuspec.md.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import logging

from benchmarks.diffuspec_arms import CPS, METHOD, Arm, Proxies, arms_of, proxies_of
from benchmarks.running import Runs
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.commands.loading import load_drafters, load_target
from transformers_falcon_spec.evaluation.drafted_texts import Text, counts
from transformers_falcon_spec.evaluation.group_texts import written_texts
from transformers_falcon_spec.evaluation.methods import with_drafter
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_acceptance_length, pooled_stats
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.provenance import provenance, weights_fingerprint

HERE = Path(__file__).parent
SETS = [str(HERE / "prompts" / f"{name}.jsonl") for name in ("gsm8k", "humaneval", "mt_bench")]
ALL_SETS = "all"


def main() -> None:
    """Replay every text with every arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafters", nargs="+", required=True, help="diffusion drafters, each as NAME=FOLDER")
    parser.add_argument("--proxy_texts", type=Path, required=True, help="conversations that the proxy is fitted to")
    parser.add_argument("--proxy_limit", type=int, help="use so many of them; left out: all")
    parser.add_argument("--factors", nargs="+", help="only these; left out: all")
    parser.add_argument("--prompts", nargs="+", default=SETS)
    parser.add_argument("--limit", type=int, default=10, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "diffuspec_ablation.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafters: Any = load_drafters(args.drafters, target)
    proxies = proxies_of(args.proxy_texts, tokenizer, target.config.vocab_size, args.proxy_limit)
    settings = {"max_new_tokens": args.max_new_tokens, "target": weights_fingerprint(target)}
    records = Records(args.output.with_suffix(".jsonl"), settings)
    texts, _ = written_texts(target, tokenizer, read_prompts(args.prompts, args.limit), args.max_new_tokens, records)
    replays = Replays(Target(target, ()), texts, args.max_new_tokens, proxies, records)
    runs = [
        run
        for name, drafter in drafters.items()
        for run in replays.runs(name, drafter, chosen(arms_of(drafter), args.factors))
    ]
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    kinds = {
        name: {"attention": drafter.config.attention, "block_size": drafter.block_size}
        for name, drafter in drafters.items()
    }
    result = {"provenance": origin, "num_texts": len(texts), "drafters": kinds, "rows": rows_of(runs)}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        if row["set"] == ALL_SETS:
            low, high = row["acceptance_length_interval"]
            arm = f"{row['drafter']:10s} {row['factor']:26s} {row['value']:24s}"
            print(f"{arm} {row['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) {row.get('difference', 0.0):+.2f}")


def chosen(arms: Sequence[Arm], factors: Sequence[str] | None) -> list[Arm]:
    """Arms of these factors, and what all are held against."""
    return [arm for arm in arms if factors is None or arm.factor in factors or is_base(arm.factor, arm.value)]


def is_base(factor: str, value: str) -> bool:
    """Whether arms differ from this one in one factor."""
    return (factor, value) == (METHOD, CPS)


@dataclass(frozen=True)
class Replays:
    """The texts to replay, and what is known of them: what `records` holds already is not counted again."""

    view: Target
    texts: dict[str, Text]
    max_new_tokens: int
    proxies: Proxies
    records: Records

    def runs(self, name: str, drafter: DiffusionDrafter, arms: Sequence[Arm]) -> Runs:
        """What each text takes with each arm of a drafter."""
        known = {(run["identity"], run["text"]): run for run in self.records.entries if "identity" in run}
        runs = []
        for arm in tqdm(arms, desc=name, unit="arm"):
            own = arm.of(drafter, self.proxies)
            identity = with_drafter(name, own).identity()
            for text_name, text in self.texts.items():
                if (identity, text_name) not in known:
                    found = vars(counts(self.view, own, text, self.max_new_tokens))
                    known[identity, text_name] = {"identity": identity, "text": text_name, "speculation": found}
                    self.records.append(known[identity, text_name])
                place = {"drafter": name, "factor": arm.factor, "value": arm.value, "set": text_name.partition(" ")[0]}
                runs.append({**place, **known[identity, text_name]})
        return runs


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """Acceptance length of every arm by set and over all sets, and its difference from that of the arm it differs from in one factor."""
    groups: dict[tuple[str, str, str, str], Runs] = {}
    for run in runs:
        for set_name in (run["set"], ALL_SETS):
            groups.setdefault((run["drafter"], run["factor"], run["value"], set_name), []).append(run)
    rows = []
    for (drafter, factor, value, set_name), own in groups.items():
        stats = [pooled_stats(run) for run in own]
        num_steps = max(sum(each.num_steps for each in stats), 1)
        row = {
            "drafter": drafter,
            "factor": factor,
            "value": value,
            "set": set_name,
            "num_texts": len(own),
            "acceptance_length": pooled_acceptance_length(own),
            "acceptance_length_interval": bootstrap(own, pooled_acceptance_length, 0),
            "drafted_per_step": sum(each.num_drafted for each in stats) / num_steps,
            "passes_per_step": sum(each.num_passes for each in stats) / num_steps,
        }
        if not is_base(factor, value):
            others = {run["text"]: run for run in groups[drafter, METHOD, CPS, set_name]}
            pairs = [(run, others[run["text"]]) for run in own]
            row |= {"difference": difference(pairs), "difference_interval": bootstrap(pairs, difference, 0)}
        rows.append(row)
    return rows


def difference(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    """How much longer the first of each pair is."""
    return pooled_acceptance_length([run for run, _ in pairs]) - pooled_acceptance_length(
        [other for _, other in pairs]
    )


if __name__ == "__main__":
    main()
