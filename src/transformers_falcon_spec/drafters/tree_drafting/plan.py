"""How a tree is drafted in blocks: which blocks each pass feeds, whom they see, and where every node takes its token.

Computed once for a tree and a block size. Knows nothing of weights or tokens. Source: arXiv 2412.12639, section 3.3.
"""

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.tree import DraftTree


@dataclass(frozen=True, eq=False)
class DraftPass:
    """One pass of the drafter. The first reads the committed rows; the others the blocks of one level, side by side.

    `by_block_offset` divides a pass into parts that hold the nodes of one offset.
    """

    nodes: Tensor  # [drafted] nodes that get their token from this pass
    sources: Tensor  # [3, drafted] for each its block, row in the block, and sibling rank
    num_ranks: int  # best tokens needed of a row
    parents: Tensor  # [parents] nodes whose children this pass drafts
    depths: tuple[int, ...]  # [parents] where those children stand
    lists: Tensor  # [2, parents] for each of them the block and the row that its children come from
    paths: Tensor  # [parents, offset + 1] nodes of its block that end at each parent, if all stand at one offset
    siblings: Tensor  # [2, drafted] the index of each node's parent among `parents`, and its own among its siblings
    num_siblings: int  # most children of a parent
    fed_nodes: Tensor  # [blocks, k] nodes whose tokens each block holds; empty in the first pass
    parent_blocks: Tensor  # [blocks] the block of the previous pass that each one continues
    tail_mask: Tensor  # [blocks * k, draft rows] which draft rows, of this and earlier passes, are seen

    by_block_offset: tuple["DraftPass", ...] = ()  # in ascending order

    def to(self, device: torch.device) -> "DraftPass":
        """The same pass with its tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved, by_block_offset=tuple(part.to(device) for part in self.by_block_offset))


@lru_cache(maxsize=256)
def draft_passes(tree: DraftTree, block_size: int, device: torch.device) -> tuple[DraftPass, ...]:
    """The passes that draft a one-row `tree` with blocks of `block_size`; trees are distinguished by identity."""
    passes = _planned(tree, block_size)
    return tuple(replace(each, by_block_offset=_parts(each, tree)).to(device) for each in passes)


def _parts(whole: DraftPass, tree: DraftTree) -> tuple[DraftPass, ...]:
    parts = []
    for offset in whole.sources[1].unique().tolist():
        chosen, parents = whole.sources[1] == offset, whole.lists[1] == offset
        new_indices = parents.cumsum(0) - 1
        siblings = whole.siblings[:, chosen]
        parts.append(
            replace(
                whole,
                nodes=whole.nodes[chosen],
                sources=whole.sources[:, chosen],
                num_ranks=int(whole.sources[2, chosen].max()) + 1,
                parents=whole.parents[parents],
                depths=tuple(depth for depth, is_in in zip(whole.depths, parents.tolist(), strict=True) if is_in),
                lists=whole.lists[:, parents],
                paths=torch.tensor([tree.path_to(node)[-offset - 1 :] for node in whole.parents[parents].tolist()]),
                siblings=torch.stack([new_indices[siblings[0]], siblings[1]]),
                num_siblings=int(siblings[1].max()) + 1,
            )
        )
    return tuple(parts)


def _planned(tree: DraftTree, block_size: int) -> list[DraftPass]:
    depths, ranks = tree.depths[0].tolist(), tree.ranks[0].tolist()
    passes: list[DraftPass] = []
    paths: list[tuple[int, ...]] = [()]  # what each block of this pass holds, root excluded
    lineages: list[tuple[int, ...]] = [()]  # indices, over all draft blocks, of the blocks each one sees
    parent_blocks: list[int] = []
    num_earlier = 0
    while len(passes) * block_size < max(depths):
        first_depth = len(passes) * block_size + 1
        drafted = [node for node in range(len(tree)) if first_depth <= depths[node] < first_depth + block_size]
        above = {node: tree.path_to(node)[1:first_depth] for node in drafted}  # what stands before each block
        sources = [[paths.index(above[node]) for node in drafted], [depths[node] - first_depth for node in drafted]]
        sources.append([ranks[node] for node in drafted])
        parent_of = tree.parents[0, drafted].tolist()
        parents = list(dict.fromkeys(parent_of))
        first_child = [parent_of.index(parent) for parent in parents]
        sibling_indices = [parent_of[:index].count(parent) for index, parent in enumerate(parent_of)]
        passes.append(
            DraftPass(
                nodes=torch.tensor(drafted),
                sources=torch.tensor(sources),
                num_ranks=max(sources[2]) + 1,
                parents=torch.tensor(parents),
                depths=tuple(depths[parent] + 1 for parent in parents),
                lists=torch.tensor([[row[child] for child in first_child] for row in sources[:2]]),
                paths=torch.zeros(len(parents), 0, dtype=torch.long),
                siblings=torch.tensor([[parents.index(parent) for parent in parent_of], sibling_indices]),
                num_siblings=max(sibling_indices) + 1,
                fed_nodes=torch.tensor([path[-block_size:] for path in paths], dtype=torch.long),
                parent_blocks=torch.tensor(parent_blocks, dtype=torch.long),
                tail_mask=_tail_mask(lineages, num_earlier, block_size),
            )
        )
        num_earlier += 0 if len(passes) == 1 else len(paths)
        last = [node for node in drafted if depths[node] == first_depth + block_size - 1]
        next_paths = [tree.path_to(node)[1:] for node in last if node in tree.parents]
        parent_blocks = [paths.index(path[: first_depth - 1]) for path in next_paths]
        lineages = [(*lineages[parent], num_earlier + i) for i, parent in enumerate(parent_blocks)]
        paths = next_paths
    return passes


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
