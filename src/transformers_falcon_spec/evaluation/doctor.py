"""The doctor: why drafts are not kept, or why it is not faster.

It checks the machine, the files, the target that the drafter was made for, and how that reads trees.
Then texts show whether enough drafts are kept, and what they cost.
"""

import copy
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from ..core.stats import GenerationStats
from ..drafters.base import DrafterModel
from ..drafters.fingerprint import (
    FIELD,
    OTHER_TARGET,
    WRONG_TEMPLATE,
    Finding,
    TargetFingerprint,
    mismatches_of,
)
from ..errors import DrafterMismatchError, GenerationError, TargetError
from ..generation.capture.state import doubt_of, release, states_of
from ..generation.probe import check_kind, check_target, reads_masks
from ..generation.timed import check_known
from ..provenance import provenance
from .benchmark import Benchmark
from .methods import with_drafter, with_options
from .prompts import Prompt
from .summary import last_evaluation, pooled_stats, summarize, wilson_interval

Section = dict[str, Any]
_FORMS = {"tree": "trees", "paths": "each path of a tree as a row", "chain": "chains"}
Runs = list[dict[str, Any]]  # as `Benchmark` records them
UNTUNED, AS_CONFIGURED = "whole drafts", "as set up"  # without a tuner, and with the options of the drafter
TOLERANCE = 0.85  # of the promised acceptance; prompts differ by as much
MAX_STEP_COST = 2.0  # plain steps that a draft may cost where no acceptance is expected
QUESTIONS = (
    "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?",
    "Write a Python function that returns the largest number of a list.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that thanks a friend for a book.",
)


# What the doctor looks for, by the names of sections in docs/troubleshooting.md, and what to do about it, with numbers
# of the case in braces; mismatches of a pair bring their own.
ADVICE = {
    "broken checkpoint": (
        "Fetch the files again (`git lfs pull` fetches what a pointer stands for), take another checkpoint, or convert"
        " it if it is other software's."
    ),
    OTHER_TARGET: "Take a drafter for this target: `falcon-spec find`, or `falcon-spec train`.",
    WRONG_TEMPLATE: "",
    "no drafts": "Take a decoder-only target that can take back what it read; docs/parity.md says which can.",
    "mask bug": 'Load it with `attn_implementation="sdpa"` or `"eager"`, or mend its attention.',
    "no trees": "Expect less of trees with this target; docs/parity.md lists those that read them.",
    "long texts": "Set `sliding_window` to {trained} in its `config.json`, or in its `generation_config`.",
    "low acceptance": (
        "Compare the prompts and how they are put (system prompt, thinking mode, language) with what the drafter was "
        "trained on; train it on with answers of this target to such prompts."
    ),
    "wrong replays": (
        "Set `capture=False` in the drafter's `generation_config`, update PyTorch and the driver, and report it."
    ),
    "slow machine": (
        "Take a smaller drafter, smaller trees (`num_tree_nodes`) or fewer rows, a larger target, or a machine with "
        "arithmetic to spare, on which nothing else runs; see docs/how_it_works.md."
    ),
}


def finding(name: str, text: str, **numbers: int) -> Finding:
    """A fault that was found, with the advice for it."""
    return Finding(name, text, ADVICE[name].format(**numbers))


@dataclass
class Report:
    """What the doctor found, the gravest first, and what it measured, by section.

    Sections stand in the order in which they were examined; those after a fault that stops everything are missing.
    """

    target: str
    drafter: str | None  # None: the target alone is examined
    sections: dict[str, Section] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, text: str, **numbers: int) -> None:
        """Add a fault that was found; `numbers` are those of its advice."""
        self.findings.append(finding(name, text, **numbers))

    @property
    def names(self) -> list[str]:
        """The names of the faults that were found."""
        return [each.name for each in self.findings]

    @property
    def conclusion(self) -> str:
        """The whole report in a sentence or two."""
        names = "; ".join(self.names)
        if "acceptance" not in self.sections:
            return self._conclusion_without_texts(names)

        speedup = self.sections["costs"]["speedup"]
        speed = "texts too short to time" if speedup is None else f"{speedup:.2f} times as fast as the target alone"
        found = f"{self.sections['acceptance']['acceptance_length']:.2f} tokens a step, {speed}."
        if self.findings:
            return f"{found[0].upper()}{found[1:]} What is wrong: {names}."

        if speedup is not None and speedup < 1:
            advice = "Longer texts give the tuner more time to learn what does."
            return f"No fault is found, but it does not pay: {found} {advice}"

        return f"Nothing is wrong: {found}"

    def _conclusion_without_texts(self, names: str) -> str:
        if self.drafter is not None:
            return f"Drafting does not work: {names}."

        reading = self.sections.get("reading", {})
        if reading.get("form") is None:
            return f"`{self.target}` cannot be drafted for: {names}."

        without_head = ", by drafters that do without its head" if reading["head_fault"] else ""

        return f"`{self.target}` can be drafted for{without_head}: it verifies {_FORMS[reading['form']]}."

    def to_json(self) -> dict[str, Any]:
        """The report as `falcon-spec doctor --json` prints it."""
        return {
            "conclusion": self.conclusion,
            "findings": list(map(shown, self.findings)),
            "target": self.target,
            "drafter": self.drafter,
            **self.sections,
        }


def shown(found: Finding) -> dict[str, str]:
    """A finding as the report prints it, with the section of the documentation that explains it."""
    return {
        "name": found.name,
        "text": found.text,
        "remedy": found.remedy,
        "documentation": f"docs/troubleshooting.md#{found.name.replace(' ', '-')}",
    }


def environment(device: str) -> Section:
    """The section on versions, device and threads, and on how busy the machine is."""
    origin = provenance(device=device)
    return {
        "versions": origin["versions"],
        "device": origin["device"],
        "threads": origin["threads"],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def training_record(name: str) -> dict[str, Any]:
    """The record of the training of the drafter called `name`, if it is on this machine; else empty."""
    path = cached_file(name, "training.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else {"path": path, **json.loads(Path(path).read_text(encoding="utf-8"))}


def check_pair(
    drafter: DrafterModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: Report,
    template_kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Report what the drafter's config says of its target, and what differs; True if the two can work together."""
    stored = getattr(drafter.config, FIELD, None)
    given = TargetFingerprint.of_target(target, tokenizer)
    report.sections["fingerprint"] = {
        "made_for": drafter.config.target_name_or_path,
        "is_stored": stored is not None,
        "known_weights": sorted(stored["weights"]) if stored else [],
        "looked_at": sorted(given.weights),
        "dtype": given.dtype,
    }

    report.findings += mismatches_of(drafter, target, tokenizer, template_kwargs)
    try:
        drafter.check_target(target)
    except DrafterMismatchError as error:
        report.findings.insert(0, finding(OTHER_TARGET, str(error)))
        return False

    return True


def check_tree_reading(target: PreTrainedModel, report: Report) -> bool:
    """Report how the target reads draft trees; True if it can verify anything at all."""
    section = report.sections["reading"] = {"form": None}
    try:
        check_kind(target)
        section["reads_masks"] = None
        with suppress(Exception):  # a model may raise anything here; the probe decides what it can do
            section["reads_masks"] = reads_masks(target)

        found = check_target(target)
        for name in ("form", "tree_error", "control_error", "reason", "has_hooks", "head_fault"):
            section[name] = getattr(found, name)
    except (GenerationError, TargetError) as error:
        section["reason"] = str(error)

    if section["form"] == "tree":
        return True

    kind = type(target).__name__
    can_verify = section["form"] is not None
    if section.get("reads_masks") is False:
        report.add(
            "mask bug",
            f"The attention of `{kind}` (`{target.config._attn_implementation}`) ignores masks: a node's logits are "
            "the same whatever its parent is. Drafts are read as chains or as rows, or not at all. "
            f"{section['reason']}",
        )
    elif can_verify:
        text = f"`{kind}` cannot read a tree in one forward, so fewer drafts fit into a step: {section['reason']}"
        report.add("no trees", text)
    else:
        report.add("no drafts", str(section["reason"]))

    return can_verify


def check_capture(target: PreTrainedModel, report: Report) -> None:
    """Report how much of the newest texts' work was captured, and whether the graphs do what the work does."""
    work: list[Any] = []
    for state in states_of(target):
        work += state.all_work

    if not work:
        return

    report.sections["capture"] = {
        "num_captured": sum(each.is_captured for each in work),
        "num_proven": sum(each.is_proven for each in work),
        "failures": sorted({each.failure for each in work if each.failure is not None}),
    }
    doubt = doubt_of(target)
    if doubt is not None:
        report.add("wrong replays", f"Nothing on this target is captured any more: {doubt}.")


def check_length(drafter: DrafterModel, longest: int, record: Mapping[str, Any], report: Report) -> None:
    """Report the trained length and the window of a drafter, and find texts up to `longest` tokens beyond both.

    The trained length stands in the record of the training, else it is the context in the drafter's config. Drafters
    without a window of their own have no attention over the text, or a whole model's.
    """
    if not drafter.has_window:
        return

    window = drafter.sliding_window
    trained = record.get("trained_length", drafter.config.max_position_embeddings)
    report.sections["length"] = {"longest_text": longest, "trained_length": trained, "sliding_window": window}
    if min(longest, window or longest) > trained:
        text = (
            f"Texts get up to {longest:,} tokens long, and the drafter looks back over more than the {trained:,} of "
            "which it learned: drafts get worse beyond."
        )
        report.add("long texts", text, trained=trained)


def built_in_prompts() -> list[Prompt]:
    """A few prompts for when none are given."""
    return [Prompt("doctor", str(number), (("user", text),)) for number, text in enumerate(QUESTIONS)]


def promise_of(record: Mapping[str, Any]) -> Section:
    """What the record of its training promises of a drafter; nothing where it was not evaluated.

    That is the last acceptance, else the accuracy of the best guess at each block position, a lower bound for trees.
    """
    last = last_evaluation(record.get("curve", []))
    if not last:
        return {}

    by_depth = _series(last, "eval_acceptance_at_depth")
    length = last.get("eval_acceptance_length")
    if not by_depth:
        by_depth = _series(last, "eval_accuracy_at")
        length = 1 + sum(accumulate(by_depth, mul))

    return {"promised_by": record["path"], "promised_length": length, "promised_by_depth": by_depth}


def _series(entry: dict[str, Any], name: str) -> list[float]:
    """The values of `<name>_1`, `<name>_2` and so on."""
    values: list[float] = []
    while (key := f"{name}_{len(values) + 1}") in entry:
        values.append(entry[key])

    return values


def diagnose(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    record: Mapping[str, Any],
    report: Report,
) -> None:
    """Fill the report; a fault that makes drafting impossible ends the examination before any text is written.

    The drafter is in the target's type and on its device, and `record` is that of its training.
    """
    texts = [prompt.input_ids(tokenizer) for prompt in prompts]
    for input_ids in texts:
        check_known(input_ids, target)

    longest = max(input_ids.shape[1] for input_ids in texts) + max_new_tokens
    fits = check_pair(drafter, target, tokenizer, report, prompts[0].template_kwargs)
    can_verify = check_tree_reading(target, report)
    check_length(drafter, longest, record, report)
    if not (fits and can_verify):
        return

    release(target)  # so that all is captured and proven anew
    untuned = copy.deepcopy(drafter.generation_config)
    untuned.tune = False
    methods = [
        with_drafter(UNTUNED, with_options(drafter, untuned)),
        with_drafter(AS_CONFIGURED, drafter),
    ]
    benchmark = Benchmark(target, tokenizer, methods, prompts, ["greedy"], max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        runs = benchmark.run(Path(folder) / "runs.jsonl")

    check_capture(target, report)
    rows = _rows(runs)
    acceptance = _acceptance(runs, rows[UNTUNED], promise_of(record))
    costs = _costs(rows)
    report.sections |= {"acceptance": acceptance, "costs": costs}
    fault = measured_fault(acceptance, costs, report.names)
    if fault is not None:
        report.findings.append(fault)


def _rows(runs: Runs) -> dict[str, dict[str, Any]]:
    """The rates of each method over all prompts as one set."""
    pooled = []
    for run in runs:
        pooled.append({**run, "set": "all", "prompt": f"{run['set']}/{run['prompt']}"})

    return {row["method"]: row for row in summarize(pooled)}


def _acceptance(runs: Runs, row: dict[str, Any], promise: Section) -> Section:
    """The section on the acceptance of untuned drafts, and whether it is lower than promised by more than luck."""
    stats = GenerationStats()
    for run in runs:
        if run["method"] == UNTUNED:
            stats += pooled_stats(run)

    is_low = False
    if promise and stats.offered_by_depth:
        most = wilson_interval(stats.kept_by_depth[0], stats.offered_by_depth[0])[1]
        is_low = most < TOLERANCE * promise["promised_by_depth"][0]

    return {
        "acceptance_length": stats.acceptance_length,
        "interval": row["acceptance_length_pooled_interval"],
        "by_depth": stats.acceptance_by_depth,
        "num_steps": stats.num_steps,
        "notes": stats.notes,
        "is_low": is_low,
        **promise,
    }


def _costs(rows: dict[str, dict[str, Any]]) -> Section:
    """The section on the seconds of a step with a whole draft and of its parts, and on the speed."""
    untuned = rows[UNTUNED]
    return {
        "plain_seconds": untuned.get("plain_seconds_per_step"),
        "draft_seconds": untuned["draft_seconds_per_step"],
        "verify_seconds": untuned["verify_seconds_per_step"],
        "other_seconds": untuned["other_seconds_per_step"],
        "step_cost": untuned.get("step_cost"),
        "speedup_of_whole_drafts": untuned.get("speedup"),
        "speedup": rows[AS_CONFIGURED].get("speedup"),
    }


def measured_fault(acceptance: Section, costs: Section, explained_by: Collection[str]) -> Finding | None:
    """The fault that the texts show: drafts that cannot pay, or low acceptance that no other finding explains.

    A whole draft may cost more than it brings where smaller ones, which the tuner chooses, pay.
    """
    length = acceptance["acceptance_length"]
    promised = acceptance.get("promised_length")
    cost = costs["step_cost"]
    pays = (costs["speedup"] or 0.0) > 1
    price = "" if cost is None else f" A step with a whole draft costs {cost:.2f} plain steps."

    if cost is not None and cost > max(length, promised or MAX_STEP_COST) and not pays:
        plain, draft, verify = costs["plain_seconds"], costs["draft_seconds"], costs["verify_seconds"]
        cause = f"reading a draft takes {1e3 * verify:.1f} ms, {verify / plain:.1f} times a single token"
        if draft > verify - plain:
            cause = f"drafting takes {1e3 * draft:.1f} ms of a step, {draft / plain:.1f} times a plain one"

        brought = f"It brings {max(length, promised or 0.0):.2f} tokens at best."
        return finding("slow machine", f"Drafting cannot pay on this machine: {cause}.{price} {brought}")

    is_loss = cost is not None and cost > length and not pays
    if explained_by or not (acceptance["is_low"] or is_loss):
        return None

    against = "" if promised is None else f", and {acceptance['promised_by']} promises {promised:.2f}"
    return finding("low acceptance", f"Drafts are kept too seldom: {length:.2f} tokens a step{against}.{price}")
