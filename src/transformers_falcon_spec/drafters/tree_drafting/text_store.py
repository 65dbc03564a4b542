"""Texts of former calls that later ones draft from, and where each n-gram of texts stood last.

What an agent reads and writes comes again: files that it edits, answers of tools, retrieved texts. A caller keeps them
in a [`TextStore`] of its own; nothing is shared between stores, and none is made for anybody.
"""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from ...errors import OptionError
from ...generation.modes import variable_set

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


_STORES: ContextVar[Sequence[TextStore | None]] = ContextVar("stores", default=())


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
    return variable_set(_STORES, stores)


def stores_of_call() -> Sequence[TextStore | None]:
    """The store of each row; empty where the call has none."""
    return _STORES.get()
