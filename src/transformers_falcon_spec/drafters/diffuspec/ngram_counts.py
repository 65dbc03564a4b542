"""Counts of n-grams of token ids, kept in sorted arrays and opened as a dictionary for one context at a time.

An n-gram of vocabulary V is kept under one whole number, its tokens as digits to the base V, so that all that follows
one context stands side by side.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import OptionError


@dataclass(slots=True)
class Followers:
    """Counts of the tokens that followed one context.

    Args:
        total (`int`): How often it was followed by anything.
        num_kinds (`int`): By how many different tokens.
        counts (`dict[int, int]`): How often by each; shared, never changed.
        own_counts (`dict[int, int]`): How often in one text more.
    """

    total: int
    num_kinds: int
    counts: dict[int, int]
    own_counts: dict[int, int] = field(default_factory=dict)

    def count(self, token: int) -> None:
        """Count `token` as a follower once more."""
        self.total += 1
        self.num_kinds += token not in self.counts and token not in self.own_counts
        self.own_counts[token] = self.own_counts.get(token, 0) + 1

    def interpolated(self, token_ids: Sequence[int], shorter: list[float]) -> list[float]:
        """The probability of each token, given that after the context without its oldest token."""
        if not self.total:
            return shorter
        weight, num_kinds, shared = self.total + self.num_kinds, self.num_kinds, self.counts.get
        pairs = zip(token_ids, shorter, strict=True)
        if not self.own_counts:
            return [(shared(token, 0) + num_kinds * prob) / weight for token, prob in pairs]
        own = self.own_counts.get
        return [(shared(token, 0) + own(token, 0) + num_kinds * prob) / weight for token, prob in pairs]


@dataclass(frozen=True)
class NgramCounts:
    """All n-grams of one length that ever came, in rising order of their keys, and how often."""

    keys: "array[int]"
    counts: "array[int]"
    vocab_size: int

    @classmethod
    def of_tensors(cls, keys: Tensor, counts: Tensor, vocab_size: int) -> "NgramCounts":
        """Of tensors `[ngrams]`, whose keys rise."""
        return cls(
            array("q", keys.to(torch.int64).numpy().tobytes()),
            array("i", counts.to(torch.int32).numpy().tobytes()),
            vocab_size,
        )

    def to_tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and counts `[ngrams]`."""
        if not self.keys:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        return torch.frombuffer(self.keys, dtype=torch.int64), torch.frombuffer(self.counts, dtype=torch.int32)

    def rebased(self, vocab_size: int) -> "NgramCounts":
        """The same n-grams of a larger vocabulary that begins with these tokens."""
        keys, counts = self.to_tensors()
        found, factor = torch.zeros_like(keys), 1
        while bool(keys.any()):
            found += keys % self.vocab_size * factor
            keys, factor = keys // self.vocab_size, factor * vocab_size
        return NgramCounts.of_tensors(found, counts, vocab_size)

    def followers(self, context: Sequence[int]) -> Followers:
        """Counts of the tokens that followed a context, which is one token shorter than the n-grams."""
        key = 0
        for token in context:
            key = key * self.vocab_size + token
        first = key * self.vocab_size
        start = bisect_left(self.keys, first)
        stop = bisect_left(self.keys, first + self.vocab_size, lo=start)
        counts = self.counts[start:stop]
        found = {key - first: count for key, count in zip(self.keys[start:stop], counts, strict=True)}
        return Followers(sum(counts), len(counts), found)


def count_ngrams(token_sequences: Iterable[Sequence[int] | Tensor], order: int, vocab_size: int) -> list[NgramCounts]:
    """n-grams of 1 to `order` tokens; none reaches over the end of a sequence.

    Raises:
        [`OptionError`]: a token that is not in the vocabulary.
    """
    texts = [torch.as_tensor(each, dtype=torch.long).flatten() for each in token_sequences]
    tokens = torch.cat([torch.zeros(0, dtype=torch.long), *texts])
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise OptionError(
            f"Token ids must lie from 0 to {vocab_size - 1}, but they lie from {int(tokens.min())} to "
            f"{int(tokens.max())}. Take the vocabulary of the tokenizer that made them."
        )
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.long)
    text_of = torch.repeat_interleave(torch.arange(len(texts)), lengths)
    keys, levels = torch.zeros_like(tokens), []
    for length in range(1, order + 1):
        num = max(len(tokens) - length + 1, 0)
        keys = keys[:num] * vocab_size + tokens[length - 1 :]
        levels.append(keys[text_of[:num] == text_of[length - 1 :]].unique(return_counts=True))
    return [NgramCounts.of_tensors(found, counts, vocab_size) for found, counts in levels]
