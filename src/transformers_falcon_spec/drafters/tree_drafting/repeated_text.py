"""Finds where the newest tokens of a text stood before, and how likely what followed them there follows again.

The host looks in the tokens that it knows anyway, a few look-ups for each. How often the token that followed came
again is counted by how many tokens before it are the same, so that loops soon have continuations that are all but
sure. Sources: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), SuffixDecoding
(https://arxiv.org/abs/2411.04975).

A row may look into texts of former calls, too. What an agent reads and writes comes again: files that it edits,
answers of tools, retrieved texts. A caller keeps them in a [`TextStore`] of its own; nothing is shared between stores,
and none is made for anybody.
"""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from ...errors import OptionError
from ...generation.drafting import Committed, Kept, Prices
from ...generation.modes import variable_set

NGRAM_SIZE = 2  # as in Transformers; larger ones found nothing better
SURE = 0.8  # probability of a whole branch from which on nothing else needs to be drafted
LONGEST_MATCH = 8  # tokens before a continuation that are compared; longer matches count as one kind
# How often the next token came again, by the tokens before it that were the same (`lab/log/trees.md`).
PRIOR = (0.32, 0.48, 0.58, 0.7, 0.7, 0.73, 0.77, 0.89)
PRIOR_WEIGHT = 4.0  # tokens that a prior counts for
STORE_SIZES = (8, 4, 2)  # of the n-grams by which stored texts are found

Text = list[int]


@dataclass(frozen=True)
class Match:
    """A place where the newest tokens of a text stood before."""

    text: Text  # the one that they stood in
    start: int  # index of what followed them
    length: int  # tokens before it that are the same, `LONGEST_MATCH` at most
    index: "NgramIndex"  # that found it


class NgramIndex:
    """Where each n-gram of texts stood last, and how often what followed there came again.

    Args:
        sizes (`Sequence[int]`): Of the n-grams, largest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._places: dict[tuple[int, ...], tuple[Text, int]] = {}  # a text, and the index of what followed there
        self._num = [PRIOR_WEIGHT] * LONGEST_MATCH  # tokens that followed a match of each length
        self._num_again = [PRIOR_WEIGHT * prior for prior in PRIOR]  # those of them that came again

    def add(self, text: Text, index: int) -> None:
        """Note the n-grams of a text that end before `index`, where the next token stands or will stand."""
        for size in self._sizes:
            if size <= index:
                self._places[tuple(text[index - size : index])] = (text, index)

    def forget(self, text: Text) -> None:
        """Forget a text; n-grams that stood in a later one, too, stay."""
        for size in self._sizes:
            for index in range(size, len(text)):
                ngram = tuple(text[index - size : index])
                place = self._places.get(ngram)
                if place is not None and place[0] is text:
                    del self._places[ngram]

    def match(self, token_ids: Text) -> Match | None:
        """Where the largest n-gram that the tokens end with stood last; None if none of them did."""
        for size in self._sizes:
            place = self._places.get(tuple(token_ids[-size:]))
            if place is not None:
                break
        else:
            return None

        text, start = place
        length = 0
        most = min(start, len(token_ids), LONGEST_MATCH)
        while length < most and text[start - length - 1] == token_ids[-length - 1]:
            length += 1
        return Match(text, start, length, self)

    def count(self, match: Match, token: int) -> None:
        """Count whether the token that followed a match came again."""
        self._num[match.length - 1] += 1
        self._num_again[match.length - 1] += match.text[match.start] == token

    def log_prob(self, length: int) -> float:
        """The log-probability that what followed a match of such a length, or of the longest, comes again."""
        kind = min(length, LONGEST_MATCH) - 1
        return math.log(self._num_again[kind] / self._num[kind])


class TextStore:
    """Texts that later calls of one caller draft from, such as those that it has read or written before.

    Drafts look into it under [`draft_from`] alone. Whoever can draft from a store can learn from the number of
    accepted tokens what it holds, so give each caller one of its own. The oldest texts leave first. It serves one
    thread at a time.

    Args:
        max_tokens (`int`, *optional*, defaults to 65536): Most tokens that are kept, about 700 bytes each.

    Raises:
        [`OptionError`]: there is no room for any token.

    Example:

    ```python
    >>> store = TextStore(max_tokens=6)
    >>> store.add([1, 2, 3, 4])
    >>> store.add([1, 2, 3, 4, 5])  # instead of the one that it begins with
    >>> store.num_tokens
    5
    >>> store.add([6, 7])
    >>> store.num_tokens
    2

    ```
    """

    def __init__(self, max_tokens: int = 65536) -> None:
        if max_tokens < 1:
            raise OptionError(f"`max_tokens` must be at least 1, but it is {max_tokens}. Leave the store out.")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.index = NgramIndex(STORE_SIZES)
        self._texts: deque[Text] = deque()  # oldest first

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep a text, its newest `max_tokens`; those that it begins with, and the oldest without room, leave."""
        text = [int(token) for token in token_ids][-self.max_tokens :]
        for kept in [*self._texts]:
            if text[: len(kept)] == kept:  # a conversation that goes on
                self._forget(kept)

        self._texts.append(text)
        self.num_tokens += len(text)
        for index in range(1, len(text)):
            self.index.add(text, index)
        while self.num_tokens > self.max_tokens:
            self._forget(self._texts[0])

    def _forget(self, text: Text) -> None:
        self._texts.remove(text)
        self.num_tokens -= len(text)
        self.index.forget(text)


# The store of each row of a call; empty where the call has none.
STORES: ContextVar[Sequence[TextStore | None]] = ContextVar("stores", default=())


def draft_from(stores: Sequence[TextStore | None]) -> AbstractContextManager[None]:
    """Let each row of the calls inside, on this thread, draft from a store, too; None leaves a row without one.

    Calls inside raise an [`OptionError`] where rows are more or fewer, and where the drafter has no branch of repeated
    text: its `generation_config.prompt_lookup_num_tokens` says how long one may be.

    Example:

    ```python
    >>> store = TextStore()
    >>> with draft_from([store]):
    ...     pass  # out = target.generate(..., assistant_model=drafter)
    >>> store.add([1, 2, 3])  # out[0]

    ```
    """
    return variable_set(STORES, stores)


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
    """The tokens of one row, and where those that repeat stood before: in the row, or in the store that it has."""

    def __init__(self, max_ngram_size: int, store: TextStore | None = None) -> None:
        self.token_ids: Text = []
        self._own = NgramIndex(range(max_ngram_size, 0, -1))
        self._indexes = [self._own] if store is None else [self._own, store.index]

    def add(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Add new tokens; those of the prompt do not say how often the target repeats."""
        for token in token_ids:
            for match in [] if is_prompt else self._matches():
                match.index.count(match, token)

            self._own.add(self.token_ids, len(self.token_ids))
            self.token_ids.append(token)

    def _matches(self) -> list[Match]:
        """The best place of each index that has one."""
        found = []
        for index in self._indexes:
            match = index.match(self.token_ids)
            if match is not None:
                found.append(match)

        return found

    def match(self) -> Match | None:
        """Where the newest tokens stood before, as many as possible; in the row itself where both are equal."""
        return max(self._matches(), key=attrgetter("length"), default=None)

    def continuation(self, num_tokens: int) -> tuple[list[int], list[float]]:
        """At most so many tokens that may follow, and the log-probability of each with all before it.

        Where the row itself ends, so that it repeats itself at once, they go round again.
        """
        match = self.match()
        if match is None:
            return [], []

        period = len(match.text) - match.start
        if match.text is not self.token_ids:
            num_tokens = min(num_tokens, period)
        tokens = []
        log_probs = []
        log_prob = 0.0
        for step in range(num_tokens):
            log_prob += match.index.log_prob(match.length + step)
            log_probs.append(log_prob)
            tokens.append(match.text[match.start + step % period])

        return tokens, log_probs


class RepeatedText:
    """The texts of all rows of a call, and the branches that they give."""

    def __init__(self, num_tokens: int, max_ngram_size: int) -> None:
        self.num_tokens = num_tokens
        self._max_ngram_size = max_ngram_size
        self._rows: list[RowText] = []
        self._stores = STORES.get()
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
            stores = self._stores or [None] * len(lengths)
            if len(stores) != len(lengths):
                raise OptionError(
                    f"`draft_from` must have a store, or None, for each row, but the call has {len(lengths)} rows and "
                    f"it has {len(stores)}. Name the same store several times if they share it."
                )
            self._rows = [RowText(self._max_ngram_size, store) for store in stores]

        for row, length, text in zip(self._rows, lengths, self._newest.sequence_ids, strict=True):
            row.add(text[len(row.token_ids) : length].tolist(), is_prompt)

        self._newest = None

    def branch(self, depths: Sequence[int], most: int) -> Branch | None:
        """What may follow each row, `most` tokens and its depth at most; None where no row has anything."""
        self._catch_up()
        most = min(most, self.num_tokens)
        found = [row.continuation(min(depth, most)) for row, depth in zip(self._rows, depths, strict=True)]
        width = max(len(tokens) for tokens, _ in found)
        if not width:
            return None

        is_sure = all(
            bool(values) and values[-1] >= math.log(SURE)
            for (_, values), depth in zip(found, depths, strict=True)
            if depth
        )
        token_ids = [tokens + [-1] * (width - len(tokens)) for tokens, _ in found]
        log_probs = [values + [-math.inf] * (width - len(values)) for _, values in found]
        return Branch(torch.tensor(token_ids), torch.tensor(log_probs), is_sure)
