"""Counts of n-grams of token ids, kept in sorted arrays and opened as a dictionary for one context at a time.

An n-gram over a vocabulary of V tokens is kept under one whole number, its tokens as digits to the base V, so that all
that follows one context stands side by side.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OptionError


@dataclass(slots=True)
class Followers:
    """How often each token followed one context, and how often any did."""

    counts: dict[int, int]
    total: int

    def copy(self) -> "Followers":
        """The same counts, to go on from."""
        return Followers(dict(self.counts), self.total)

    def count(self, token: int) -> None:
        """Count `token` as a follower once more."""
        self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1

    def interpolated(self, token_ids: Sequence[int], shorter: list[float]) -> list[float]:
        """The probability of each token, given that after the context without its oldest token."""
        if not self.total:
            return shorter
        num_kinds, count_of = len(self.counts), self.counts.get
        weight = self.total + num_kinds
        pairs = zip(token_ids, shorter, strict=True)
        return [(count_of(token, 0) + num_kinds * prob) / weight for token, prob in pairs]


@dataclass(frozen=True)
class NgramCounts:
    """All n-grams of one length that ever came, in rising order of their keys, and how often."""

    keys: "array[int]"
    counts: "array[int]"
    vocab_size: int

    @classmethod
    def of_tensors(cls, keys: Tensor, counts: Tensor, vocab_size: int) -> "NgramCounts":
        """Of tensors `[ngrams]`, whose keys rise."""
        keys_bytes, counts_bytes = keys.to(torch.int64).numpy().tobytes(), counts.to(torch.int32).numpy().tobytes()
        return cls(array("q", keys_bytes), array("i", counts_bytes), vocab_size)

    def to_tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and counts `[ngrams]`."""
        if not self.keys:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        return torch.frombuffer(self.keys, dtype=torch.int64), torch.frombuffer(self.counts, dtype=torch.int32)

    def followers(self, context: Sequence[int]) -> Followers:
        """Counts of the tokens that followed a context, which is one token shorter than the n-grams."""
        first = 0
        for token in context:
            first = (first + token) * self.vocab_size
        start = bisect_left(self.keys, first)
        stop = bisect_left(self.keys, first + self.vocab_size, lo=start)
        counts = self.counts[start:stop]
        found = {key - first: count for key, count in zip(self.keys[start:stop], counts, strict=True)}
        return Followers(found, sum(counts))


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
        found, counts = keys[text_of[:num] == text_of[length - 1 :]].unique(return_counts=True)
        levels.append(NgramCounts.of_tensors(found, counts, vocab_size))
    return levels
