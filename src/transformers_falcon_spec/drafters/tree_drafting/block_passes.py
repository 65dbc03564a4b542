"""How a tree is drafted in blocks: which blocks each pass feeds, whom they see, and where every node takes its token.

Computed once for a tree and a block size. Knows nothing of weights or tokens. Source: arXiv 2412.12639, section 3.3.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.tree import DraftTree


@dataclass(frozen=True, eq=False)
class DraftedNodes:
    """Nodes that get their tokens from one pass, and the lists of tokens that they are taken from."""

    nodes: Tensor  # [drafted]
    sources: Tensor  # [2, drafted] for each the list of tokens that it is taken from, and its rank there
    num_ranks: int  # best tokens needed of a list
    parents: Tensor  # [parents] nodes whose children they are
    depths: tuple[int, ...]  # [parents] where those children stand
    blocks: Tensor  # [parents] the block that the children of each come from
    lists: Tensor  # [parents] the list that they are taken from
    paths: Tensor  # [parents, offset + 1] nodes of its block that end at each parent, where all stand at one offset
    siblings: Tensor  # [2, drafted] the index of each node's parent among `parents`, and its own among its siblings
    num_siblings: int  # most children of a parent


@dataclass(frozen=True, eq=False)
class DraftPass:
    """One pass of the drafter: the first reads the committed rows, the others blocks of one level, side by side."""

    drafted: DraftedNodes  # all nodes; their lists are the rows of the blocks, block after block
    by_block_offset: tuple[DraftedNodes, ...]  # those of each offset, ascending; each parent has a list of its own
    fed_nodes: Tensor  # [blocks, k] nodes whose tokens each block holds; empty in the first pass
    parent_blocks: Tensor  # [blocks] the block of the previous pass that each one continues
    tail_mask: Tensor  # [blocks * k, draft rows] which draft rows, of this and earlier passes, are seen


@lru_cache(maxsize=256)
def draft_passes(tree: DraftTree, block_size: int, device: torch.device) -> tuple[DraftPass, ...]:
    """The passes that draft a one-row `tree` with blocks of `block_size`; trees are distinguished by identity."""
    depths = tree.depths[0].tolist()
    deepest = max(depths)
    passes: list[DraftPass] = []
    paths: list[tuple[int, ...]] = [()]  # the nodes down to the end of each block that is fed, root excluded
    lineages: list[tuple[int, ...]] = [()]  # indices, over all draft blocks, of the blocks each one sees
    parent_blocks: list[int] = []
    num_earlier = 0
    with device:  # where all tensors are made
        while len(passes) * block_size < deepest:
            num_above = len(passes) * block_size
            drafted = [node for node, depth in enumerate(depths) if num_above < depth <= num_above + block_size]

            by_block_offset = []
            for depth in range(num_above + 1, min(num_above + block_size, deepest) + 1):
                nodes = [node for node in drafted if depths[node] == depth]
                by_block_offset.append(_drafted(nodes, tree, paths, block_size=None))

            passes.append(
                DraftPass(
                    _drafted(drafted, tree, paths, block_size),
                    tuple(by_block_offset),
                    fed_nodes=torch.tensor([path[-block_size:] for path in paths], dtype=torch.long),
                    parent_blocks=torch.tensor(parent_blocks, dtype=torch.long),
                    tail_mask=_tail_mask(lineages, num_earlier, block_size),
                )
            )

            num_earlier += len(parent_blocks)
            parent_blocks = []
            next_paths = []
            next_lineages = []
            for node in nodes:
                if node in tree.parents:
                    path = tree.path_to(node)[1:]
                    parent = paths.index(path[:num_above])
                    next_lineages.append((*lineages[parent], num_earlier + len(parent_blocks)))
                    next_paths.append(path)
                    parent_blocks.append(parent)

            paths = next_paths
            lineages = next_lineages

    return tuple(passes)


def _drafted(nodes: list[int], tree: DraftTree, paths: list[tuple[int, ...]], block_size: int | None) -> DraftedNodes:
    """These nodes, in a pass that is fed blocks with such `paths`.

    Their lists are those of blocks of `block_size`; without one, all stand at one offset, and each parent has its own.
    """
    ranks = tree.ranks[0].tolist()
    num_above = len(paths[0])
    parents: list[int] = []
    blocks: list[int] = []
    lists: list[int] = []
    above: list[tuple[int, ...]] = []  # the nodes down to each parent
    num_children = Counter[int]()
    siblings = []
    sources = []
    for node in nodes:
        *path, parent, _ = tree.path_to(node)
        if parent not in parents:
            path = [*path, parent]
            block = paths.index(tuple(path[1 : num_above + 1]))
            own = len(parents)
            parents.append(parent)
            blocks.append(block)
            lists.append(own if block_size is None else block * block_size + len(path) - num_above - 1)
            above.append(tuple(path))

        index = parents.index(parent)
        sources.append((lists[index], ranks[node]))
        siblings.append((index, num_children[parent]))
        num_children[parent] += 1

    in_blocks = [path[num_above:] if block_size is None else () for path in above]
    return DraftedNodes(
        nodes=torch.tensor(nodes),
        sources=torch.tensor(sources).T,
        num_ranks=max(ranks[node] for node in nodes) + 1,
        parents=torch.tensor(parents),
        depths=tuple(map(len, above)),
        blocks=torch.tensor(blocks),
        lists=torch.tensor(lists),
        paths=torch.tensor(in_blocks, dtype=torch.long),
        siblings=torch.tensor(siblings).T,
        num_siblings=max(num_children.values()),
    )


def _tail_mask(lineages: list[tuple[int, ...]], num_earlier: int, block_size: int) -> Tensor:
    """Rows of a block see the draft rows of the blocks in its lineage, its own included."""
    if lineages == [()]:
        return torch.zeros(0, 0, dtype=torch.bool)

    mask = torch.zeros(len(lineages), num_earlier + len(lineages), dtype=torch.bool)
    for block, lineage in enumerate(lineages):
        mask[block, list(lineage)] = True

    return mask.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)


def tree_from_json(value: dict[str, Any]) -> DraftTree:
    """A stored tree; equal trees are one object, so that passes are planned once and not for every call."""
    return _tree(json.dumps(value))


@lru_cache(maxsize=64)
def _tree(text: str) -> DraftTree:
    return DraftTree.from_json(json.loads(text))


@lru_cache(maxsize=64)
def chain(depth: int) -> DraftTree:
    """The chain of so many tokens, the same object for every call."""
    return DraftTree.chain(depth)


@lru_cache(maxsize=256)
def fitted(tree: DraftTree, max_depth: int, num_nodes: int, is_chain: bool) -> DraftTree:
    """The part of `tree` within the limits; the tree itself where all of it is."""
    if max_depth >= int(tree.depths.max()) and num_nodes >= len(tree) and not is_chain:
        return tree

    return tree.pruned(max_depth, num_nodes, is_chain)


@lru_cache(maxsize=256)
def placed(tree: DraftTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents and depths `[1, nodes]` of a tree on a device."""
    return tree.parents.to(device), tree.depths.to(device)
