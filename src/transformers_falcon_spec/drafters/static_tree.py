"""Static draft trees while drafting: the stored one, its part within a step's limits, and children drawn for its nodes."""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.sampling import draw_distinct
from ..core.tree import DraftTree
from ..generation.candidates import DraftBudget


def tree_from_json(value: dict[str, Any]) -> DraftTree:
    """A stored tree; the same object for the same tree, so that what is planned for it is planned once and not for every call."""
    return _tree(json.dumps(value))


@lru_cache(maxsize=64)
def _tree(text: str) -> DraftTree:
    return DraftTree.from_json(json.loads(text))


@lru_cache(maxsize=256)
def fitted(tree: DraftTree, max_depth: int, num_nodes: int, is_chain: bool) -> DraftTree:
    """The part of `tree` within the limits; the tree itself where all of it is."""
    if max_depth >= int(tree.depths.max()) and num_nodes >= len(tree) and not is_chain:
        return tree
    return tree.pruned(max_depth, num_nodes, is_chain)


def parents_by_row(tree: DraftTree, depths: list[int]) -> Tensor:
    """Parents `[1 or rows, nodes]`: nodes deeper than a row's limit belong to nobody."""
    if min(depths) >= int(tree.depths.max()):
        return tree.parents
    return tree.parents.where(tree.depths <= torch.tensor(depths)[:, None], -1)


def draw_children(
    probs: Tensor, depths: list[int], num_children: int, budget: DraftBudget, rng: torch.Generator
) -> Tensor:
    """Distinct tokens `[rows, parents, num_children]`, drawn one after the other from `probs` `[rows, parents, vocab]`.

    Each parent draws anew, unless the budget brings noise: then that of `depths`, where the children of each parent stand.
    """
    if budget.noise is None:
        noise = torch.empty(probs.shape).exponential_(generator=rng).to(probs.device)
    else:
        noises = [budget.noise(row, depth) for row in range(len(probs)) for depth in depths]
        noise = torch.stack(noises).reshape(probs.shape).to(probs.device)
    children = draw_distinct(probs.flatten(0, 1), noise.flatten(0, 1), num_children)
    return children.reshape(*probs.shape[:2], -1)
