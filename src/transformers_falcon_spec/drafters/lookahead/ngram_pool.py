"""n-grams found by their first token, and what of them is guessed: their continuations as one tree of prefixes."""

from collections.abc import Sequence

Tokens = tuple[int, ...]


class NgramPool:
    """The newest `pool_size` n-grams of one row; those that come again are new again.

    Example:

    ```python
    >>> pool = NgramPool(pool_size=2)
    >>> for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (7, 8, 9)]:
    ...     pool.add(ngram)
    >>> pool.continuations(1, 5), pool.continuations(7, 5)
    ([(2, 3)], [(8, 9)])

    ```
    """

    def __init__(self, pool_size: int) -> None:
        self.pool_size = pool_size
        self._ngrams: dict[Tokens, None] = {}  # an ordered set, oldest first
        self._by_first: dict[int, dict[Tokens, None]] = {}

    def add(self, ngram: Tokens) -> None:
        """Take one in, or make it the newest."""
        if ngram in self._ngrams:
            self._forget(ngram)
        self._ngrams[ngram] = None
        self._by_first.setdefault(ngram[0], {})[ngram[1:]] = None
        if len(self._ngrams) > self.pool_size:
            self._forget(next(iter(self._ngrams)))

    def add_text(self, token_ids: Sequence[int], ngram_len: int) -> None:
        """Take in every n-gram of a text."""
        for start in range(len(token_ids) - ngram_len + 1):
            self.add(tuple(token_ids[start : start + ngram_len]))

    def continuations(self, first: int, num_guesses: int) -> list[Tokens]:
        """The n-grams that begin with `first`, without that token, newest first."""
        return list(self._by_first.get(first, {}))[: -num_guesses - 1 : -1]

    def _forget(self, ngram: Tokens) -> None:
        del self._ngrams[ngram]
        del self._by_first[ngram[0]][ngram[1:]]
        if not self._by_first[ngram[0]]:
            del self._by_first[ngram[0]]


def prefix_tree(continuations: Sequence[Tokens], max_depth: int, num_nodes: int) -> list[tuple[int, int]]:
    """Parent and token of each node below a root, at most `num_nodes` of them; what continuations share is one path.

    ```python
    >>> prefix_tree([(5, 6, 7), (5, 8, 7)], max_depth=2, num_nodes=9)
    [(0, 5), (1, 6), (1, 8)]

    ```
    """
    nodes: dict[Tokens, int] = {(): 0}
    for continuation in continuations:
        for depth in range(1, min(len(continuation), max_depth) + 1):
            if len(nodes) <= num_nodes:
                nodes.setdefault(continuation[:depth], len(nodes))
    return [(nodes[prefix[:-1]], prefix[-1]) for prefix in list(nodes)[1:]]
