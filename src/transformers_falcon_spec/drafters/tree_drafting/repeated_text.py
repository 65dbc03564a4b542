"""Finds where the newest tokens of a text stood before, and how likely what followed them there follows again.

The host looks in the tokens that it knows anyway, a few look-ups for each. How often the token that followed came
again is counted by how many tokens before it are the same, so that loops soon have continuations that are all but
sure. Source: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...generation.drafting import Committed, Kept, Prices

NGRAM_SIZE = 2  # as in Transformers; larger ones found nothing better
LONGEST_MATCH = 8  # tokens before a continuation that are compared; longer matches count as one kind
# How often the next token came again, by the tokens before it that were the same (`lab/log/trees.md`).
PRIOR = (0.32, 0.48, 0.58, 0.7, 0.7, 0.73, 0.77, 0.89)
PRIOR_WEIGHT = 4.0  # tokens that a prior counts for
SURE = 0.8  # probability of a whole branch from which on nothing else needs to be drafted


@dataclass(frozen=True)
class Branch:
    """A chain of tokens for each row, to stand below the root of its tree."""

    token_ids: Tensor  # [rows, tokens] int64; -1 behind the end of a row's chain
    log_probs: Tensor  # [rows, tokens] that a token and all before it come; -inf behind the end
    is_sure: bool  # every row that may draft has one, and it is likely to come whole

    def first(self, num_tokens: int) -> "Branch":
        """The first tokens of each row's chain."""
        return Branch(self.token_ids[:, :num_tokens], self.log_probs[:, :num_tokens], self.is_sure)

    def __len__(self) -> int:
        """Tokens of the longest chain."""
        return self.token_ids.shape[1]

    def expected_by_depth(self, num_held: Tensor) -> Tensor:
        """The expected tokens of all rows at each depth, 0 at the root, without the first `num_held` `[rows, 1]`."""
        counts = self.log_probs.exp().masked_fill(torch.arange(len(self)) < num_held, 0.0).sum(0)
        return torch.cat([counts.new_zeros(1), counts])

    def paying(self, prices: Prices, num_before: int) -> "Branch":
        """The tokens that bring most above their price, read with `num_before` other nodes."""
        costs = prices.nodes[num_before : num_before + len(self)] - prices.nodes[num_before - 1]
        gains = self.log_probs.exp().sum(0).cumsum(0)[: len(costs)]
        _best, index = torch.cat([gains.new_zeros(1), gains - costs]).max(0)
        return self.first(int(index))


class RowText:
    """The tokens of one row, and where each of their n-grams stood last."""

    def __init__(self, max_ngram_size: int) -> None:
        self.token_ids: list[int] = []
        self._sizes = range(1, max_ngram_size + 1)
        self._next: dict[tuple[int, ...], int] = {}  # index of the token that followed an n-gram last
        self._num = [PRIOR_WEIGHT] * LONGEST_MATCH  # tokens that followed a match of each length
        self._num_again = [PRIOR_WEIGHT * prior for prior in PRIOR]  # those of them that came again

    def add(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Add new tokens; those of the prompt do not say how often the target repeats."""
        for token in token_ids:
            match = None if is_prompt else self.match()
            if match is not None:
                start, length = match
                self._num[length - 1] += 1
                self._num_again[length - 1] += self.token_ids[start] == token

            index = len(self.token_ids)
            for size in self._sizes[:index]:
                self._next[tuple(self.token_ids[index - size :])] = index

            self.token_ids.append(token)

    def match(self) -> tuple[int, int] | None:
        """The index of what followed the newest n-gram before, and the tokens that match there; None if nothing did.

        Of all sizes the largest counts, and of all places the latest.
        """
        ids = self.token_ids
        for size in reversed(self._sizes):
            start = self._next.get(tuple(ids[-size:]))
            if start is not None:
                break
        else:
            return None

        length = 0
        most = min(start, LONGEST_MATCH)
        while length < most and ids[start - length - 1] == ids[-length - 1]:
            length += 1

        return start, length

    def continuation(self, num_tokens: int) -> tuple[list[int], list[float]]:
        """At most so many tokens that may follow, and the log-probability of each with all before it.

        Where the text ends, so that it repeats itself at once, they go round again.
        """
        match = self.match()
        if match is None:
            return [], []

        start, length = match
        period = len(self.token_ids) - start
        tokens = []
        log_probs = []
        log_prob = 0.0
        for step in range(num_tokens):
            kind = min(length + step, LONGEST_MATCH) - 1
            log_prob += math.log(self._num_again[kind] / self._num[kind])
            log_probs.append(log_prob)
            tokens.append(self.token_ids[start + step % period])

        return tokens, log_probs


class RepeatedText:
    """The texts of all rows of a call, and the branches that they give."""

    def __init__(self, num_tokens: int, max_ngram_size: int) -> None:
        self.num_tokens = num_tokens
        self._max_ngram_size = max_ngram_size
        self._rows: list[RowText] = []
        self._newest: Committed | None = None  # not read yet: a commit waits for no device

    def commit(self, committed: Committed) -> None:
        """Note the text."""
        self._newest = committed

    def commit_kept(self, kept: Kept) -> None:
        """Add what the host knows of the newest tokens of a step in fixed shapes."""
        self._catch_up()
        for row, new in zip(self._rows, kept.new_ids, strict=True):
            row.add(new, is_prompt=False)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._catch_up()
        self._rows = [self._rows[row] for row in rows]

    def _catch_up(self) -> None:
        if self._newest is None:
            return

        lengths = self._newest.lengths
        is_prompt = not self._rows
        if is_prompt:
            self._rows = [RowText(self._max_ngram_size) for _ in lengths]

        for row, length, text in zip(self._rows, lengths, self._newest.sequence_ids, strict=True):
            row.add(text[len(row.token_ids) : length].tolist(), is_prompt)

        self._newest = None

    def branch(self, depths: Sequence[int], most: int) -> Branch | None:
        """What may follow each row, `most` tokens and its depth at most; None where no row has anything."""
        self._catch_up()
        most = min(most, self.num_tokens)
        token_ids = []
        log_probs = []
        is_sure = True
        for row, depth in zip(self._rows, depths, strict=True):
            tokens, values = row.continuation(min(depth, most))
            token_ids.append(torch.tensor(tokens, dtype=torch.long))
            log_probs.append(torch.tensor(values, dtype=torch.float))
            if depth:
                is_sure = is_sure and bool(values) and values[-1] >= math.log(SURE)

        ids = pad_sequence(token_ids, batch_first=True, padding_value=-1)
        if not ids.shape[1]:
            return None

        return Branch(ids, pad_sequence(log_probs, batch_first=True, padding_value=-math.inf), is_sure)
