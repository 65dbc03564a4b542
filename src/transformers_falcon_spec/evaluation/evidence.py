"""What is known about one difference between two texts, and whether it proves a tie. Numbers in, verdict out.

A difference is a tie only if every check holds: nothing but the logits differs, the logits differ by rounding alone, and the
best two tokens are that close.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .replay import Step

TIE_FACTOR = 4  # a gap of at most this many times the difference in scores is a tie


@dataclass(frozen=True)
class Check:
    """One thing that must hold for a tie, what was measured, whether it does hold, and a name for what was measured."""

    statement: str
    measured: str
    holds: bool
    name: str = ""


@dataclass(frozen=True)
class Float32Reading:
    """The same step by a float32 copy of the target, which read the same text in one forward.

    Args:
        token_id (`int`): What plain decoding writes, given the copy's logits.
        gap (`float`, *optional*): Between the best two in what decides.
        plain_error (`float`, *optional*): Largest difference of the target's logits, decoding alone, from the copy's.
        tree_error (`float`, *optional*): The same of its logits in the tree.
        unit (`float`): The last place of the largest logit in the target's type: what no computation in it can beat.
    """

    token_id: int
    gap: float | None
    plain_error: float | None
    tree_error: float | None
    unit: float

    @classmethod
    def of(cls, exact: Step, plain: Step, drafted: Step, dtype: torch.dtype) -> "Float32Reading":
        """Compare the step of both arms with that of the float32 copy."""
        return cls(
            token_id=exact.token_id,
            gap=finite(exact.gap),
            plain_error=largest_difference(plain.logits, exact.logits),
            tree_error=largest_difference(drafted.logits, exact.logits),
            unit=torch.finfo(dtype).eps * _largest(exact.logits),
        )

    def check(self) -> Check:
        """Rounding errs as much in a tree as out of it, so a reading much farther off than plain decoding has read something else."""
        statement = (
            f"Held against float32, the tree's logits err at most {TIE_FACTOR} times as much as plain decoding's."
        )
        if self.plain_error is None or self.tree_error is None:
            return Check(statement, "not finite", False)
        allowed = TIE_FACTOR * max(self.plain_error, self.unit)
        return Check(statement, _at_most(self.tree_error, allowed), self.tree_error <= allowed, "error in float32")


@dataclass(frozen=True)
class Evidence:
    """Everything measured at the first difference of two texts that both go on there.

    Args:
        gap (`float`, *optional*): Between the target's best two there, in what decides: processed scores, and the noise of
            the draw when sampling. None where the draw could not be rebuilt.
        rounding (`float`, *optional*): Largest difference there between processed scores alone and in the tree, of tokens
            that the processors leave in both. None if not finite.
        logits_difference (`float`, *optional*): The same of the logits, all tokens.
        limit (`float`): What rounding explains: the root of the type's precision, relative to the largest logit.
        is_caused_by_logits (`bool`): Plain decoding, given the tree's logits at this step, writes the drafter's token.
        is_cut (`bool`): A processor, such as top-p, leaves one of the two tokens in one arm only.
        float32 ([`Float32Reading`], *optional*): The step again in float32.
    """

    gap: float | None
    rounding: float | None
    logits_difference: float | None
    limit: float
    is_caused_by_logits: bool
    is_cut: bool
    float32: Float32Reading | None = None

    def checks(self) -> list[Check]:
        """The checks that must all hold for a tie."""
        cause = Check(
            "Plain decoding, given the tree's logits at this step, writes the drafter's token: only the logits differ.",
            "it does" if self.is_caused_by_logits else "it does not: the walk, a processor or a draw went another way",
            self.is_caused_by_logits,
        )
        return [cause, self._size(), self._gap(), *([self.float32.check()] if self.float32 else [])]

    def _size(self) -> Check:
        statement = "The logits in the tree differ from those alone by no more than rounding explains."
        if self.logits_difference is None:
            return Check(statement, "not finite", False)
        return Check(
            statement,
            _at_most(self.logits_difference, self.limit),
            self.logits_difference <= self.limit,
            "difference in logits",
        )

    def _gap(self) -> Check:
        statement = f"The best two tokens are at most {TIE_FACTOR} times the difference in scores apart."
        if self.is_cut:
            return Check(statement, "no gap decides: a processor drops one of the two tokens in one arm", True)
        if self.gap is None or self.rounding is None:
            return Check(statement, "not finite, or the draw could not be rebuilt", False)
        allowed = TIE_FACTOR * self.rounding
        return Check(
            statement,
            f"{_at_most(self.gap, allowed)} = {TIE_FACTOR} x {self.rounding:.3g}",
            self.gap <= allowed,
            "gap",
        )


def gather(plain: Step, drafted: Step, transplanted: Step | None, dtype: torch.dtype, exact: Step | None) -> Evidence:
    """The evidence of one step: each arm's own, plain decoding's with the tree's logits, and with a float32 copy's."""
    kept = plain.scores.isfinite() & drafted.scores.isfinite()
    pair = torch.tensor([plain.token_id, drafted.token_id], device=kept.device)
    return Evidence(
        gap=finite(plain.gap),
        rounding=largest_difference(plain.scores[kept], drafted.scores[kept]),
        logits_difference=largest_difference(plain.logits, drafted.logits),
        limit=torch.finfo(dtype).eps ** 0.5 * _largest(plain.logits),
        is_caused_by_logits=transplanted is not None and transplanted.new_ids == drafted.new_ids,
        is_cut=bool((plain.scores[pair].isneginf() != drafted.scores[pair].isneginf()).any()),
        float32=None if exact is None else Float32Reading.of(exact, plain, drafted, dtype),
    )


def largest_difference(left: Tensor, right: Tensor) -> float | None:
    """The largest difference between two rows, where equal infinities do not differ; None if it is not finite."""
    right = right.to(left.device)
    return finite(float(torch.where(left == right, 0.0, left - right).abs().max()))


def finite(value: float | None) -> float | None:
    """The value, or None where it is infinite or no number, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _largest(logits: Tensor) -> float:
    """The largest absolute value of a finite logit."""
    return float(logits[logits.isfinite()].abs().max()) if logits.isfinite().any() else 0.0


def _at_most(measured: float, allowed: float) -> str:
    return f"{measured:.3g} {'<=' if measured <= allowed else '>'} {allowed:.3g}"
