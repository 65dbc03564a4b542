"""Is the text with a drafter the target's own, token for token, and where it is not: a proven tie, or a bug?"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..generation.model_parts import device_of
from ..generation.timed import Options
from ..generation.verifier import verifier_named
from .prompts import Prompt
from .step_replay import GenerateCall, ReplayedStep, replay_drafted, replay_plain
from .summary import wilson_interval
from .tie_checks import Check, StepComparison, compare_steps

Result = dict[str, Any]  # a `ParityResult` as a line of the records file holds it
VERDICTS = ("identical", "tie", "bug")  # from the best to the worst
LOW_PRECISION = (torch.bfloat16, torch.float16)
NUM_CONTEXT_TOKENS = 24  # shown before a difference
NUM_FOLLOWING_TOKENS = 12  # shown after it


@dataclass(frozen=True)
class Choice:
    """The token that a text has at the first difference, and how the text goes on; no token if the text ends there."""

    token_id: int | None
    token: str
    following: str


@dataclass(frozen=True)
class Difference:
    """The first difference of two texts, and why it is a tie or a bug."""

    reason: str  # in words; for a bug the first check that fails
    context: str  # the text before
    plain: Choice  # of the target alone
    drafted: Choice  # with the drafter
    checks: list[Check]  # all must hold for a tie
    evidence: StepComparison | None = None  # None if no step could be compared
    float32_token: str | None = None  # the token to which a float32 copy of the target leads


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
    """Writes texts with and without a drafter, from the same seed, and compares them.

    With `reread_in_float32` a float32 copy of the target, made at the first difference, computes each differing step
    again.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel
    max_new_tokens: int = 128
    seed: int = 0
    reread_in_float32: bool = False

    def run(self, prompt: Prompt, options: Options, decoding: str = "") -> ParityResult:
        """Check one prompt under the sampling `options` that are called `decoding`."""
        verifier = self.drafter.generation_config.verifier
        if options.get("do_sample") and not verifier_named(verifier).keeps_seeded_text:
            raise OptionError(
                "Parity needs a verifier that gives the same text for the same seed, but the drafter's is "
                f'"{verifier}". Check greedy decoding alone, or set '
                '`drafter.generation_config.verifier = "token_matching"`.'
            )
        call = GenerateCall(self.target, prompt.input_ids(self.tokenizer), self.max_new_tokens, options, self.seed)
        alone, together = (call.run(drafter) for drafter in (None, self.drafter))
        plain, drafted = alone.new_ids, together.new_ids
        index = first_difference(plain, drafted)
        difference, verdict = None, "identical"
        if index is not None:
            difference = self._explain(call, plain, drafted, index)
            verdict = "tie" if all(check.holds for check in difference.checks) else "bug"
        return ParityResult(
            prompt_id=prompt.prompt_id,
            set_name=prompt.set_name,
            num_tokens=len(plain) if index is None else index,
            verdict=verdict,
            first_difference=index,
            decoding=decoding,
            difference=difference,
            num_steps=together.output.speculation.num_steps,
        )

    @cached_property
    def float32_target(self) -> PreTrainedModel:
        """A copy of the target that computes in float32, with the weights as they are, rounded."""
        is_offloaded = any(weight.is_meta for weight in self.target.parameters())
        if is_offloaded or getattr(self.target, "is_quantized", False):
            raise OptionError(
                "A float32 copy needs the target's weights as plain numbers in memory, but they are "
                "quantised or offloaded. Leave it out with `--no_reread_in_float32`."
            )
        return copy.deepcopy(self.target).float()

    def _explain(self, call: GenerateCall, plain: list[int], drafted: list[int], index: int) -> Difference:
        """Find out why two texts differ at new token `index`."""
        comparison, float32_token = None, None
        if index == min(len(plain), len(drafted)):  # stopping depends on the text alone
            measured = f"the target alone writes {len(plain)} tokens, with the drafter it writes {len(drafted)}"
            checks = [Check("Texts that are equal so far end at the same token.", measured, False)]
        else:
            alone, in_tree = replay_plain(call, index), replay_drafted(call, index, self.drafter)
            checks = [_repeats((alone, in_tree), (plain[: index + 1], drafted[: index + 1]))]
            if alone and in_tree and checks[0].holds:
                comparison = self._compare(call, index, alone, in_tree)
                checks += comparison.checks()
        if comparison and comparison.float32:
            float32_token = self._decode([comparison.float32.token_id])
        before = [*call.input_ids[0].tolist(), *plain[:index]][-NUM_CONTEXT_TOKENS:]
        choices = (self._choice(plain, index), self._choice(drafted, index))
        return Difference(_reason(checks), self._decode(before), *choices, checks, comparison, float32_token)

    def _compare(self, call: GenerateCall, index: int, plain: ReplayedStep, drafted: ReplayedStep) -> StepComparison:
        """Compare the replays of a step, with those from the tree's logits and from a float32 copy's."""
        exact = None
        if self.reread_in_float32 and self.target.dtype in LOW_PRECISION:
            exact = replay_plain(call, index, given=self._float32_logits(call.input_ids, plain.new_ids[:-1]))
        transplanted = replay_plain(call, index, given=drafted.logits)
        return compare_steps(plain, drafted, transplanted, self.target.dtype, exact)

    @torch.no_grad()
    def _float32_logits(self, input_ids: Tensor, new_ids: list[int]) -> Tensor:
        """The float32 copy's logits `[vocab]` after the prompt and `new_ids`."""
        ids = torch.cat([input_ids, torch.tensor([new_ids], dtype=input_ids.dtype)], dim=-1)
        outputs = self.float32_target(input_ids=ids.to(device_of(self.target)), use_cache=False, return_dict=True)
        return outputs.logits[0, -1]

    def _choice(self, new_ids: list[int], index: int) -> Choice:
        if index >= len(new_ids):
            return Choice(None, "", "")
        following = new_ids[index + 1 : index + 1 + NUM_FOLLOWING_TOKENS]
        return Choice(new_ids[index], self._decode([new_ids[index]]), self._decode(following))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def first_difference(plain: list[int], drafted: list[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one text only goes on; None for equal texts."""
    if plain == drafted:
        return None
    pairs = zip(plain, drafted, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(plain), len(drafted)))


def _repeats(steps: tuple[ReplayedStep | None, ReplayedStep | None], texts: tuple[list[int], list[int]]) -> Check:
    """The check that a second run writes what the first one wrote; else nothing can be proved about it."""
    changed = [
        name
        for name, step, new_ids in zip(("the target alone", "with the drafter"), steps, texts, strict=True)
        if step is None or step.new_ids != new_ids
    ]
    measured = f"{' and '.join(changed)}: another text with the same seed" if changed else "they do"
    return Check("The same calls write the same two texts again.", measured, not changed)


def _reason(checks: list[Check]) -> str:
    """The first check that fails, or in short what holds."""
    failed = next((check for check in checks if not check.holds), None)
    if failed:
        return f"{failed.statement} But: {failed.measured}."
    return f"Rounding decided: {'; '.join(f'{check.name} {check.measured}' for check in checks if check.name)}."


def report_of(results: Sequence[Result], decodings: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file, which are also all that the page shows."""
    rows = [_row(name, [result for result in results if result["decoding"] == name]) for name in decodings]
    return {"provenance": provenance, "totals": _totals(results), "rows": rows}


def _tally(results: Sequence[Result]) -> dict[str, Any]:
    """Count each verdict, with its share and 95 % interval, and the tokens a step of the identical texts."""
    counts = _counts(results)
    identical = _sums([result for result in results if result["verdict"] == "identical"])
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


def _row(decoding: str, results: Sequence[Result]) -> dict[str, Any]:
    """The counts of one decoding, also for each prompt set, and its differences."""
    sets = dict.fromkeys(result["set_name"] for result in results)
    return {
        "decoding": decoding,
        **_tally(results),
        "by_set": {name: _counts([result for result in results if result["set_name"] == name]) for name in sets},
        "differences": [result for result in results if result["verdict"] != "identical"],
    }


def _totals(results: Sequence[Result]) -> dict[str, Any]:
    """The counts of all decodings; a prompt counts once, with its worst verdict, since its texts are dependent."""
    by_verdict = sorted(results, key=lambda result: VERDICTS.index(result["verdict"]))
    worst = {(result["set_name"], result["prompt_id"]): result for result in by_verdict}
    return _tally(list(worst.values())) | {"num_texts": len(results), **_sums(results)}


def _counts(results: Sequence[Result]) -> dict[str, int]:
    return {verdict: sum(result["verdict"] == verdict for result in results) for verdict in VERDICTS}


def _sums(results: Sequence[Result]) -> dict[str, int]:
    return {name: sum(result[name] for result in results) for name in ("num_tokens", "num_steps")}
