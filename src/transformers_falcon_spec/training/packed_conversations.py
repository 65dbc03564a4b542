"""Several conversations in one row of a batch, chosen by length and a seed, so that little of it is padding."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import OptionError
from .dataset import ConversationDataset, Example
from .feature_cache import FeatureCache
from .mask_coverage import MaskCoverage


class PackedConversations(Dataset[Example]):
    """Rows of whole conversations, one after the other; `position_ids` start again at 0 with each.

    Args:
        data ([`ConversationDataset`] or [`FeatureCache`]): The conversations.
        bins (`list[list[int]]`): The conversations of each row, by their numbers in `data`.
    """

    def __init__(self, data: ConversationDataset | FeatureCache, bins: list[list[int]]) -> None:
        self.data, self.bins = data, bins

    @classmethod
    def fill(cls, data: ConversationDataset | FeatureCache, row_length: int, seed: int) -> "PackedConversations":
        """Rows of up to `row_length` tokens, filled by [`best_fit`].

        Raises:
            [`OptionError`]: a conversation is longer than a row.
        """
        return cls(data, best_fit(data.lengths, row_length, torch.Generator().manual_seed(seed)))

    @property
    def conversations(self) -> ConversationDataset:
        """The conversations without features."""
        return self.data.dataset if isinstance(self.data, FeatureCache) else self.data

    @property
    def coverage(self) -> MaskCoverage:
        """What counts in the loss, of all conversations."""
        return self.conversations.coverage

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        lengths = self.data.lengths
        return [sum(lengths[number] for number in row) for row in self.bins]

    def subset(self, indices: Iterable[int]) -> "PackedConversations":
        """The rows at `indices`, in that order, of conversations without features."""
        rows = [self.bins[index] for index in indices]
        starts = [sum(map(len, rows[:place])) for place in range(len(rows))]
        bins = [list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)]
        return PackedConversations(self.conversations.subset(chain(*rows)), bins)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Example:
        parts = [self.data[number] for number in self.bins[index]]
        positions = [list(range(len(part["input_ids"]))) for part in parts]
        return {
            **{name: _joined([part[name] for part in parts]) for name in parts[0]},
            "position_ids": _joined(positions),
        }


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts))


def best_fit(lengths: list[int], row_length: int, generator: torch.Generator) -> list[list[int]]:
    """Bins of numbers, filled from the longest down, each into the fullest bin with room (best-fit decreasing).

    Its rows are at most 11/9 as many as the fewest possible, and 4 more (D. S. Johnson et al., "Worst-case performance
    bounds for simple one-dimensional packing algorithms", SIAM J. Comput. 3, 1974).

    Args:
        lengths (`list[int]`): Tokens of each conversation.
        row_length (`int`): Most tokens of a bin.
        generator (`torch.Generator`): Decides among conversations of one length.

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
    by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # keys of `by_room`, ascending
    for number in sorted(order, key=lambda number: -lengths[number]):
        place = bisect_left(rooms, lengths[number])
        if place == len(rooms):
            room = row_length
            bins.append(chosen := [])
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        chosen.append(number)
        left = room - lengths[number]
        if left not in by_room:
            insort(rooms, left)
        by_room.setdefault(left, []).append(chosen)
    return bins
