"""Batches of rows of like length, in an order that lengths and a seed alone decide."""

from collections.abc import Callable, Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededLengthGroups(LengthGroupedSampler):
    """Rows of like length together. A resumed run reads them in the same order, and so do several processes with smaller batches.

    Args:
        batch_size (`int`): Rows of one step, of all processes.
        lengths (`list[int]`): Tokens of each row.
        seed (`Callable[[], int]`): Gives the seed of an epoch when that begins.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: Callable[[], int]) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """One epoch's order."""
        self.generator.manual_seed(self._seed())
        return super().__iter__()
