"""The static tree that the Falcon paper draws for Llama targets and two tokens a pass (arXiv 2412.12639, figure 6).

The figure draws how many children each node has, and the text says that m children are the m most likely tokens. The
authors' list (`kmask2_8layer_tree_3` of `models/choices.py`, Bestpay-inc/Falcon) differs in one point: the eight
children of the second token after the first have the sibling ranks 0 and 3 to 9 there; here they are 0 to 7.
"""

from collections.abc import Iterator

from ...core.tree import DraftTree

PAPER_DEPTH = 8
# Children of a node, which is named by the ranks on the way to it. A node that is not here has none.
_CHILDREN = {(): 20, (0,): 11, (1,): 4, (2,): 4, (0,) * 2: 7, (0, 1): 8, (0,) * 3: 10, (0,) * 4: 10}
_CHILDREN |= {(0,) * 5: 4, (0,) * 6: 4, (0,) * 7: 3}
# Below each of these, one token follows another down to the last depth.
_CHAINS = ((1, 0), (2, 0), (0, 1, 0), (0, 2), (0, 3), (0, 0, 0, 1))


def paper_tree(block_size: int = 2) -> DraftTree:
    """The tree of figure 6; its first nodes are the likeliest ones, so that a part of it is a good tree, too.

    The paper draws none for blocks of 3 and 4 tokens, but says that they reach depths of 6 and 8: for blocks of more
    than two tokens this is figure 6 as deep as whole blocks reach.
    """
    depth = PAPER_DEPTH // block_size * block_size or PAPER_DEPTH
    paths = sorted((path for path in _paths() if len(path) <= depth), key=lambda path: (sum(path) + len(path), path))
    indices = {path: index for index, path in enumerate([(), *paths])}
    parents = [indices[path[:-1]] for path in paths]
    return DraftTree.from_lists([-1, *parents], [-1, *(path[-1] for path in paths)])


def _paths() -> Iterator[tuple[int, ...]]:
    """The ranks on the way to each node but the root."""
    for parent, num_children in _CHILDREN.items():
        yield from ((*parent, rank) for rank in range(num_children))
    for start in _CHAINS:
        yield from ((*start, *(0,) * length) for length in range(1, PAPER_DEPTH - len(start) + 1))
