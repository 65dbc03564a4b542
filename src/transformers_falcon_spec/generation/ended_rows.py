"""Lets rows that have ended leave a call: target and drafter then read the others alone."""

from transformers import GenerationConfig

from .drafting import TreeCandidateGenerator
from .output import is_observed
from .sequence_batch import SequenceBatch
from .target import Target

LEAST_SHARE = 1 / 8  # of the rows that are read, which must have ended before the states of the others are copied


class EndedRows:
    """Decides when the rows of one call leave it."""

    def __init__(self, batch: SequenceBatch, target: Target, config: GenerationConfig, num_processes: int) -> None:
        self._batch, self._target, self._num_processes = batch, target, num_processes
        self._is_returned = bool(config.return_dict_in_generate)  # the cache, after the call
        self.notes: list[str] = []  # why rows stayed, if some could have left

    def drop(self, generator: TreeCandidateGenerator) -> bool:
        """Drop the ended rows where enough have ended; returns whether some were dropped."""
        ended = self._batch.ended
        if all(ended) or sum(ended) < max(LEAST_SHARE * len(ended), 1):
            return False
        if self._target.state is not None or generator.fixed is not None:  # captured work is of so many rows
            return False
        if self._target.form == "plain":  # rows stay, as in plain decoding
            return False
        if is_observed():  # observers tell rows apart by their index
            return False
        if self.notes:  # what stood in the way once stays there
            return False

        reason = self._why_not(generator)
        if reason is not None:
            self.notes.append(f"Rows that had ended were read until the last one ended: {reason}.")
            return False

        rows = [row for row, has_ended in enumerate(ended) if not has_ended]
        self._batch.select_rows(rows)
        generator.select_rows(rows)
        is_users = getattr(self._target.cache, "_is_user_defined", False)  # which `generate` sets
        self._target.select_rows(rows, keeps_others=self._is_returned or is_users)
        return True

    def _why_not(self, generator: TreeCandidateGenerator) -> str | None:
        target = self._target
        reasons = {
            "several processes write the text together": self._num_processes > 1,
            "rows take different adapters": target.row_adapters.is_needed,
            "the target takes more than its text": not target.inputs.can_select(len(self._batch.rows)),
        }
        found = next((reason for reason, holds in reasons.items() if holds), None)
        return found or generator.why_rows_stay
