"""The length of one row's drafts: always the same, by what was accepted, or as far as the drafter is confident.

Lengths count drafted tokens; root and bonus token are excluded.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ...errors import OptionError


@dataclass
class FixedLength:
    """Every draft has the same length; base of the other rules.

    Args:
        length (`int`): Positions that a pass denoises.

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
        """Refuse a draft without a token."""
        if self.length < 1:
            raise OptionError(f"`length` of a draft must be at least 1, but it is {self.length}.")

    def next_length(self) -> int:
        """Positions that the next pass should denoise, at least 1."""
        return self.length

    def kept_length(self, confidences: Tensor) -> int:
        """How many positions to draft for, by the probability `[positions]` of each one's best candidate."""
        return len(confidences)

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Learn from a verified draft: positions before the end of the text, and drafted tokens that were accepted."""


class AdaptiveLength(FixedLength):
    """The published adaptive length: longer after drafts that were accepted whole, shorter where the text ends.

    With moving averages that start at 0, `generated = (1 - rho) * generated + rho * num_generated` and the same for
    `accepted`, the next draft has `ceil(generated + delta * [accepted >= generated])` positions, at least `min_length`
    and at most `max_length`; the first one has `max_length`. Since `num_generated` never exceeds the length itself,
    the length falls to `min_length` in the second step and stays there except after drafts accepted almost whole:
    small drafters want a small `min_length`. Source: arXiv 2510.02358, section 3.3.

    Args:
        min_length (`int`, *optional*, defaults to 20): Shortest draft.
        max_length (`int`, *optional*, defaults to 30): Longest draft, and the first one.
        delta (`int`, *optional*, defaults to 10): Positions more while all that is generated is accepted.
        rho (`float`, *optional*, defaults to 0.5): Weight of the newest draft in the averages.

    Raises:
        [`OptionError`]: the lengths are below 1 or cross, `delta` is negative, or `rho` is not above 0 and at most 1.

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
                "Draft lengths must obey 1 <= `min_length` <= `max_length`, 0 <= `delta` and 0 < `rho` <= 1, but they "
                f"are {min_length}, {max_length}, {delta} and {rho}."
            )
        super().__init__(max_length)
        self.min_length, self.max_length, self.delta, self.rho = min_length, max_length, delta, rho
        self._generated = self._accepted = 0.0

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Move both averages, and with them the length."""
        self._generated += self.rho * (num_generated - self._generated)
        self._accepted += self.rho * (num_accepted - self._accepted)
        bonus = self.delta * (self._accepted >= self._generated)
        self.length = min(max(math.ceil(self._generated + bonus), self.min_length), self.max_length)


class ConfidenceStop(FixedLength):
    """Drafts end before the first position whose best candidate is less likely than `threshold`.

    Where FailFast (arXiv 2512.20573) asks for another ten positions as long as all are confident, here one pass
    denoises `max_length` positions and the target does not read those behind the first one below the threshold.

    Args:
        max_length (`int`): Positions denoised in a pass.
        threshold (`float`, *optional*, defaults to 0.45): Least probability, from 0 to 1; FailFast's.

    Raises:
        [`OptionError`]: `max_length` is below 1 or `threshold` is no probability.

    Example:

    ```python
    >>> import torch
    >>> ConfidenceStop(4).kept_length(torch.tensor([0.9, 0.5, 0.2, 0.8]))
    2

    ```
    """

    def __init__(self, max_length: int, threshold: float = 0.45) -> None:
        if max_length < 1 or not 0 <= threshold <= 1:
            raise OptionError(
                f"`max_length` must be at least 1 and `threshold` from 0 to 1, but they are {max_length} and "
                f"{threshold}."
            )
        super().__init__(max_length)
        self.threshold = threshold

    def kept_length(self, confidences: Tensor) -> int:
        """Positions before the first one below the threshold, but one at least."""
        return max(int((confidences >= self.threshold).long().cumprod(dim=-1).sum()), 1)
