"""How much of the training data counts in the loss, and whether the chat template seems to be at fault."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

LOW_SHARE = 0.1  # of the tokens; with less, nine tenths of the target's work are wasted


def examples(num: int) -> str:
    """So many examples, in words."""
    return f"{num} example{'' if num == 1 else 's'}"


@dataclass(frozen=True)
class MaskCoverage:
    """How many tokens of the training data count in the loss."""

    num_examples: int  # with at least one counted token
    num_tokens: int  # of these examples, cut at `max_length`
    num_counted: int  # of these tokens: the assistant's
    num_beyond: int  # the assistant's tokens that were cut off, in all rows
    num_turns: int  # the assistant's, in all rows
    num_runs: int  # of counted tokens, in all rows before they are cut; each turn should be one

    @classmethod
    def count(cls, masks: Sequence[Any], num_turns: int, max_length: int) -> "MaskCoverage":
        """Count the tokens in the masks of all rows, which are cut at `max_length` and left out if nothing counts."""
        num_examples = num_tokens = num_counted = num_beyond = num_runs = 0
        for each in masks:
            mask = np.asarray(each, dtype=np.int8)
            kept = mask[:max_length]
            if kept.any():
                num_examples += 1
                num_tokens += len(kept)
                num_counted += int(kept.sum(dtype=np.int64))
            num_beyond += int(mask[max_length:].sum(dtype=np.int64))
            num_runs += int((np.diff(mask, prepend=np.int8(0)) > 0).sum())
        return cls(num_examples, num_tokens, num_counted, num_beyond, num_turns, num_runs)

    @property
    def share(self) -> float:
        """The share of the tokens that count, 0 to 1."""
        return self.num_counted / self.num_tokens if self.num_tokens else 0.0

    def __str__(self) -> str:
        beyond = f"; {self.num_beyond} more lie beyond the greatest length" if self.num_beyond else ""
        return (
            f"{examples(self.num_examples)}, {self.num_tokens} tokens, {self.num_counted} of them the assistant's and "
            f"counted in the loss ({self.share:.0%}){beyond}"
        )

    def warn(self) -> None:
        """Log a warning if the mask looks wrong."""
        if self.share < LOW_SHARE:
            logger.warning(
                "Only %.1f%% of the tokens count in the loss. Look at them with `falcon-spec train --show_masks`: the "
                "chat template may mark too little, or prompts may be long and answers cut by `max_length`.",
                100 * self.share,
            )
        if self.num_runs < self.num_turns:
            logger.warning(
                "The assistant has %d turns, but the mask has %d runs of counted tokens. Look at them with "
                "`falcon-spec train --show_masks`: the chat template seems to mark some of its turns only.",
                self.num_turns,
                self.num_runs,
            )
