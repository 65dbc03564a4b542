"""Is the text the target's own? Token for token, and where it is not: a proven tie, or a bug."""

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import DrafterModel
from ..drafters.drafter_pool import DrafterPool
from ..errors import OptionError
from ..generation.timed import Options
from ..generation.verifier import verifier_named
from .evidence import Check, Evidence, gather
from .prompts import Prompt
from .replay import Step, Text, replay_drafted, replay_plain

VERDICTS = ("identical", "tie", "bug")  # from the best to the worst
LOW_PRECISION = (torch.bfloat16, torch.float16)
NUM_CONTEXT_TOKENS = 24  # shown before a difference
NUM_FOLLOWING_TOKENS = 12  # shown after it


@dataclass(frozen=True)
class Choice:
    """What one arm wrote at the first difference: the token, and how its text goes on. No token where the text ends."""

    token_id: int | None
    token: str
    following: str


@dataclass(frozen=True)
class Difference:
    """The first place where two texts differ, and why the verdict is what it is.

    Args:
        reason (`str`): In words; for a bug the first check that fails.
        context (`str`): The text before.
        plain (`Choice`): What the target alone writes.
        drafted (`Choice`): What is written with the drafter.
        checks (`list[Check]`): What must hold for a tie, and whether it does.
        evidence (`Evidence`, *optional*): The numbers; None where no step could be compared.
        float32_token (`str`, *optional*): The token that the float32 copy leads to.
    """

    reason: str
    context: str
    plain: Choice
    drafted: Choice
    checks: list[Check]
    evidence: Evidence | None = None
    float32_token: str | None = None


@dataclass(frozen=True)
class ParityResult:
    """One prompt's outcome under one decoding.

    Args:
        num_tokens (`int`): New tokens that are the same in both texts, up to the first difference.
        verdict (`str`): One of `VERDICTS`.
        first_difference (`int`, *optional*): Index of the first new token that differs.
        gap (`float`, *optional*): Between the target's best two there, decoding alone.
        rounding (`float`, *optional*): Largest difference there between its scores alone and in the tree.
        decoding (`str`, *optional*): A name for the options, for those who check several.
        difference (`Difference`, *optional*): What was found there.
        num_steps (`int`): Steps that the text took with the drafter.
    """

    prompt_id: str
    set_name: str
    num_tokens: int
    verdict: str
    first_difference: int | None = None
    gap: float | None = None
    rounding: float | None = None
    decoding: str = ""
    difference: Difference | None = None
    num_steps: int = 0


@dataclass
class ParityCheck:
    """Writes texts with and without a drafter, from the same seed, and compares.

    Args:
        reread_in_float32 (`bool`): At each difference a float32 copy of the target, made at the first one, reads the text again.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel | DrafterPool
    max_new_tokens: int = 128
    seed: int = 0
    reread_in_float32: bool = False

    def run(self, prompt: Prompt, options: Options, decoding: str = "") -> ParityResult:
        """Check one prompt under one decoding.

        Raises:
            [`OptionError`]: the drafter's verifier keeps the distribution but not the text.
        """
        verifier = self.drafter.generation_config.verifier
        if options.get("do_sample") and not verifier_named(verifier).keeps_seeded_text:
            raise OptionError(
                f'Parity needs a verifier that gives the same text for the same seed, but the drafter\'s is "{verifier}". '
                'Check greedy decoding alone, or set `drafter.generation_config.verifier = "token_matching"`.'
            )
        text = Text(self.target, prompt.input_ids(self.tokenizer), self.max_new_tokens, options, self.seed)
        alone, together = (text.write(drafter) for drafter in (None, self.drafter))
        plain, drafted, stats = alone.new_ids, together.new_ids, together.output.speculation
        place = first_difference(plain, drafted)
        if place is None:
            return ParityResult(
                prompt.prompt_id,
                prompt.set_name,
                len(plain),
                "identical",
                decoding=decoding,
                num_steps=stats.num_steps,
            )
        difference = self._explain(text, plain, drafted, place)
        verdict = "tie" if all(check.holds for check in difference.checks) else "bug"
        gap, rounding = (
            (difference.evidence.gap, difference.evidence.rounding) if difference.evidence else (None, None)
        )
        return ParityResult(
            prompt_id=prompt.prompt_id,
            set_name=prompt.set_name,
            num_tokens=place,
            verdict=verdict,
            first_difference=place,
            gap=gap,
            rounding=rounding,
            decoding=decoding,
            difference=difference,
            num_steps=stats.num_steps,
        )

    @cached_property
    def float32_target(self) -> PreTrainedModel:
        """A copy of the target as it was loaded, its weights rounded as they are, that computes in float32.

        Raises:
            [`OptionError`]: the weights cannot be copied.
        """
        is_elsewhere = any(weight.is_meta for weight in self.target.parameters())
        if is_elsewhere or getattr(self.target, "is_quantized", False):
            raise OptionError(
                "A float32 copy needs the target's weights as plain numbers in memory, but they are quantised or offloaded. "
                "Leave it out with `--no_reread_in_float32`."
            )
        return copy.deepcopy(self.target).float()

    def _explain(self, text: Text, plain: list[int], drafted: list[int], place: int) -> Difference:
        """Find out why two texts differ at their first difference."""
        check, evidence, float32_token = _early_end(plain, drafted, place), None, None
        if check is None:
            steps = replay_plain(text, place), replay_drafted(text, place, self.drafter)
            check = _repeats(steps, (plain[: place + 1], drafted[: place + 1]))
            if check.holds:
                evidence = self._evidence(text, place, *steps)
        checks = [check, *(evidence.checks() if evidence else [])]
        if evidence and evidence.float32:
            float32_token = self._decode([evidence.float32.token_id])
        before = [*text.input_ids[0].tolist(), *plain[:place]][-NUM_CONTEXT_TOKENS:]
        return Difference(
            reason=_reason(checks),
            context=self._decode(before),
            plain=self._choice(plain, place),
            drafted=self._choice(drafted, place),
            checks=checks,
            evidence=evidence,
            float32_token=float32_token,
        )

    def _evidence(self, text: Text, place: int, plain: Step | None, drafted: Step | None) -> Evidence:
        assert plain is not None  # both were checked to be what was written
        assert drafted is not None
        exact = None
        if self.reread_in_float32 and self.target.dtype in LOW_PRECISION:
            exact = replay_plain(text, place, given=self._float32_logits(text.input_ids, plain.new_ids[:-1]))
        transplanted = replay_plain(text, place, given=drafted.logits)
        return gather(plain, drafted, transplanted, self.target.dtype, exact)

    @torch.no_grad()
    def _float32_logits(self, input_ids: Tensor, new_ids: list[int]) -> Tensor:
        """The copy's logits `[vocab]` after the prompt and `new_ids`."""
        ids = torch.cat([input_ids, torch.tensor([new_ids], dtype=input_ids.dtype)], dim=-1)
        outputs = self.float32_target(input_ids=ids.to(self.target.device), use_cache=False, return_dict=True)
        return outputs.logits[0, -1]

    def _choice(self, new_ids: list[int], place: int) -> Choice:
        if place >= len(new_ids):
            return Choice(None, "", "")
        following = new_ids[place + 1 : place + 1 + NUM_FOLLOWING_TOKENS]
        return Choice(new_ids[place], self._decode([new_ids[place]]), self._decode(following))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def first_difference(plain: list[int], drafted: list[int]) -> int | None:
    """Index of the first token that differs; the shorter length where one text only goes on; None for equal texts."""
    if plain == drafted:
        return None
    pairs = zip(plain, drafted, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(plain), len(drafted)))


def _early_end(plain: list[int], drafted: list[int], place: int) -> Check | None:
    """The failing check of two texts of which one only ends before the other; stopping depends on the text alone."""
    if place < min(len(plain), len(drafted)):
        return None
    measured = f"the target alone writes {len(plain)} tokens, with the drafter it writes {len(drafted)}"
    return Check("Texts that are equal so far end at the same token.", measured, False)


def _repeats(steps: tuple[Step | None, Step | None], texts: tuple[list[int], list[int]]) -> Check:
    """A second run must write what the first one wrote, or nothing can be proved about it."""
    arms = [
        arm
        for arm, step, new_ids in zip(("the target alone", "with the drafter"), steps, texts, strict=True)
        if step is None or step.new_ids != new_ids
    ]
    measured = f"{' and '.join(arms)}: another text with the same seed" if arms else "they do"
    return Check("The same calls write the same two texts again.", measured, not arms)


def _reason(checks: list[Check]) -> str:
    """A sentence on the first check that fails, or a short one if all hold."""
    failed = next((check for check in checks if not check.holds), None)
    if failed:
        return f"{failed.statement} But: {failed.measured}."
    return f"Rounding decided: {'; '.join(f'{check.name} {check.measured}' for check in checks if check.name)}."
