"""Which parts of a call's steps are captured: decided part by part, with a note for each that is not."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ...errors import GenerationError
from ..drafting import DraftBudget, Drafter, TreeCandidateGenerator
from ..sequence_batch import SequenceBatch
from ..target import Target
from .eligibility import BUSY, NO_MEMORY, is_wanted, why_not_captured, why_not_repeated

BACKEND = "inductor"  # of `torch.compile`


class StepShapes:
    """What the option `capture` comes to in one call; `notes` are those of its statistics."""

    def __init__(self, drafter: Drafter, config: GenerationConfig, notes: list[str]) -> None:
        self._drafter, self._config, self._notes = drafter, config, notes
        self._capture = drafter.generation_config.capture
        self.has_fixed_drafts = False  # whether the drafter can go on in fixed shapes, too

    def target(self, model: PreTrainedModel, form: str, num_processes: int, has_hooks: bool) -> Target:
        """The target that decodes as the option asks; a note says why where it cannot."""
        is_fixed = False
        if is_wanted(self._capture, model.device):
            reason = why_not_captured(model, form, num_processes, has_hooks)
            is_fixed = reason is None
            self._note_uncaptured(reason)

        target = Target(model, self._drafter.feature_layers, has_hooks, is_fixed)
        is_compiled = self._drafter.generation_config.compile and not self._config.disable_compile
        if is_compiled and is_fixed:
            target.backend = BACKEND
        return target

    def enter(
        self, target: Target, batch: SequenceBatch, generator: TreeCandidateGenerator, budget: Any, num_logits: int
    ) -> None:
        """After the prefill, let a text go on in fixed shapes if the target can; say of other parts why not."""
        if batch.is_complete:
            return
        self._note_uncaptured(target.enter(batch, self._config, num_logits))
        if target.state is None:
            return
        reason = generator.why_not_fixed(budget())
        if reason is None and isinstance(self._drafter, nn.Module):
            reason = why_not_repeated(self._drafter, "drafter")
        self.has_fixed_drafts = reason is None
        if reason is not None:
            self._notes.append(f"Drafts are not captured: {reason}.")
        if target.choice_reason is not None:
            self._notes.append(f"The host chooses tokens: {target.choice_reason}.")

    def of_draft(self, target: Target, generator: TreeCandidateGenerator, budget: DraftBudget) -> DraftBudget:
        """The budget of the next draft; the drafter enters fixed shapes once there is something to read."""
        self.enter_drafter(target, generator)
        if generator.fixed is None:
            return budget
        return replace(budget, prices=None)  # to price a node the host would wait for its probability

    def enter_drafter(self, target: Target, generator: TreeCandidateGenerator) -> None:
        """Let the drafter go on in fixed shapes, where the text does and it can and has something to read."""
        is_next = self.has_fixed_drafts and generator.fixed is None and generator.has_unread
        if is_next and target.state is not None:
            try:
                target.state.enter(generator, self._drafter, self._config.max_length, target.backend)
            except torch.OutOfMemoryError:
                self.has_fixed_drafts = False
                self._notes.append(f"Drafts are not captured: {NO_MEMORY}.")

    def _note_uncaptured(self, reason: str | None) -> None:
        if self._capture is True and reason not in {None, BUSY, NO_MEMORY}:
            raise GenerationError(
                f"`capture=True` needs a call that can be captured, but {reason}. Set "
                '`drafter.generation_config.capture = "auto"`, which decodes such calls uncaptured.'
            )
        if reason is not None:
            self._notes.append(f"The step is not captured: {reason}.")

    def end(self, target: Target) -> None:
        """Say after the call what ran out or could not be captured."""
        self._notes += target.end_notes
