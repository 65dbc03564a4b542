"""Lets a drafter go on in buffers of fixed shape where its target does, so that its passes are captured, too."""

from dataclasses import replace

import torch
from torch import nn

from ..drafting import DraftBudget, Drafter, TreeCandidateGenerator
from ..target import Target
from .eligibility import NO_MEMORY, why_not_repeated


class CapturedDrafts:
    """The drafts of one call as captured work. `notes` say why they are not, if the target's reads are."""

    def __init__(self, drafter: Drafter, max_length: int, notes: list[str]) -> None:
        self._drafter = drafter
        self._max_length = max_length
        self._notes = notes
        self.is_possible = False

    def begin(self, generator: TreeCandidateGenerator, budget: DraftBudget) -> None:
        """Find out whether drafts within budgets like this one can be captured, once the target's reads are."""
        reason = generator.why_not_fixed(budget)
        if reason is None and isinstance(self._drafter, nn.Module):
            reason = why_not_repeated(self._drafter, "drafter")
        self._settle(reason)

    def enter(self, target: Target, generator: TreeCandidateGenerator) -> None:
        """Let the drafter go on in fixed shapes, where the text does, as soon as it has something to read."""
        is_next = self.is_possible and generator.fixed is None and generator.has_unread
        if not is_next or target.state is None:
            return
        try:
            target.state.enter(generator, self._drafter, self._max_length, target.backend)
        except torch.OutOfMemoryError:
            self._settle(NO_MEMORY)

    def within(self, budget: DraftBudget, target: Target, generator: TreeCandidateGenerator) -> DraftBudget:
        """The budget of the next draft: to price a node of a captured one the host would wait for its probability."""
        self.enter(target, generator)
        return budget if generator.fixed is None else replace(budget, prices=None)

    def _settle(self, reason: str | None) -> None:
        self.is_possible = reason is None
        if reason is not None:
            self._notes.append(f"Drafts are not captured: {reason}.")
