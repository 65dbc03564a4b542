"""The best draft tree for given acceptance, found in two ways that assume nothing: exact dynamic programme, and all trees there are.

A tree is as good as its expected acceptance length, the sum of the probabilities of its nodes. Any sibling ranks may be taken, also with gaps.
"""

import math
from collections.abc import Sequence
from functools import cache

Rates = Sequence[Sequence[float]]  # [depths][ranks]: probability of a rank at depth d + 1
Paths = frozenset[tuple[int, ...]]  # a tree as the ranks on the way to each node; the root is ()


def best_length(acceptance: Rates, num_nodes: int) -> float:
    """The highest expected length of a tree of at most `num_nodes` nodes: what each child's subtree gets is tried out."""
    num_depths, num_ranks = len(acceptance), len(acceptance[0])

    @cache
    def below(depth: int, rank: int, budget: int) -> float:
        """The best that children of ranks `rank` and more add to a node at `depth` whose own probability is 1."""
        if depth == num_depths or rank == num_ranks or budget == 0:
            return 0.0
        without = below(depth, rank + 1, budget)
        return max(
            [without]
            + [
                acceptance[depth][rank] * (1 + below(depth + 1, 0, spent - 1)) + below(depth, rank + 1, budget - spent)
                for spent in range(1, budget + 1)
            ]
        )

    return 1 + below(0, 0, num_nodes - 1)


def all_trees(num_depths: int, num_ranks: int, num_nodes: int) -> set[Paths]:
    """Every tree of `num_nodes` nodes, or the fullest one where fewer fit."""
    trees: set[Paths] = {frozenset({()})}
    for _ in range(num_nodes - 1):
        grown = {
            tree | {(*path, rank)}
            for tree in trees
            for path in tree
            for rank in range(num_ranks)
            if len(path) < num_depths and (*path, rank) not in tree
        }
        trees = grown or trees
    return trees


def length(acceptance: Rates, tree: Paths) -> float:
    """The expected length of a tree."""
    return sum(math.prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in tree)
