"""Reads a tree as a batch with one row for each path from root to leaf, for targets that cannot read a tree mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.tree import DraftTree


@dataclass(frozen=True, eq=False)
class PathBatch:
    """The paths of a one-row tree as the rows of a batch, in which shorter paths repeat their last node."""

    paths: list[tuple[int, ...]]  # the nodes of each path, root first
    nodes: Tensor  # [paths, longest] the node at each depth
    rows_and_depths: Tensor  # [2, nodes] for each node a path that holds it, and its depth

    @classmethod
    def of(cls, tree: DraftTree) -> "PathBatch":
        """The batch of all paths of the first row of `tree`; filler nodes are left out."""
        return _path_batch(tuple(tree.parents[0].tolist()), tree.parents.device)

    @property
    def longest(self) -> int:
        """Nodes of the longest path."""
        return self.nodes.shape[1]

    def by_node(self, states: Tensor) -> Tensor:
        """Turn states of the batch `[paths, longest, ...]` into states of the nodes `[1, nodes, ...]`."""
        rows, depths = self.rows_and_depths.to(states.device)
        return states[rows, depths][None]

    def row_of(self, path: Sequence[int]) -> int:
        """A row that begins with `path`."""
        return next(row for row, nodes in enumerate(self.paths) if nodes[: len(path)] == tuple(path))


@lru_cache(maxsize=64)
def _path_batch(parents: tuple[int, ...], device: torch.device) -> PathBatch:
    is_node = [node == 0 or parent >= 0 for node, parent in enumerate(parents)]
    tree = DraftTree(torch.tensor([parents]), torch.zeros(1, len(parents), dtype=torch.long))
    paths = [path for path in tree.paths if is_node[path[-1]]]
    longest = max(map(len, paths))
    nodes = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in paths], device=device)
    first = {node: (row, depth) for row, path in reversed(list(enumerate(paths))) for depth, node in enumerate(path)}
    rows_and_depths = [first.get(node, (0, 0)) for node in range(len(parents))]  # fillers belong to nobody
    return PathBatch(paths, nodes, torch.tensor(rows_and_depths, device=device).T)
