"""The length of one row's drafts: always the same, by what was accepted, or as far as the drafter is confident.

Lengths count drafted tokens; root and bonus token are excluded.
"""

import math

from torch import Tensor

from .configuration_diffuspec import DiffusionConfig


class FixedLength:
    """Every draft has the same length; base of the other rules."""

    def __init__(self, length: int) -> None:
        self.length = length  # positions that the next pass denoises

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

    Example:

    ```python
    >>> length = AdaptiveLength(min_length=20, max_length=30, delta=10, rho=0.5)
    >>> length.observe(num_generated=30, num_accepted=7)
    >>> length.length
    20

    ```
    """

    def __init__(self, min_length: int, max_length: int, delta: int, rho: float) -> None:
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

    FailFast (arXiv 2512.20573) asks for another ten positions as long as all are confident; here one pass denoises
    `max_length`.
    """

    def __init__(self, max_length: int, threshold: float) -> None:
        super().__init__(max_length)
        self.threshold = threshold

    def kept_length(self, confidences: Tensor) -> int:
        """Positions before the first one below the threshold, but one at least."""
        return max(int((confidences >= self.threshold).long().cumprod(dim=-1).sum()), 1)


def length_rule(config: DiffusionConfig) -> FixedLength:
    """The rule of a configuration, for one row."""
    most = config.most_draft_tokens
    if config.draft_length == "adaptive":
        return AdaptiveLength(config.min_draft_tokens, most, config.growth, config.smoothing)
    return ConfidenceStop(most, config.least_confidence) if config.draft_length == "confidence" else FixedLength(most)
