"""Reads a tree as a batch with one row for each path from root to leaf, for targets that cannot read a tree mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.verification import TokenTree


@dataclass(frozen=True, eq=False)
class PathBatch:
    """The paths of a one-row tree as the rows of a batch, in which shorter paths repeat their last node."""

    paths: list[tuple[int, ...]]  # the nodes of each path, root first
    nodes: Tensor  # [paths, longest] the node at each depth
    rows_and_depths: Tensor  # [2, nodes] for each node a path that holds it, and its depth

    @staticmethod
    @lru_cache(maxsize=64)
    def of(parents: tuple[int, ...], device: torch.device) -> "PathBatch":
        """The batch of all paths of a tree; filler nodes are left out."""
        tree = TokenTree(parents, ())
        leaves = [node for node, parent in enumerate(parents) if node not in parents and (node == 0 or parent >= 0)]
        paths = [tree.path_to(leaf) for leaf in leaves]
        longest = max(map(len, paths))
        nodes = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in paths], device=device)
        rows_and_depths = torch.zeros(2, len(parents), dtype=torch.long)  # fillers belong to nobody
        for row, path in enumerate(paths):
            rows_and_depths[:, list(path)] = torch.stack([torch.full((len(path),), row), torch.arange(len(path))])
        return PathBatch(paths, nodes, rows_and_depths.to(device))

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
