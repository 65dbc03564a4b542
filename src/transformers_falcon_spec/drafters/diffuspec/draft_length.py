"""The length of one row's drafts: always the same, or by what was accepted.

Lengths count drafted tokens; root and bonus token are excluded.
"""

import math

from .configuration_diffuspec import DiffusionConfig


class DraftLength:
    """The published adaptive length: longer after drafts that were accepted whole, shorter where the text ends.

    With moving averages that start at 0, `generated = (1 - rho) * generated + rho * num_generated` and the same for
    `accepted`, the next draft has `ceil(generated + delta * [accepted >= generated])` positions, at least `min_length`
    and at most `max_length`; the first one has `max_length`. Since `num_generated` never exceeds the length itself,
    the length falls to `min_length` in the second step and stays there except after drafts accepted almost whole:
    small drafters want a small `min_length`. Where both are the same, so is the length of every draft. Source: arXiv
    2510.02358, section 3.3.

    Example:

    ```python
    >>> length = DraftLength(min_length=20, max_length=30, delta=10, rho=0.5)
    >>> length.observe(num_generated=30, num_accepted=7)
    >>> length.length
    20

    ```
    """

    def __init__(self, min_length: int, max_length: int, delta: int, rho: float) -> None:
        self.min_length = min_length
        self.max_length = max_length
        self.delta = delta
        self.rho = rho
        self.length = max_length  # positions that the next pass denoises
        self._generated = 0.0
        self._accepted = 0.0

    @classmethod
    def of(cls, config: DiffusionConfig) -> "DraftLength":
        """The rule of a configuration, for one row."""
        most = config.most_draft_tokens
        least = config.min_draft_tokens if config.draft_length == "adaptive" else most
        return cls(least, most, config.growth, config.smoothing)

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Learn from a verified draft: positions before the end of the text, and drafted tokens that were accepted."""
        self._generated += self.rho * (num_generated - self._generated)
        self._accepted += self.rho * (num_accepted - self._accepted)
        bonus = self.delta * (self._accepted >= self._generated)
        self.length = min(max(math.ceil(self._generated + bonus), self.min_length), self.max_length)
