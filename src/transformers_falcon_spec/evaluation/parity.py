"""Is the text with a drafter the target's own, token for token, and where it is not: a proven tie, or a bug?

Both texts are written from the same seed. At their first difference the step is replayed: the very call that was
compared, seed, length limit and sizes of drafts included, which only stops after the step. Checks say whether
rounding explains it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..core.sampling import GeneratorDraws, multinomial_noise
from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..generation.drafting import DraftBudget
from ..generation.modes import variable_set
from ..generation.timed import Options, Run, timed_generate
from ..generation.tuning import TUNER, Tuner
from ..generation.verifier import verifier_named
from .prompts import Prompt
from .summary import wilson_interval

Result = dict[str, Any]  # a `ParityResult` as a line of the records file holds it
VERDICTS = ("identical", "tie", "bug")  # from the best to the worst
TIE_FACTOR = 4  # a gap of at most this many times the difference in scores is a tie


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate`, but for the drafter."""

    target: PreTrainedModel
    input_ids: Tensor
    max_new_tokens: int
    options: Options
    seed: int

    def run(self, drafter: nn.Module | None, **arguments: Any) -> Run:
        """Make the call, with a drafter or without."""
        return timed_generate(
            self.target, self.input_ids, self.max_new_tokens, self.options, self.seed, drafter, **arguments
        )


@dataclass(frozen=True)
class ReplayedStep:
    """The step that chose one token: the text so far and the numbers that decided."""

    new_ids: list[int]  # the chosen token last
    logits: Tensor  # [vocab] the target's own, in float32
    scores: Tensor  # [vocab] the same after the logits processors
    noise: Tensor | None = None  # [vocab] of the draw, ones if greedy; None with a drafter or if it cannot be rebuilt

    @property
    def token_id(self) -> int:
        """The chosen token."""
        return self.new_ids[-1]

    @property
    def gap(self) -> float | None:
        """The gap between the best two tokens in what decides: the scores, less the log of the draw's noise."""
        if self.noise is None:
            return None

        best = (self.scores.double() - self.noise.double().log()).topk(2).values
        return float(best[0] - best[1])


Sizes = dict[str, Any] | None  # of a step's draft, as they limit its budget; None for a plain step


class _SameDrafts(Tuner):
    """Lets a call that is made again draft as much as at first.

    The tuner goes by the clock, and a target that reads another number of nodes rounds otherwise.
    """

    def __init__(self, sizes: list[Sizes], *args: Any) -> None:
        super().__init__(*args)
        self._sizes = sizes  # of the steps of the first call, which notes them here
        self._number = 0

    def limited(self, budget: DraftBudget) -> DraftBudget | None:
        """What this step was given at first, or what the tuner gives it now."""
        if self._number == len(self._sizes):
            chosen = super().limited(budget)
            names = ("num_nodes", "num_passes", "prices")
            self._sizes.append(None if chosen is None else {name: getattr(chosen, name) for name in names})

        sizes = self._sizes[self._number]
        self._number += 1
        self._is_asked = sizes is not None
        return None if sizes is None else replace(budget, **sizes)


class _StopAfter(StoppingCriteria):
    """Ends a text at a length that the drafter does not know, since its trees depend on the length limit."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.length, device=input_ids.device)


class _StepObserver(LogitsProcessor):
    """Keeps the random state of step `index` of plain decoding, and replaces its logits by `given`, if they are."""

    def __init__(self, index: int, given: Tensor | None) -> None:
        self.index, self.given = index, given
        self.state: Tensor | None = None
        self._num_chosen = 0

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        self._num_chosen += 1
        return scores

    def hook(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """The forward hook of the target."""
        if self._num_chosen == self.index:
            if self.given is not None:
                outputs.logits = self.given[None, None]

            self.state = GeneratorDraws().get_state(outputs.logits.device)

        return outputs


def replay_plain(call: GenerateCall, index: int, given: Tensor | None = None) -> ReplayedStep | None:
    """The target's own step that chooses new token `index`, from the logits `given` or its own; None past the end."""
    observer = _StepObserver(index, given)
    handle = call.target.register_forward_hook(observer.hook)
    try:
        run = _run_until(call, index, None, logits_processor=LogitsProcessorList([observer]))
    finally:
        handle.remove()

    step = _step_of(run, index)
    if step is None or observer.state is None:
        return None

    is_drawn = call.options.get("do_sample", call.target.generation_config.do_sample)
    noise = _noise(step.scores, observer.state, step.token_id) if is_drawn else torch.ones_like(step.scores)

    return replace(step, noise=noise)


def _step_of(run: Run, index: int) -> ReplayedStep | None:
    """The step that chooses new token `index`; None if the text ends before."""
    if len(run.new_ids) <= index:
        return None

    return ReplayedStep(run.new_ids[: index + 1], run.output.logits[index][0], run.output.scores[index][0])


def _run_until(call: GenerateCall, index: int, drafter: nn.Module | None, **arguments: Any) -> Run:
    criteria = StoppingCriteriaList([_StopAfter(call.input_ids.shape[1] + index + 1)])
    return call.run(drafter, **arguments, stopping_criteria=criteria, output_logits=True, output_scores=True)


def _noise(scores: Tensor, state: Tensor, token_id: int) -> Tensor | None:
    """The noise of a draw from the random stream in `state`; None if that draw does not give the token."""
    generator = torch.Generator(scores.device)
    generator.set_state(state)
    probs = torch.softmax(scores[None], dim=-1)
    noise = multinomial_noise(probs, generator)
    return noise[0] if int((probs / noise).argmax()) == token_id else None


@dataclass(frozen=True)
class Check:
    """A statement that must hold for a tie, what was measured, whether it holds, and a short name for the number."""

    statement: str
    measured: str
    holds: bool
    name: str = ""


def tie_checks(
    plain: ReplayedStep, drafted: ReplayedStep, transplanted: ReplayedStep | None, dtype: torch.dtype
) -> list[Check]:
    """The checks that must all hold for a tie at a step of two texts that both go on there.

    Args:
        plain ([`ReplayedStep`]): The step of plain decoding.
        drafted ([`ReplayedStep`]): The step in a tree.
        transplanted ([`ReplayedStep`], *optional*): The plain step that was given the tree's logits; None if its text
            ended before.
        dtype (`torch.dtype`): The type in which the target computes.
    """
    is_caused_by_logits = transplanted is not None and transplanted.new_ids == drafted.new_ids
    cause = Check(
        "Plain decoding, given the tree's logits at this step, writes the drafter's token: only the logits differ.",
        "it does" if is_caused_by_logits else "it does not: the walk, a processor or a draw went another way",
        is_caused_by_logits,
    )

    largest = float(plain.logits.nan_to_num(0.0, 0.0, 0.0).abs().max())
    size = _limited(
        "The logits in the tree differ from those alone by no more than rounding explains.",
        largest_difference(plain.logits, drafted.logits),
        torch.finfo(dtype).eps ** 0.5 * largest,
        "difference in logits",
    )
    return [cause, size, _gap_check(plain, drafted)]


def _gap_check(plain: ReplayedStep, drafted: ReplayedStep) -> Check:
    """The check that the best two tokens are so close that the difference in scores decides between them."""
    statement = f"The best two tokens are at most {TIE_FACTOR} times the difference in scores apart."
    pair = torch.tensor([plain.token_id, drafted.token_id], device=plain.scores.device)
    is_cut = plain.scores[pair].isneginf() != drafted.scores[pair].isneginf()
    if is_cut.any():
        return Check(statement, "no gap decides: a processor, such as top-p, drops one of the two in one text", True)

    kept = plain.scores.isfinite() & drafted.scores.isfinite()
    rounding = largest_difference(plain.scores[kept], drafted.scores[kept])
    return _limited(statement, plain.gap, TIE_FACTOR * rounding, "gap")


def largest_difference(left: Tensor, right: Tensor) -> float:
    """The largest difference of two rows; equal infinities do not differ."""
    right = right.to(left.device)
    return float(torch.where(left == right, 0.0, left - right).abs().max())


def _limited(statement: str, measured: float | None, allowed: float, name: str) -> Check:
    """The check that a number is at most `allowed`; None stands for one that could not be measured."""
    if measured is None or not math.isfinite(measured) or not math.isfinite(allowed):
        return Check(statement, "not finite, or the draw could not be rebuilt", False)

    holds = measured <= allowed
    return Check(statement, f"{measured:.3g} {'<=' if holds else '>'} {allowed:.3g}", holds, name)


@dataclass(frozen=True)
class Difference:
    """The first difference of two texts, and why it is a tie or a bug."""

    reason: str  # in words; for a bug the first check that fails
    plain: dict[str, Any]  # `token_id` and `token` of the target alone; None and nothing if its text ends there
    drafted: dict[str, Any]  # the same with the drafter
    checks: list[Check]  # all must hold for a tie


@dataclass(frozen=True)
class ParityResult:
    """What was found for one prompt under one decoding."""

    prompt_id: str
    set_name: str
    num_tokens: int  # new tokens up to the first difference
    verdict: str  # one of `VERDICTS`
    first_difference: int | None = None  # index of the first new token that differs
    decoding: str = ""
    difference: Difference | None = None
    num_steps: int = 0  # of the text with the drafter


@dataclass
class ParityCheck:
    """Writes texts with and without a drafter, from the same seed, and compares them."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel
    max_new_tokens: int = 128
    seed: int = 0

    def run(self, prompt: Prompt, options: Options, decoding: str = "") -> ParityResult:
        """Check one prompt under the sampling `options` that are called `decoding`."""
        return self.compare(prompt, options, decoding)[2]

    def compare(self, prompt: Prompt, options: Options, decoding: str = "") -> tuple[Run, Run, ParityResult]:
        """The text of the target alone, that with the drafter, and what a check of them finds."""
        verifier = self.drafter.generation_config.verifier
        if options.get("do_sample") and not verifier_named(verifier).keeps_seeded_text:
            raise OptionError(
                "Parity needs a verifier that gives the same text for the same seed, but the drafter's is "
                f'"{verifier}". Check greedy decoding alone, or set '
                '`drafter.generation_config.verifier = "token_matching"`.'
            )

        call = GenerateCall(self.target, prompt.input_ids(self.tokenizer), self.max_new_tokens, options, self.seed)
        alone = call.run(None)
        difference, verdict = None, "identical"
        same_drafts: Callable[..., Tuner] = partial(_SameDrafts, [])
        with variable_set(TUNER, same_drafts):
            together = call.run(self.drafter)
            index = first_difference(alone.new_ids, together.new_ids)
            if index is not None:
                difference = self._explain(call, alone.new_ids, together.new_ids, index)
                verdict = "tie" if all(check.holds for check in difference.checks) else "bug"

        result = ParityResult(
            prompt_id=prompt.prompt_id,
            set_name=prompt.set_name,
            num_tokens=len(alone.new_ids) if index is None else index,
            verdict=verdict,
            first_difference=index,
            decoding=decoding,
            difference=difference,
            num_steps=together.output.speculation.num_steps,
        )
        return alone, together, result

    def _explain(self, call: GenerateCall, plain: list[int], drafted: list[int], index: int) -> Difference:
        """Find out why two texts differ at new token `index`."""
        if index == min(len(plain), len(drafted)):  # stopping depends on the text alone
            measured = f"the target alone writes {len(plain)} tokens, with the drafter it writes {len(drafted)}"
            checks = [Check("Texts that are equal so far end at the same token.", measured, False)]
        else:
            alone = replay_plain(call, index)
            in_tree = _step_of(_run_until(call, index, self.drafter), index)
            checks = [_repeats(alone, plain[: index + 1], in_tree, drafted[: index + 1])]
            if alone and in_tree and checks[0].holds:
                transplanted = replay_plain(call, index, given=in_tree.logits)
                checks += tie_checks(alone, in_tree, transplanted, self.target.dtype)

        return Difference(_reason(checks), self._choice(plain, index), self._choice(drafted, index), checks)

    def _choice(self, new_ids: list[int], index: int) -> dict[str, Any]:
        if index >= len(new_ids):
            return {"token_id": None, "token": ""}

        return {"token_id": new_ids[index], "token": self.tokenizer.decode([new_ids[index]])}


def first_difference(plain: list[int], drafted: list[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one text only goes on; None for equal texts."""
    for index, (left, right) in enumerate(zip_longest(plain, drafted)):
        if left != right:
            return index

    return None


def _repeats(alone: ReplayedStep | None, plain: list[int], in_tree: ReplayedStep | None, drafted: list[int]) -> Check:
    """The check that a second run writes what the first one wrote; else nothing can be proved about it."""
    changed = []
    if alone is None or alone.new_ids != plain:
        changed.append("the target alone")
    if in_tree is None or in_tree.new_ids != drafted:
        changed.append("with the drafter")

    measured = f"{' and '.join(changed)}: another text with the same seed" if changed else "they do"

    return Check("The same calls write the same two texts again.", measured, not changed)


def _reason(checks: list[Check]) -> str:
    """The first check that fails, or in short what holds."""
    numbers = []
    for check in checks:
        if not check.holds:
            return f"{check.statement} But: {check.measured}."
        if check.name:
            numbers.append(f"{check.name} {check.measured}")

    return f"Rounding decided: {'; '.join(numbers)}."


def report_of(results: Sequence[Result], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file; the reason of a tie holds what was measured, so that its checks are left out."""
    rows = []
    for name in decodings:
        own = of_group(results, "decoding", name)
        different = of_group(own, "verdict", "bug")
        for tie in of_group(own, "verdict", "tie"):
            different.append({**tie, "difference": {**tie["difference"], "checks": []}})

        rows.append({"decoding": name, **_tally(own), "differences": different})

    return {"provenance": provenance, "rows": rows}


def of_group(results: Sequence[Result], key: str, value: str) -> list[Result]:
    """The results that have this value under a key."""
    return [result for result in results if result[key] == value]


def _tally(results: Sequence[Result]) -> dict[str, Any]:
    """Count each verdict, with its share and 95 % interval, and the tokens a step of the identical texts."""
    counts = {verdict: len(of_group(results, "verdict", verdict)) for verdict in VERDICTS}
    identical = _sums(of_group(results, "verdict", "identical"))
    return {
        **counts,
        "num_prompts": len(results),
        **_sums(results),
        "tokens_per_step": identical["num_tokens"] / identical["num_steps"] if identical["num_steps"] else None,
        "shares": {
            verdict: {"share": count / len(results), "interval": wilson_interval(count, len(results))}
            for verdict, count in counts.items()
        },
    }


def _sums(results: Sequence[Result]) -> dict[str, int]:
    return {
        "num_tokens": sum(map(itemgetter("num_tokens"), results)),
        "num_steps": sum(map(itemgetter("num_steps"), results)),
    }
