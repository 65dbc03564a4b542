"""Reads are audited in the text: at lengths where a target may change its ways, a draft's path is read token by token.

The probe sees a few dozen tokens. A window, a block or a table may change what a forward of several tokens says far
behind them, and no name tells. So drafts end before such a length, and the first path that is accepted behind it is
read again as plain decoding reads it. Those scores write the text; if the draft's were others, drafting ends or
becomes simpler.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from math import isfinite
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..core.rounding import rounding_of
from .drafting import Draft
from .stock_cache import ENDLESS

FLOOR = 128  # the shortest length that is audited; the probe reads shorter texts itself, or nearly so
SLOTS = -1  # the key of the slots of a cache among the numbers of rows
_NUM_MULTIPLES = 8
_FIRST_POWER = 4  # times the floor
_TIMES_PROBED = 10  # what scores may differ by, of what the probe saw of a draft
_WIDTHS_AND_IDS = re.compile(
    r"vocab|token_id|_ids?$|dim|width|rank|hidden|intermediate|inner|channel|ffn|embd$|embedding_size|head_size|theta"
    r"|d_model|d_ff|d_kv|pre_attn_scalar|mlp_size|expert|layers|heads|groups|seed|image|vision|audio|patch"
)


def audited_lengths(config: PreTrainedConfig, end: int) -> list[int]:
    """The lengths up to `end` at which a target of this config may change its ways."""
    named = {number for number in _integers(config.to_dict()) if FLOOR <= number <= end}

    found = {first * second for first, second in combinations_with_replacement(sorted(named), 2)}
    for number in named:
        found.update(range(number, number * _NUM_MULTIPLES + 1, number))

    power = _FIRST_POWER * FLOOR
    while power <= end:
        found.add(power)
        power *= 2

    return sorted(length for length in found if length <= end)


def _integers(fields: Mapping[str, Any]) -> Iterator[int]:
    """The integers of a config, those of its parts included, that may be numbers of tokens."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _integers(value)
        elif not _WIDTHS_AND_IDS.search(str(name)):
            values = value if isinstance(value, (list, tuple)) else [value]
            for each in values:
                if isinstance(each, int) and not isinstance(each, bool):
                    yield each


class Audit:
    """What was audited of one call: for the slots of the cache, and for each row, up to which length."""

    def __init__(self, lengths: Sequence[int], probed_error: float) -> None:
        self.lengths = lengths
        self._probed_error = probed_error if isfinite(probed_error) else 0.0
        self._settled: dict[int, int] = {}
        self._num_short = 0  # audits running in which no drafted token was kept, so that its scores were not compared
        self._num_rests = 0  # steps that draft nothing, before the next of them

    def num_nodes_before(self, num_slots: int) -> int:
        """The most nodes of a draft that the target reads before the next of the lengths; at least the root."""
        following = self.lengths[bisect_right(self.lengths, num_slots) :]
        return max(following[0] - 1 - num_slots, 1) if following else ENDLESS

    def is_due(self, counts: Mapping[int, int], draft: Draft) -> bool:
        """Whether a draft is to be read again: it passes a length, or one before it was not audited.

        `counts` are the tokens before the draft, by the number of a row, and the slots.
        """
        num_nodes = draft.token_ids.shape[1]
        if num_nodes == 1 or not self.lengths:
            return False
        if not self._passes(counts, num_nodes):
            return False
        return self._passes(counts, draft.depth + 1)  # of which the device may have to be asked

    def _passes(self, counts: Mapping[int, int], num_tokens: int) -> bool:
        """Whether a length lies between what was audited and the end of a draft whose rows add so many tokens."""
        for key, count in counts.items():
            settled = self._settled.get(key, 0)
            if any(settled < length <= count + num_tokens for length in self.lengths):
                return True
        return False

    def settle(self, counts: Mapping[int, int], is_long: bool) -> None:
        """A draft behind so many tokens was read rightly, as far as it was compared.

        Where none of its tokens was kept (it is not `is_long`) the next draft is audited, too. Drafts that bring
        nothing would be read and audited for ever, so the steps between two of them double.
        """
        if is_long:
            self._settled.update(counts)
        self._num_short = 0 if is_long else self._num_short + 1
        self._num_rests = 2**self._num_short - 1

    def rests(self) -> bool:
        """Whether the next step is to draft nothing; it counts as taken."""
        is_resting = self._num_rests > 0
        self._num_rests -= int(is_resting)
        return is_resting

    def is_right(self, read: Tensor, plain: Tensor) -> bool:
        """Whether rounding explains what scores of a draft differ by from those of plain decoding.

        A token that overflowed spoils what the target says after others, which is found elsewhere.
        """
        is_compared = ~(read.isnan() | plain.isnan()) & (read != plain)
        if not is_compared.any():
            return True

        error = (read.float() - plain.float()).abs()[is_compared].max().item()
        return error <= max(_TIMES_PROBED * self._probed_error, rounding_of(plain))
