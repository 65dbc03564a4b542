"""What the doctor learns from texts: whether enough drafts are kept, what they cost, and how steps run."""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.stats import GenerationStats
from ...drafters.base import DrafterModel
from ...drafters.compatibility.mismatches import Finding
from ...errors import GenerationError, OptionError
from ...generation.model_parts import device_of
from ...generation.packed_linear import PackedReads
from ...generation.static.graph import is_captured
from ...generation.static.state import states_of
from ...generation.timed import check_known, timed_generate
from ...provenance import weights_fingerprint
from ...training.run_plan import MOST_STEPS, ROWS_PER_STEP
from ..benchmark import Benchmark
from ..methods import with_drafter, with_options
from ..prompts import Prompt
from ..results import is_complete, read_result
from ..summary import pooled_stats, summarize, wilson_interval
from .checks import check_length, check_pair, check_template, check_tree_reading, training_record
from .report import Report, Section, finding

Runs = list[dict[str, Any]]  # as `Benchmark` records them
UNTUNED, AS_CONFIGURED = "whole drafts", "as set up"  # without a tuner, and with the options of the drafter
TOLERANCE = 0.85  # of the expected acceptance; prompts differ by as much
MAX_STEP_COST = 2.0  # plain steps that the cheapest draft may cost where no acceptance is expected
# What training reads unless told otherwise, and the share of best first guesses that were right then, small target.
TRAINED_ROWS, TRAINED_SHARE = MOST_STEPS * ROWS_PER_STEP, 0.75
FAR_BELOW = 0.5  # of that share
STEP_TOKENS = 8  # of the text that is written in fixed shapes
FIXED = {"target": "in fixed shapes", "drafter": "in fixed shapes", "choice": "on the device"}
NOTES = {  # how notes of a call begin, and the part of a step that they are about
    "The step is dynamic": "target",
    "Drafts are not made in fixed shapes": "drafter",
    "The host chooses tokens": "choice",
    "Some of the work could not be captured and ran without": "capture",
}
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
class Expectation:
    """The acceptance that a drafter reaches when it works as it should."""

    source: str  # the file that holds the numbers
    acceptance_length: float  # bonus token included: of the best prompt set, or of a chain of the best guesses
    lowest: dict[str, float] = field(default_factory=dict)  # lower end of its interval by prompt set, from results
    by_depth: list[float] = field(default_factory=list)  # acceptance at each depth whose parent was accepted
    prompts: list[str] = field(default_factory=list)  # the prompt files that were measured and are at hand


def expected_acceptance(name: str, drafter: DrafterModel, results: str | None) -> Expectation | None:
    """What to expect of the drafter called `name`; None if there is neither a results file nor a training record."""
    if results is None:
        return _trained_acceptance(training_record(name))

    result, weights = read_result(Path(results)), weights_fingerprint(drafter)
    methods = {method["method"] for method in result["methods"] if method.get("weights") == weights}
    methods = methods or {name.rstrip("/").rpartition("/")[2]}
    own = [row for row in result["rows"] if row["method"] in methods and row["decoding"] == "greedy"]
    rows = [row for row in own if is_complete(row)]
    if not rows:
        raise OptionError(
            f"`results` must hold greedy runs of the drafter, but `{results}` has none of {sorted(methods)}. "
            "Measure some: `falcon-spec bench`."
        )
    return Expectation(
        source=results,
        acceptance_length=max(row["acceptance_length_pooled"] for row in rows),
        lowest={row["set"]: row["acceptance_length_pooled_interval"][0] for row in rows},
        by_depth=rows[0]["acceptance_by_depth"],
        prompts=[file for file in result["provenance"].get("prompts", []) if Path(file).is_file()],
    )


def _trained_acceptance(record: Mapping[str, Any]) -> Expectation | None:
    """The last acceptance, else the accuracy of the best guess at each block position, a lower bound for trees."""
    entries = [entry for entry in record.get("curve", []) if "eval_accuracy_at_1" in entry]
    if not entries:
        return None
    last, source = entries[-1], record["path"]
    by_depth = _series(last, "eval_acceptance_at_depth")
    if by_depth:
        return Expectation(source, last["eval_acceptance_length"], by_depth=by_depth)

    by_depth = _series(last, "eval_accuracy_at")
    length = joint = 1.0
    for share in by_depth:
        joint *= share
        length += joint
    return Expectation(source, length, by_depth=by_depth)


def _series(entry: dict[str, Any], name: str) -> list[float]:
    """The values of `<name>_1`, `<name>_2` and so on."""
    keys = [f"{name}_{number}" for number in range(1, len(entry) + 1)]
    return [entry[key] for key in keys if key in entry]


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
    template_kwargs = case.prompts[0].template_kwargs
    prompts = [prompt.input_ids(case.tokenizer) for prompt in case.prompts]
    for input_ids in prompts:
        check_known(input_ids, case.target)
    longest = max(input_ids.shape[1] for input_ids in prompts) + case.max_new_tokens
    fits = check_pair(case.drafter, case.target, case.tokenizer, report, template_kwargs)
    can_verify = check_tree_reading(case.target, report)
    check_template(case.tokenizer, report, template_kwargs)
    check_length(case.drafter, longest, case.record, report)
    if not (fits and can_verify):
        return

    runs = _runs(case)
    acceptance = report.sections["acceptance"] = _acceptance(runs, case.expected)
    packable_bytes = PackedReads((case.target, case.drafter), True).num_bytes
    costs = report.sections["costs"] = _costs(runs, packable_bytes)
    report.sections["step"] = check_static_step(case.target, case.drafter, prompts[0])

    explained_by = [found.name for found in report.findings if found.name != "template mask"]
    fault = undertraining(num_rows_read(case.record), acceptance, explained_by)
    fault = fault or measured_fault(acceptance, costs, explained_by)
    if fault is not None:
        report.findings.append(fault)


def _runs(case: Case) -> Runs:
    """Greedy runs of the target alone, of the drafter without a tuner, and of the drafter as it is configured."""
    untuned = copy.deepcopy(case.drafter.generation_config)
    untuned.tune = False
    benchmark = Benchmark(
        target=case.target,
        tokenizer=case.tokenizer,
        methods=[
            with_drafter(UNTUNED, with_options(case.drafter, untuned)),
            with_drafter(AS_CONFIGURED, case.drafter),
        ],
        prompts=list(case.prompts),
        decodings=["greedy"],
        max_new_tokens=case.max_new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        return benchmark.run(Path(folder) / "runs.jsonl").complete()


def _rows(runs: Runs) -> dict[str, dict[str, Any]]:
    """The rates of each method over all prompts as one set."""
    pooled = [{**run, "set": "all", "prompt": f"{run['set']}/{run['prompt']}"} for run in runs]
    return {row["method"]: row for row in summarize(pooled)}


def _acceptance(runs: Runs, expected: Expectation | None) -> Section:
    """The section on the acceptance of untuned drafts, and whether it is lower than expected."""
    own = [run for run in runs if run["method"] == UNTUNED]
    stats = sum(map(pooled_stats, own), GenerationStats())
    return {
        "acceptance_length": stats.acceptance_length,
        "interval": _rows(own)[UNTUNED]["acceptance_length_pooled_interval"],
        "by_depth": stats.acceptance_by_depth,
        "num_steps": stats.num_steps,
        "notes": stats.notes,
        "is_low": expected is not None and _is_lower_than(expected, own, stats),
        "promised_by": expected and expected.source,
        "promised_length": expected and expected.acceptance_length,
        "promised_by_depth": expected and expected.by_depth,
    }


def _is_lower_than(expected: Expectation, runs: Runs, stats: GenerationStats) -> bool:
    """Whether acceptance is lower than expected by more than luck and other prompts explain."""
    if expected.lowest:
        least = min(expected.lowest.values())
        most = {row["set"]: row["acceptance_length_pooled_interval"][1] for row in summarize(runs)}
        return any(length < TOLERANCE * expected.lowest.get(name, least) for name, length in most.items())
    if not stats.offered_by_depth:
        return False
    return wilson_interval(stats.kept_by_depth[0], stats.offered_by_depth[0])[1] < TOLERANCE * expected.by_depth[0]


def _costs(runs: Runs, packable_bytes: int) -> Section:
    """The section on the seconds of a step and of its parts, by size, and on the memory of packed weights."""
    rows = _rows(runs)
    untuned = rows[UNTUNED]
    last = [run["speculation"] for run in runs if run["method"] == AS_CONFIGURED][-1]
    section = {
        "plain_seconds": untuned.get("plain_seconds_per_step"),
        **{f"{name}_seconds": untuned[f"{name}_seconds_per_step"] for name in ("draft", "verify", "other")},
        "step_cost": untuned.get("step_cost"),
        "read_seconds_by_nodes": last["tuning"].get("read_seconds", {}),
        "draft_seconds_by_passes": last["tuning"].get("draft_seconds", {}),
        "speedup_of_whole_drafts": untuned.get("speedup"),
        "speedup": rows[AS_CONFIGURED].get("speedup"),
        "packed_bytes": last["packed_bytes"],
        "packable_bytes": packable_bytes,
    }
    return section | {"least_cost": _least_cost(section)}


def _least_cost(section: Section) -> float | None:
    """The cost of the cheapest step with a draft, in plain steps; None if texts are too short to measure it."""
    if section["plain_seconds"] is None:
        return None
    reads = {float(size): seconds for size, seconds in section["read_seconds_by_nodes"].items()}
    sizes = sorted(size for size in reads if size > 1)
    drafts = section["draft_seconds_by_passes"].values()
    if 1.0 not in reads or not sizes or not drafts:  # nothing was tuned
        return section["step_cost"]
    added = max(reads[sizes[0]] - reads[1.0], 0.0) + min(drafts)
    return min(section["step_cost"], 1 + added / section["plain_seconds"])


def measured_fault(acceptance: Section, costs: Section, explained_by: Sequence[str]) -> Finding | None:
    """The fault that the texts show: drafts that cannot pay, or low acceptance that no other finding explains."""
    length, promised, least = acceptance["acceptance_length"], acceptance.get("promised_length"), costs["least_cost"]
    price = ""
    if least is not None:
        price = f" A step with a draft costs at least {least:.2f} plain steps."
        if least > max(length, promised or MAX_STEP_COST):
            plain, draft, verify = (costs[f"{name}_seconds"] for name in ("plain", "draft", "verify"))
            cause = f"reading a draft takes {1e3 * verify:.1f} ms, {verify / plain:.1f} times a single token"
            if draft > verify - plain:
                cause = f"drafting takes {1e3 * draft:.1f} ms of a step, {draft / plain:.1f} times a plain one"
            brought = f"It brings {max(length, promised or 0.0):.2f} tokens at best."
            return finding("slow machine", f"Drafting cannot pay on this machine: {cause}.{price} {brought}")

    is_loss = least is not None and least > length
    if explained_by or not (acceptance["is_low"] or is_loss):
        return None
    against = "" if promised is None else f", and {acceptance['promised_by']} promises {promised:.2f}"
    return finding("low acceptance", f"Drafts are kept too seldom: {length:.2f} tokens a step{against}.{price}")


def num_rows_read(record: Mapping[str, Any]) -> int | None:
    """The rows that a drafter read, those of each epoch counted; None where its record does not say so."""
    epochs = [row["epoch"] for row in record.get("curve", []) if "epoch" in row]
    return round(max(epochs) * record["num_examples"]) if epochs and "num_examples" in record else None


def undertraining(num_rows: int | None, acceptance: Section, explained_by: Sequence[str]) -> Finding | None:
    """The fault of a drafter that read few rows and whose first tokens are kept far too seldom to be luck."""
    if num_rows is None or num_rows >= TRAINED_ROWS or explained_by or not acceptance["by_depth"]:
        return None
    share, num_steps = acceptance["by_depth"][0], acceptance["num_steps"]
    if wilson_interval(round(share * num_steps), num_steps)[1] >= FAR_BELOW * TRAINED_SHARE:
        return None
    missing = TRAINED_ROWS - num_rows
    return finding(
        "undertrained",
        f"The drafter has learned too little: {share:.0%} of its first tokens are kept, and it read {num_rows:,} "
        f"rows in its training. Of a small Falcon that read {TRAINED_ROWS:,}, about {TRAINED_SHARE:.0%} of the best "
        "first tokens were right.",
        rows=missing,
        steps=missing // ROWS_PER_STEP,
        rows_per_step=ROWS_PER_STEP,
    )


def check_static_step(target: PreTrainedModel, drafter: DrafterModel, input_ids: Tensor) -> Section:
    """The section on fixed shapes: a short text is written in them, with the target's own options.

    For each part of a step it says that it is in fixed shapes, or why not.
    """
    options = copy.deepcopy(drafter.generation_config)
    options.step = "static"
    static: Any = with_options(drafter, options)  # what is held for it goes with it
    device = device_of(target)
    capture = "captured" if is_captured(device) else f"nothing is captured on a {device.type.upper()}"
    try:
        run = timed_generate(target, input_ids, STEP_TOKENS, {}, 0, static)
    except GenerationError as error:
        reason = str(error).partition(" Set `")[0]
        return {"is_static": False, "target": reason, "drafter": None, "choice": None, "capture": capture}

    section = {"is_static": True, **FIXED, "capture": capture}
    for note in run.output.speculation.notes:
        beginning, _, reason = note.partition(": ")
        part = NOTES.get(beginning)
        if part is not None:
            section[part] = reason
            section["is_static"] = section["is_static"] and part not in FIXED

    states = states_of(target)
    section["kept_bytes"] = sum(state.num_bytes for state in states)
    if is_captured(device):
        section["num_graphs"] = sum(state.num_graphs for state in states)
        section["capture_seconds"] = sum(state.capture_seconds for state in states)
        section["reserved_bytes"] = torch.cuda.memory_reserved(device)  # all that PyTorch has, graphs included
    return section
