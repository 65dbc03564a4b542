"""How many positions to draft for: always the same, by what was accepted, or as far as the drafter is sure.

All three answer the same three questions, for one row each.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...errors import OptionError


class DraftLength(Protocol):
    """Says how long the drafts of one row should be. Lengths count drafted tokens, root and bonus token excluded."""

    def next_length(self) -> int:
        """Places that the next pass should denoise, at least 1."""
        ...

    def kept_length(self, confidences: Tensor) -> int:
        """How many of the denoised positions to draft for, at least 1, by the chance `[positions]` of the best candidate of each."""
        ...

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Learn from a draft that was verified.

        Args:
            num_generated (`int`): Places before the first one whose best candidate ends the text.
            num_accepted (`int`): Drafted tokens that were kept.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """Every draft has the same length.

    Raises:
        [`OptionError`]: it is below 1.

    Example:

    ```python
    >>> FixedLength(8).next_length()
    8

    ```
    """

    length: int

    def __post_init__(self) -> None:
        """A draft has a token."""
        if self.length < 1:
            raise OptionError(f"`length` of a draft must be at least 1, but it is {self.length}.")

    def next_length(self) -> int:
        """Always `length`."""
        return self.length

    def kept_length(self, confidences: Tensor) -> int:
        """All positions."""
        return len(confidences)

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Nothing is learnt."""


class AdaptiveLength:
    """Adaptive draft length as it is published: longer after drafts that were accepted whole, shorter where the text ends.

    With moving averages that start at 0, `generated = (1 - rho) * generated + rho * num_generated` and the same for `accepted`, the
    next draft has `ceil(generated + delta * [accepted >= generated])` positions, at least `min_length` and at most `max_length`; the
    first one has `max_length`. Since `num_generated` never exceeds the length itself, the length falls to `min_length` in the second
    step and stays there except after drafts accepted almost whole: small drafters want a small `min_length`. Source: arXiv 2510.02358,
    section 3.3.

    Args:
        min_length (`int`, *optional*, defaults to 20): Shortest draft.
        max_length (`int`, *optional*, defaults to 30): Longest draft, and the first one.
        delta (`int`, *optional*, defaults to 10): Places more while all that is generated is accepted.
        rho (`float`, *optional*, defaults to 0.5): Weight of the newest draft in the averages.

    Raises:
        [`OptionError`]: the lengths are below 1 or cross, `delta` is negative, or `rho` is no share.

    Example:

    ```python
    >>> length = AdaptiveLength()
    >>> first = length.next_length()
    >>> length.observe(num_generated=30, num_accepted=7)
    >>> first, length.next_length()
    (30, 20)

    ```
    """

    def __init__(self, min_length: int = 20, max_length: int = 30, delta: int = 10, rho: float = 0.5) -> None:
        if not 1 <= min_length <= max_length or delta < 0 or not 0 < rho <= 1:
            raise OptionError(
                "Draft lengths must obey 1 <= `min_length` <= `max_length`, 0 <= `delta` and 0 < `rho` <= 1, but they are "
                f"{min_length}, {max_length}, {delta} and {rho}."
            )
        self.min_length, self.max_length, self.delta, self.rho = min_length, max_length, delta, rho
        self._generated = self._accepted = 0.0
        self._length = max_length

    def next_length(self) -> int:
        """The length by the formula."""
        return self._length

    def kept_length(self, confidences: Tensor) -> int:
        """All positions."""
        return len(confidences)

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Move both averages, and with them the length."""
        self._generated += self.rho * (num_generated - self._generated)
        self._accepted += self.rho * (num_accepted - self._accepted)
        bonus = self.delta * (self._accepted >= self._generated)
        self._length = min(max(math.ceil(self._generated + bonus), self.min_length), self.max_length)


@dataclass(frozen=True)
class ConfidenceStop:
    """Drafts as far as the drafter is sure: up to the first position whose best candidate is less likely than `threshold`.

    Where FailFast (arXiv 2512.20573) asks for another ten positions as long as all are sure, here the pass denoises all `max_length`
    positions at once and what is unsure is left out, so that the target does not read it.

    Args:
        max_length (`int`): Places denoised in a pass.
        threshold (`float`, *optional*, defaults to 0.45): Least chance, from 0 to 1; FailFast's.

    Raises:
        [`OptionError`]: `max_length` is below 1 or `threshold` is no chance.

    Example:

    ```python
    >>> import torch
    >>> ConfidenceStop(4).kept_length(torch.tensor([0.9, 0.5, 0.2, 0.8]))
    2

    ```
    """

    max_length: int
    threshold: float = 0.45

    def __post_init__(self) -> None:
        """Refuse what cannot be drafted."""
        if self.max_length < 1 or not 0 <= self.threshold <= 1:
            raise OptionError(
                "`max_length` must be at least 1 and `threshold` from 0 to 1, but they are "
                f"{self.max_length} and {self.threshold}."
            )

    def next_length(self) -> int:
        """Always `max_length`."""
        return self.max_length

    def kept_length(self, confidences: Tensor) -> int:
        """Places before the first unsure one, but one at least."""
        is_sure = (confidences >= self.threshold).long()
        return max(int(is_sure.cumprod(dim=-1).sum()), 1)

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Nothing is learnt."""
