"""A data set whose rows hold several conversations each, so that batches have little padding."""

from bisect import bisect_left, insort
from itertools import chain

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import OptionError
from .dataset import ConversationDataset
from .feature_cache import FeatureCache
from .row_encoding import Example


class PackedConversations(Dataset[Example]):
    """Rows of complete conversations, one after the other; `position_ids` start at 0 with each of them.

    Args:
        data ([`ConversationDataset`] or [`FeatureCache`]): The conversations.
        bins (`list[list[int]]`): The indices of the conversations in each row.
    """

    def __init__(self, data: ConversationDataset | FeatureCache, bins: list[list[int]]) -> None:
        self.data, self.bins = data, bins

    @classmethod
    def fill(cls, data: ConversationDataset | FeatureCache, row_length: int, seed: int) -> "PackedConversations":
        """Fill rows of up to `row_length` tokens by [`best_fit`]; the same lengths and seed give the same rows."""
        return cls(data, best_fit(data.lengths, row_length, torch.Generator().manual_seed(seed)))

    @property
    def conversations(self) -> ConversationDataset:
        """The conversations without features."""
        return self.data.conversations

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row."""
        lengths = self.data.lengths
        return [sum(lengths[index] for index in row) for row in self.bins]

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Example:
        parts = [self.data[member] for member in self.bins[index]]
        row: Example = {"position_ids": [position for part in parts for position in range(len(part["input_ids"]))]}
        for name, first in parts[0].items():
            values = [part[name] for part in parts]
            row[name] = torch.cat(values) if isinstance(first, Tensor) else list(chain(*values))
        return row


def best_fit(lengths: list[int], row_length: int, generator: torch.Generator) -> list[list[int]]:
    """Pack conversations into bins: the longest first, each into the fullest bin that has room (best-fit decreasing).

    There are at most 11/9 times as many bins as possible, plus 4 (D. S. Johnson et al., "Worst-case performance bounds
    for simple one-dimensional packing algorithms", SIAM J. Comput. 3, 1974).

    Conversations of the same length are shuffled by `generator`.

    Raises:
        [`OptionError`]: a conversation is longer than a bin.

    Example:

    ```python
    >>> best_fit([3, 5, 2], 5, torch.Generator().manual_seed(0))
    [[1], [0, 2]]

    ```
    """
    if max(lengths, default=0) > row_length:
        raise OptionError(
            f"Rows of {row_length} tokens must hold every conversation, but the longest has {max(lengths)}. Raise the "
            "length of rows, or lower `max_length` of the conversations."
        )
    order = torch.randperm(len(lengths), generator=generator).tolist()
    bins: list[list[int]] = []
    by_free: dict[int, list[list[int]]] = {}
    free_sizes: list[int] = []  # keys of `by_free`, ascending
    for index in sorted(order, key=lambda index: -lengths[index]):
        tightest = bisect_left(free_sizes, lengths[index])
        if tightest == len(free_sizes):
            free = row_length
            bins.append(chosen := [])
        else:
            free = free_sizes[tightest]
            chosen = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], free_sizes[tightest]
        chosen.append(index)
        left = free - lengths[index]
        if left not in by_free:
            insort(free_sizes, left)
        by_free.setdefault(left, []).append(chosen)
    return bins
