"""The doctor's examination of a pair, from its configuration to the acceptance and the speed of its texts."""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.stats import GenerationStats
from ...drafters.base import DrafterModel
from ...drafters.compatibility.mismatches import Finding
from ...generation.packed_linear import PackedReads
from ...generation.timed import check_known
from ..benchmark import Benchmark
from ..methods import with_drafter, with_options
from ..prompts import Prompt
from ..summary import pooled_stats, summarize, wilson_interval
from .expectation import Expectation
from .findings import LOW_ACCEPTANCE, SLOW_MACHINE, TEMPLATE_MASK, Report, Section
from .long_texts import check_length
from .setup_checks import check_pair, check_template, check_tree_reading
from .static_step import check_static_step
from .undertraining import num_rows_read, undertraining

Runs = list[dict[str, Any]]  # as `Benchmark` records them
UNTUNED, AS_CONFIGURED = "whole drafts", "as set up"  # without a tuner, and with the options of the drafter
TOLERANCE = 0.85  # of the expected acceptance; prompts differ by as much
MAX_STEP_COST = 2.0  # plain steps that the cheapest draft may cost where no acceptance is expected
QUESTIONS = (
    "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?",
    "Write a Python function that returns the largest number of a list.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that thanks a friend for a book.",
)


def built_in_prompts() -> list[Prompt]:
    """A few prompts for when none are given."""
    return [Prompt("doctor", str(number), (("user", text),)) for number, text in enumerate(QUESTIONS)]


@dataclass(frozen=True)
class Case:
    """A pair to examine, the texts to write with it, and what to expect of the drafter."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel  # in the target's type and on its device
    prompts: Sequence[Prompt]
    max_new_tokens: int
    expected: Expectation | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # of its training


def diagnose(case: Case, report: Report) -> None:
    """Fill the report; a fault that makes drafting impossible ends the examination before any text is written."""
    template_kwargs = case.prompts[0].template_kwargs if case.prompts else None
    fits = check_pair(case.drafter, case.target, case.tokenizer, report, template_kwargs)
    can_verify = check_tree_reading(case.target, report)
    check_template(case.tokenizer, report, template_kwargs)
    check_length(case.drafter, _longest(case), case.record, report)
    if not (fits and can_verify):
        return
    runs = _runs(case)
    pooled = [{**run, "set": "all", "prompt": f"{run['set']}/{run['prompt']}"} for run in runs]
    rows = {row["method"]: row for row in summarize(pooled)}
    explained_by = [finding.name for finding in report.findings if finding.name != TEMPLATE_MASK]
    acceptance, costs = _acceptance(runs, rows[UNTUNED], case.expected), _costs(runs, rows)
    report.sections["acceptance"] = acceptance | {"explained_by": explained_by if acceptance["is_low"] else []}
    report.sections["costs"] = costs | _packed(case, runs)
    input_ids = case.prompts[0].input_ids(case.tokenizer)
    report.sections["step"] = check_static_step(case.target, case.drafter, input_ids)
    found = undertraining(num_rows_read(case.record), acceptance, explained_by)
    report.findings += filter(None, [found or measured_fault(acceptance, costs, explained_by)])


def _longest(case: Case) -> int:
    """Tokens of the longest text that is written, all of which the target must know."""
    prompts = [prompt.input_ids(case.tokenizer) for prompt in case.prompts]
    for input_ids in prompts:
        check_known(input_ids, case.target)
    return max(input_ids.shape[1] for input_ids in prompts) + case.max_new_tokens


def _runs(case: Case) -> Runs:
    """Greedy runs of the target alone, of the drafter without a tuner, and of the drafter as it is configured."""
    untuned = copy.deepcopy(case.drafter.generation_config)
    untuned.tune = False
    methods = {UNTUNED: with_options(case.drafter, untuned), AS_CONFIGURED: case.drafter}
    benchmark = Benchmark(
        target=case.target,
        tokenizer=case.tokenizer,
        methods=[with_drafter(name, drafter) for name, drafter in methods.items()],
        prompts=list(case.prompts),
        decodings=["greedy"],
        max_new_tokens=case.max_new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        return benchmark.run(Path(folder) / "runs.jsonl").complete()


def _acceptance(runs: Runs, row: dict[str, Any], expected: Expectation | None) -> Section:
    """The section on the acceptance of untuned drafts, and whether it is lower than expected."""
    own = [run for run in runs if run["method"] == UNTUNED]
    stats = sum(map(pooled_stats, own), GenerationStats())
    promised = {} if expected is None else {
        "promised_by": expected.source,
        "promised_length": expected.acceptance_length,
        "promised_by_depth": expected.by_depth,
    }  # fmt: skip
    return {
        "acceptance_length": stats.acceptance_length,
        "interval": row["acceptance_length_pooled_interval"],
        "by_depth": stats.acceptance_by_depth,
        "num_steps": stats.num_steps,
        "notes": stats.notes,
        "is_low": expected is not None and _is_lower_than(expected, own, stats),
        **promised,
    }


def _is_lower_than(expected: Expectation, runs: Runs, stats: GenerationStats) -> bool:
    """Whether acceptance is lower than expected by more than luck and other prompts explain."""
    if not expected.lowest:
        kept, offered = (counts[0] if counts else 0 for counts in (stats.kept_by_depth, stats.offered_by_depth))
        return offered > 0 and wilson_interval(kept, offered)[1] < TOLERANCE * expected.by_depth[0]
    least = min(expected.lowest.values())
    return any(
        row["acceptance_length_pooled_interval"][1] < TOLERANCE * expected.lowest.get(row["set"], least)
        for row in summarize(runs)
    )


def _costs(runs: Runs, rows: Mapping[str, dict[str, Any]]) -> Section:
    """The section on the seconds of a step and of its parts, by size."""
    untuned, configured = rows[UNTUNED], rows[AS_CONFIGURED]
    tuning = next(run["speculation"]["tuning"] for run in reversed(runs) if run["method"] == AS_CONFIGURED)
    section: Section = {
        "plain_seconds": untuned.get("plain_seconds_per_step"),
        **{f"{name}_seconds": untuned[f"{name}_seconds_per_step"] for name in ("draft", "verify", "other")},
        "step_cost": untuned.get("step_cost"),
        "read_seconds_by_nodes": tuning.get("read_seconds", {}),
        "draft_seconds_by_passes": tuning.get("draft_seconds", {}),
        "speedup_of_whole_drafts": untuned.get("speedup"),
        "speedup": configured.get("speedup"),
    }
    return section | {"least_cost": _least_cost(section)}


def _packed(case: Case, runs: Runs) -> Section:
    """Memory of the packed copies that the runs read, and that copies of all layers would take."""
    used = max(run["speculation"]["packed_bytes"] for run in runs if run["method"] == AS_CONFIGURED)
    models = (case.target, case.drafter)
    return {"packed_bytes": used, "packable_bytes": PackedReads(models, True).num_bytes}


def _least_cost(section: Section) -> float | None:
    """The cost of the cheapest step with a draft, in plain steps; None if texts are too short to measure it."""
    plain = section["plain_seconds"]
    if plain is None:
        return None
    reads = {float(size): seconds for size, seconds in section["read_seconds_by_nodes"].items()}
    drafts, sizes = list(section["draft_seconds_by_passes"].values()), sorted(size for size in reads if size > 1)
    if 1.0 not in reads or not sizes or not drafts:  # nothing was tuned
        return section["step_cost"]
    added = max(reads[sizes[0]] - reads[1.0], 0.0) + min(drafts)
    return min(section["step_cost"], 1 + added / plain)


def measured_fault(acceptance: Section, costs: Section, explained_by: Sequence[str]) -> Finding | None:
    """The fault that the texts show: drafts that cannot pay, or low acceptance that no other finding explains."""
    length, expected, least = acceptance["acceptance_length"], acceptance.get("promised_length"), costs["least_cost"]
    if least is not None and least > max(length, MAX_STEP_COST if expected is None else expected):
        return _slow_machine(costs, max(length, expected or 0.0))
    is_loss = least is not None and least > length
    if explained_by or not (acceptance["is_low"] or is_loss):
        return None
    against = f", and {acceptance['promised_by']} promises {expected:.2f}" if expected is not None else ""
    price = f" A step with a draft costs at least {least:.2f} plain steps." if least is not None else ""
    return Finding(
        LOW_ACCEPTANCE,
        f"Drafts are kept too seldom: {length:.2f} tokens a step{against}.{price}",
        "Compare the prompts and how they are put (system prompt, thinking mode, language) with what the drafter was "
        "trained on; train it on with answers of this target to such prompts.",
    )


def _slow_machine(costs: Section, best_length: float) -> Finding:
    """The fault of drafts that cost more than `best_length` tokens a step can bring."""
    plain, draft, verify = (costs[f"{name}_seconds"] for name in ("plain", "draft", "verify"))
    if draft > verify - plain:
        cause = f"drafting takes {1e3 * draft:.1f} ms of a step, {draft / plain:.1f} times a plain one"
        remedy = "Take a smaller drafter or a larger target, or see what else runs beside it and on how many threads."
    else:
        cause = f"reading a draft takes {1e3 * verify:.1f} ms, {verify / plain:.1f} times a single token"
        remedy = (
            "Take smaller trees (`num_tree_nodes`), fewer rows, or a machine with arithmetic to spare; see "
            "docs/tuning.md."
        )
    text = (
        f"Drafting cannot pay on this machine: {cause}. The cheapest step with a draft costs "
        f"{costs['least_cost']:.1f} plain steps of {1e3 * plain:.1f} ms and brings {best_length:.2f} tokens at best."
    )
    return Finding(SLOW_MACHINE, text, remedy)
