"""Checks of a step at which two texts differ: only if all of them hold, rounding explains it, and it is a tie."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .step_replay import ReplayedStep

TIE_FACTOR = 4  # a gap of at most this many times the difference in scores is a tie


@dataclass(frozen=True)
class Check:
    """A statement that must hold for a tie, what was measured, whether it holds, and a short name for the number."""

    statement: str
    measured: str
    holds: bool
    name: str = ""


@dataclass(frozen=True)
class Float32Comparison:
    """The same step computed by a float32 copy of the target, which read the same text in one forward."""

    token_id: int  # what plain decoding writes, given the copy's logits
    gap: float | None  # between the best two tokens
    plain_error: float | None  # largest difference between the copy's logits and those of plain decoding
    tree_error: float | None  # the same for the logits computed in the tree
    unit: float  # the last digit of the largest logit in the target's type: no computation in it is more exact

    def check(self) -> Check:
        """The check that the tree errs as plain decoding does; if it errs more, it read something else."""
        statement = (
            f"Held against float32, the tree's logits err at most {TIE_FACTOR} times as much as plain decoding's."
        )
        allowed = None if self.plain_error is None else TIE_FACTOR * max(self.plain_error, self.unit)
        return _limited(statement, self.tree_error, allowed, "error in float32")


@dataclass(frozen=True)
class StepComparison:
    """The numbers measured at the first difference of two texts that both go on there."""

    gap: float | None  # between the target's best two tokens in scores and noise; None if the draw cannot be rebuilt
    rounding: float | None  # largest difference between finite scores of plain decoding and of the tree
    logits_difference: float | None  # the same between the logits of all tokens; None if not finite
    limit: float  # what rounding explains: the root of the type's precision, relative to the largest logit
    is_caused_by_logits: bool  # plain decoding, given the tree's logits at this step, writes the drafter's token
    is_cut: bool  # a processor, such as top-p, keeps one of the two tokens in one of the two texts only
    float32: Float32Comparison | None = None

    def checks(self) -> list[Check]:
        """All checks that must hold for a tie."""
        cause = Check(
            "Plain decoding, given the tree's logits at this step, writes the drafter's token: only the logits "
            "differ.",
            "it does" if self.is_caused_by_logits else "it does not: the walk, a processor or a draw went another way",
            self.is_caused_by_logits,
        )
        size = _limited(
            "The logits in the tree differ from those alone by no more than rounding explains.",
            self.logits_difference,
            self.limit,
            "difference in logits",
        )
        return [cause, size, self._gap_check(), *([self.float32.check()] if self.float32 else [])]

    def _gap_check(self) -> Check:
        statement = f"The best two tokens are at most {TIE_FACTOR} times the difference in scores apart."
        if self.is_cut:
            return Check(statement, "no gap decides: a processor drops one of the two tokens in one text", True)
        if self.gap is None or self.rounding is None:
            return Check(statement, "not finite, or the draw could not be rebuilt", False)
        check = _limited(statement, self.gap, TIE_FACTOR * self.rounding, "gap")
        return replace(check, measured=f"{check.measured} = {TIE_FACTOR} x {self.rounding:.3g}")


def compare_steps(
    plain: ReplayedStep,
    drafted: ReplayedStep,
    transplanted: ReplayedStep | None,
    dtype: torch.dtype,
    exact: ReplayedStep | None,
) -> StepComparison:
    """Compare a plain step with that in a tree, and with plain ones given the tree's and a float32 copy's logits."""
    float32 = None if exact is None else Float32Comparison(
        token_id=exact.token_id,
        gap=finite(exact.gap),
        plain_error=largest_difference(plain.logits, exact.logits),
        tree_error=largest_difference(drafted.logits, exact.logits),
        unit=torch.finfo(dtype).eps * _largest(exact.logits),
    )  # fmt: skip
    kept = plain.scores.isfinite() & drafted.scores.isfinite()
    pair = torch.tensor([plain.token_id, drafted.token_id], device=kept.device)
    return StepComparison(
        gap=finite(plain.gap),
        rounding=largest_difference(plain.scores[kept], drafted.scores[kept]),
        logits_difference=largest_difference(plain.logits, drafted.logits),
        limit=torch.finfo(dtype).eps ** 0.5 * _largest(plain.logits),
        is_caused_by_logits=transplanted is not None and transplanted.new_ids == drafted.new_ids,
        is_cut=bool((plain.scores[pair].isneginf() != drafted.scores[pair].isneginf()).any()),
        float32=float32,
    )


def largest_difference(left: Tensor, right: Tensor) -> float | None:
    """The largest difference of two rows; equal infinities do not differ. None if it is not finite."""
    right = right.to(left.device)
    return finite(float(torch.where(left == right, 0.0, left - right).abs().max()))


def finite(value: float | None) -> float | None:
    """The value, or None if it is infinite or no number, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _largest(logits: Tensor) -> float:
    """The largest size of a finite logit."""
    return float(logits[logits.isfinite()].abs().max()) if logits.isfinite().any() else 0.0


def _limited(statement: str, measured: float | None, allowed: float | None, name: str) -> Check:
    """The check that a number is at most `allowed`; None stands for a number that is not finite."""
    if measured is None or allowed is None:
        return Check(statement, "not finite", False)
    holds = measured <= allowed
    return Check(statement, f"{measured:.3g} {'<=' if holds else '>'} {allowed:.3g}", holds, name)
