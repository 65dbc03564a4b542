"""Texts written with and without the drafter, and what they say: how much is kept, against the promise, and what steps cost."""

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.stats import GenerationStats
from ...drafters.base import DrafterModel
from ..benchmark import Benchmark
from ..methods import with_drafter, with_options
from ..prompts import Prompt
from ..summary import pooled_stats, summarize, wilson_interval
from .promise import Promise
from .verdicts import LOW_ACCEPTANCE, SLOW_MACHINE, Section, Verdict

WHOLE, USUAL = "whole drafts", "as set up"  # without a tuner, and with the options that the drafter has
MARGIN = 0.85  # of what is promised; less is a fault, prompts differ by as much
DEAR = 2.0  # plain steps that the cheapest draft may cost, where nothing is promised
QUESTIONS = (
    "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?",
    "Write a Python function that returns the largest number of a list.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that thanks a friend for a book.",
)


def own_prompts() -> list[Prompt]:
    """A few prompts, used when the user gives none."""
    return [Prompt("doctor", str(place), (("user", text),)) for place, text in enumerate(QUESTIONS)]


@dataclass(frozen=True)
class Measurement:
    """Runs of the target alone, of whole drafts, and of drafts as the options have them; greedy, prompt by prompt in turn.

    Args:
        runs (`list[dict]`): As `Benchmark` records them.
    """

    runs: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DrafterModel,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
    ) -> "Measurement":
        """Write all texts with all three methods.

        Raises:
            [`BenchmarkError`]: a text could not be written.
        """
        untuned = copy.deepcopy(drafter.generation_config)
        untuned.tune = False
        benchmark = Benchmark(
            target=target,
            tokenizer=tokenizer,
            methods=[with_drafter(WHOLE, with_options(drafter, untuned)), with_drafter(USUAL, drafter)],
            prompts=list(prompts),
            decodings=["greedy"],
            max_new_tokens=max_new_tokens,
        )
        with tempfile.TemporaryDirectory() as folder:
            return cls(benchmark.run(Path(folder) / "runs.jsonl").complete())

    @property
    def stats(self) -> GenerationStats:
        """Counts of whole drafts over all texts."""
        return sum((pooled_stats(run) for run in self.runs if run["arm"] == WHOLE), GenerationStats())

    def row(self, arm: str) -> dict[str, Any]:
        """Rates of an arm over all prompts."""
        pooled = [{**run, "set": "all", "prompt": f"{run['set']}/{run['prompt']}"} for run in self.runs]
        return next(row for row in summarize(pooled) if row["arm"] == arm)

    def acceptance(self, promise: Promise | None) -> Section:
        """How much is kept, and whether it is less than promised."""
        stats, row = self.stats, self.row(WHOLE)
        section: Section = {
            "acceptance_length": stats.acceptance_length,
            "interval": row["acceptance_length_pooled_interval"],
            "by_depth": stats.acceptance_by_depth,
            "num_steps": stats.num_steps,
            "notes": stats.notes,
            "is_low": False,
        }
        if promise is None:
            return section
        promised = {"promised_by": promise.source, "promised_length": promise.acceptance_length}
        return section | promised | {"promised_by_depth": promise.by_depth, "is_low": self._is_low(promise)}

    def _is_low(self, promise: Promise) -> bool:
        """Whether what is kept lies below the promise by more than chance and other prompts explain."""
        if not promise.lowest:
            stats = self.stats
            kept, offered = (counts[0] if counts else 0 for counts in (stats.kept_by_depth, stats.offered_by_depth))
            return offered > 0 and wilson_interval(kept, offered)[1] < MARGIN * promise.by_depth[0]
        rows = [row for row in summarize(self.runs) if row["arm"] == WHOLE]
        worst = min(promise.lowest.values())
        return any(
            row["acceptance_length_pooled_interval"][1] < MARGIN * promise.lowest.get(row["set"], worst)
            for row in rows
        )

    def costs(self) -> Section:
        """Seconds of a step and of its parts, by size, and what it costs in plain steps."""
        whole, usual = self.row(WHOLE), self.row(USUAL)
        tuned = [run["speculation"]["tuning"] for run in self.runs if run["arm"] == USUAL]
        tuning: dict[str, Any] = tuned[-1] if tuned else {}
        section: Section = {
            "plain_seconds": whole.get("plain_seconds_per_step"),
            "draft_seconds": whole["draft_seconds_per_step"],
            "verify_seconds": whole["verify_seconds_per_step"],
            "other_seconds": whole["other_seconds_per_step"],
            "step_cost": whole.get("step_cost"),
            "read_seconds_by_nodes": tuning.get("read_seconds", {}),
            "draft_seconds_by_passes": tuning.get("draft_seconds", {}),
            "speedup_of_whole_drafts": whole.get("speedup"),
            "speedup": usual.get("speedup"),
        }
        return section | {"least_cost": _least_cost(section)}


def _least_cost(section: Section) -> float | None:
    """What the cheapest step with a draft costs, in plain steps; None where texts are too short to tell."""
    plain = section["plain_seconds"]
    if plain is None:
        return None
    reads = {float(size): seconds for size, seconds in section["read_seconds_by_nodes"].items()}
    drafts, sizes = list(section["draft_seconds_by_passes"].values()), sorted(size for size in reads if size > 1)
    if 1.0 not in reads or not sizes or not drafts:  # nothing was tuned
        return section["step_cost"]
    more = max(reads[sizes[0]] - reads[1.0], 0.0) + min(drafts)
    return min(section["step_cost"], 1 + more / plain)


def verdict_of(acceptance: Section, costs: Section, explained_by: Sequence[str]) -> Verdict | None:
    """Whether too little is kept, or a draft costs more than it can bring; not said again where other verdicts explain it."""
    length, promised, least = acceptance["acceptance_length"], acceptance.get("promised_length"), costs["least_cost"]
    if least is not None and least > max(length, DEAR if promised is None else promised):
        return _slow(costs, length, promised)
    is_loss = least is not None and least > length
    if explained_by or not (acceptance["is_low"] or is_loss):
        return None
    against = f", and {acceptance['promised_by']} promises {promised:.2f}" if promised is not None else ""
    price = f" A step with a draft costs at least {least:.2f} plain steps." if least is not None else ""
    text = f"Drafts are kept too seldom: {length:.2f} tokens a step{against}.{price}"
    remedy = (
        "Compare the prompts and how they are put (system prompt, thinking mode, language) with what the drafter was trained on; train it "
        "on with answers of this target to such prompts."
    )
    return Verdict(LOW_ACCEPTANCE, text, remedy)


def _slow(costs: Section, length: float, promised: float | None) -> Verdict:
    plain, draft, verify = (costs[f"{name}_seconds"] for name in ("plain", "draft", "verify"))
    is_drafter = draft > verify - plain
    blame = (
        f"drafting takes {1e3 * draft:.1f} ms of a step, {draft / plain:.1f} times a plain one"
        if is_drafter
        else f"reading a draft takes {1e3 * verify:.1f} ms, {verify / plain:.1f} times a single token"
    )
    best = max(length, promised or 0.0)
    text = (
        f"Drafting cannot pay on this machine: {blame}. The cheapest step with a draft costs {costs['least_cost']:.1f} plain steps "
        f"of {1e3 * plain:.1f} ms and brings {best:.2f} tokens at best."
    )
    remedy = (
        "Take a smaller drafter or a larger target, or see what else runs beside it and on how many threads."
        if is_drafter
        else "Take smaller trees (`num_tree_nodes`), fewer rows, or a machine with arithmetic to spare; see docs/tuning.md."
    )
    return Verdict(SLOW_MACHINE, text, remedy)
