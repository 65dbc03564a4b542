"""How much of the training data counts in the loss, and whether that looks like a fault of the chat template."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

logger = logging.getLogger(__name__)

LOW_SHARE = 0.1  # of the tokens; below it nine tenths of the target's work teach nothing


@dataclass(frozen=True)
class MaskCoverage:
    """What counts in the loss, over the whole data.

    Args:
        num_examples (`int`): Examples to learn from, those without a counted token left out.
        num_tokens (`int`): Their tokens, up to the greatest length.
        num_counted (`int`): Those of them that are the assistant's.
        num_beyond (`int`): The assistant's tokens beyond the greatest length, in all rows.
        num_turns (`int`): Turns of the assistant, in all rows.
        num_runs (`int`): Runs of counted tokens, in all rows at full length; each turn should make one.
    """

    num_examples: int
    num_tokens: int
    num_counted: int
    num_beyond: int
    num_turns: int
    num_runs: int

    @classmethod
    def of(
        cls, examples: Iterable[dict[str, Any]], masks: Iterable[list[int]], num_turns: int, max_length: int
    ) -> "MaskCoverage":
        """Of the examples that are kept, cut, and the masks of all rows, uncut."""
        lengths = [(len(example["input_ids"]), sum(example["assistant_mask"])) for example in examples]
        whole = list(masks)
        return cls(
            num_examples=len(lengths),
            num_tokens=sum(length for length, _ in lengths),
            num_counted=sum(counted for _, counted in lengths),
            num_beyond=sum(sum(mask[max_length:]) for mask in whole),
            num_turns=num_turns,
            num_runs=sum(is_counted for mask in whole for is_counted, _ in groupby(mask)),
        )

    @property
    def share(self) -> float:
        """Counted tokens in all tokens, 0 to 1."""
        return self.num_counted / self.num_tokens if self.num_tokens else 0.0

    def __str__(self) -> str:
        beyond = f"; {self.num_beyond} more lie beyond the greatest length" if self.num_beyond else ""
        return (
            f"{self.num_examples} examples, {self.num_tokens} tokens, {self.num_counted} of them the assistant's and "
            f"counted in the loss ({self.share:.0%}){beyond}"
        )

    def warn(self) -> None:
        """Say in the log what looks like a fault."""
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
