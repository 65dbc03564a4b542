"""The Jacobi window: guesses for coming positions, which the target reads again in every step.

Its tokens form a comb below the root: the oldest guesses are the spine, and below each node of the spine hang the
later guesses for the positions after it. Ancestors are all that a node sees, and in this comb they are what the
paper's mask shows. Source: arXiv 2402.02057, section 3 and figure 2; start and movement as in the code published with
it.
"""

from collections.abc import Sequence

from .ngram_pool import Tokens


def num_first_tokens(window_size: int, ngram_len: int) -> int:
    """Tokens that a window starts from; also the depth of its comb, at any time."""
    return window_size + ngram_len - 3


class JacobiWindow:
    """The window of one row. Level 0 is the spine, one token shorter than the others: its first node is the root.

    A fresh window has the spine alone, of [`num_first_tokens`] tokens, and each step adds a level until there are
    `ngram_len - 1`. From then on each step yields an n-gram for every column, and the oldest level goes.

    Example:

    ```python
    >>> window = JacobiWindow(3, first_tokens=[7, 8])
    >>> window.advance(root=5, choices=[1, 2, 3]), window.levels
    ([], [[8], [2, 3]])
    >>> window.parents, window.tokens, window.tips
    ([0, 0, 1], [8, 2, 3], [2, 3])
    >>> window.advance(root=1, choices=[4, 6]), window.levels
    ([(1, 2, 4), (8, 3, 6)], [[3], [4, 6]])

    ```
    """

    def __init__(self, ngram_len: int, first_tokens: Sequence[int]) -> None:
        self.ngram_len = ngram_len
        self.levels = [list(first_tokens)]

    @property
    def tokens(self) -> list[int]:
        """The token of every node, the root excluded: level after level."""
        return [token for level in self.levels for token in level]

    @property
    def parents(self) -> list[int]:
        """The parent of every node; the root is 0, nodes count from 1."""
        num_below = len(self.tokens) - len(self.levels[0])
        return [*range(len(self.levels[0])), *range(num_below)]

    @property
    def tips(self) -> list[int]:
        """The newest node of every column; where there is the spine alone, the spine itself, root first."""
        num_nodes = len(self.tokens) + 1
        return list(range(num_nodes))[-len(self.levels[0]) - 1 :]

    def advance(self, root: int, choices: Sequence[int]) -> list[Tokens]:
        """Move one step: `choices` are what the target puts after the tips. Returns the n-grams that this makes."""
        stack = [*self.levels, list(choices)]
        if len(stack) < self.ngram_len:
            self.levels = [level[1:] for level in stack]
            return []
        self.levels = [stack[1][1:], *stack[2:]]
        return list(zip([root, *stack[0]], *stack[1:], strict=True))
