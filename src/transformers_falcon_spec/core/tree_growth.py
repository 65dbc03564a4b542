"""Trees that grow while they are drafted: the likeliest nodes get children, and the likeliest nodes of all are kept.

Every row has a tree of its own, and nothing loops over nodes. The caller says which nodes get children, so that a pass
of the drafter may give any number of tokens. Source: arXiv 2406.16858, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tree import DraftTree

# Given an offset in blocks, nodes and the block of each: token ids and log-probabilities of what follows them.
Children = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Level:
    """All nodes of a depth: the children of some nodes one depth above, the same number each."""

    parents: Tensor  # [rows, parents]
    token_ids: Tensor  # [rows, parents * children]
    log_node_probs: Tensor  # [rows, parents * children]
    num_children: int


@dataclass(frozen=True)
class _Layout:
    """What the number of nodes at each depth alone says of each node."""

    depths: Tensor  # [nodes]
    ranks: Tensor  # [nodes] among siblings; -1 at the root
    parents: Tensor  # [nodes] index of the parent among the parents of all levels


@lru_cache(maxsize=256)
def _layout_of(levels: tuple[tuple[int, int], ...], device: torch.device) -> _Layout:
    """The layout of levels with these numbers of parents and of children of each; kept for later steps."""
    depths: list[int] = []
    ranks = [-1]  # of the root
    parents: list[int] = []
    num_before = 0

    for depth, (num_parents, num_children) in enumerate(levels):
        depths += [depth] * (num_parents * num_children)
        ranks += list(range(num_children)) * num_parents if depth else []
        parents += [num_before + index for index in range(num_parents) for _ in range(num_children)]
        num_before += num_parents

    return _Layout(*(torch.tensor(values, device=device) for values in (depths, ranks, parents)))


class TreeGrowth:
    """A tree that grows depth by depth: all nodes considered so far, the root first, a child after its parent.

    The probability of a node is the product of the drafter's probabilities along its path. A node is never likelier
    than its parent, so any number of the likeliest nodes is a tree. The roots are the newest committed tokens, and
    nodes of a row that are deeper than its entry of `max_depths` never enter its tree.
    """

    def __init__(self, roots: Int[Tensor, "rows 1"], max_depths: Int[Tensor, " rows"]) -> None:
        log_probs = torch.zeros(roots.shape, dtype=torch.float, device=roots.device)
        self._levels = [_Level(torch.full_like(roots, -1), roots, log_probs, 1)]
        self._device = roots.device
        self._max_depths = max_depths.to(roots.device)[:, None]
        self.layouts: dict[Any, _Layout] = {}  # in use; work that is repeated on their tensors must keep them
        self._num_above = 0  # nodes of all levels but the newest
        self._places = torch.zeros_like(roots)  # of the nodes that get children, in the newest level
        self.origins = self._places  # of the same nodes in `expand_blocks`: the place of each one's parent among those
        # that got children one offset before
        self._joined: dict[str, Tensor] = {}

    @property
    def token_ids(self) -> Int[Tensor, "rows nodes"]:
        """The token at each node."""
        return self._all("token_ids")

    @property
    def log_node_probs(self) -> Float[Tensor, "rows nodes"]:
        """The logarithm of each node's probability; -inf at nodes that must not enter a tree."""
        if "allowed" not in self._joined:
            is_too_deep = self.depths > self._max_depths
            self._joined["allowed"] = self._all("log_node_probs").masked_fill(is_too_deep, -torch.inf)
        return self._joined["allowed"]

    @property
    def parents(self) -> Int[Tensor, "rows nodes"]:
        """The parent of each node, -1 at the root."""
        return self._all("parents")[:, self._layout.parents]

    @property
    def depths(self) -> Int[Tensor, " nodes"]:
        """The depth of each node, in all rows alike."""
        return self._layout.depths

    @property
    def _layout(self) -> _Layout:
        levels = tuple((level.parents.shape[1], level.num_children) for level in self._levels)
        if levels not in self.layouts:
            self.layouts[levels] = _layout_of(levels, self._device)

        return self.layouts[levels]

    def _likeliest(self, num_nodes: int) -> Int[Tensor, "rows nodes"]:
        if "order" not in self._joined:
            self._joined["order"] = _likeliest_first(self.log_node_probs)

        return self._joined["order"][:, :num_nodes]

    def _all(self, name: str) -> Tensor:
        if name not in self._joined:
            self._joined[name] = torch.cat([getattr(level, name) for level in self._levels], dim=1)

        return self._joined[name]

    def expand(
        self,
        parents: Int[Tensor, "rows parents"],
        token_ids: Int[Tensor, "rows parents children"],
        log_probs: Float[Tensor, "rows parents children"],
    ) -> None:
        """Give some of the newest nodes children, best first, with the drafter's probabilities; NaN counts as 0."""
        self._expand(parents, parents - self._num_above, token_ids, log_probs)

    def _expand(self, parents: Tensor, places: Tensor, token_ids: Tensor, log_probs: Tensor) -> None:
        """The same of nodes that stand at these places of the newest level."""
        newest = self._levels[-1]
        above = newest.log_node_probs.gather(1, places)[..., None]
        log_node_probs = (above + log_probs.to(above).clamp(max=0)).flatten(1)
        log_node_probs = log_node_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # sorted, NaN is before the root

        self._num_above += newest.token_ids.shape[1]
        self._levels.append(
            _Level(parents, token_ids.flatten(1).to(newest.token_ids), log_node_probs, token_ids.shape[-1])
        )
        self._joined = {}

    def expand_blocks(
        self,
        ends: Int[Tensor, "rows blocks"],
        block_size: int,
        children: Children,
        num_kept: int,
        pays: Callable[[], bool] | None = None,
    ) -> tuple[Int[Tensor, "rows nodes"], Int[Tensor, "rows nodes"]] | None:
        """Grow the tree by whole blocks below `ends`: at each offset the likeliest nodes get `children`, best first.

        Returns the likeliest `num_kept` nodes of the last offset, and the block of each; None where the blocks end
        before, because `pays` says of the newest nodes that no deeper ones are wanted.
        """
        nodes = ends
        self._places = ends - self._num_above
        blocks = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)

        for offset in range(block_size):
            if offset and pays is not None and not pays():
                return None

            token_ids, log_probs = children(offset, nodes, blocks)
            self._expand(nodes, self._places, token_ids, log_probs)
            width = token_ids.shape[-1]
            self._places = self._best_places(width if offset < block_size - 1 else num_kept)
            self.origins = self._places // width
            nodes = self._places + self._num_above
            blocks = blocks.gather(1, self.origins)

        return nodes, blocks

    @property
    def newest_tokens(self) -> Int[Tensor, "rows nodes"]:
        """The tokens at the nodes that get children in `expand_blocks`."""
        return self._levels[-1].token_ids.gather(1, self._places)

    def path_up(self, nodes: Int[Tensor, "rows nodes"], num: int) -> Int[Tensor, "rows nodes num"]:
        """The `num` nodes that end at each node, itself the last."""
        path = [nodes]
        parents = self.parents
        while len(path) < num:
            path.append(parents.gather(1, path[-1]))

        return torch.stack(path[::-1], dim=-1)

    def best_newest(self, num: int) -> Int[Tensor, "rows nodes"]:
        """The likeliest `num` of the newest nodes, or all if there are fewer, in the order in which they stand."""
        return self._best_places(num) + self._num_above

    def _best_places(self, num: int) -> Tensor:
        """Where they stand in their level."""
        newest = self._levels[-1].log_node_probs
        if num >= newest.shape[1]:
            return torch.arange(newest.shape[1], device=self._device).expand_as(newest)
        return _likeliest_first(newest)[:, :num].sort(dim=1).values

    def best_tree_size(self, prices: Float[Tensor, " nodes"], weights: Float[Tensor, " depths"]) -> tuple[int, float]:
        """The number of likeliest nodes that brings most above its price, `prices[n]` for n + 1, and its tokens."""
        order = self._likeliest(len(prices))
        gains = self.log_node_probs.gather(1, order).exp()
        gains = gains * weights.to(gains.device)[self.depths[order].clamp(max=len(weights) - 1)]

        net = gains.sum(0).cumsum(0) - len(order) - prices.to(gains.device)[: order.shape[1]]
        best, index = net.max(0)
        return int(index) + 1, float(best)

    def newest_are_kept(self, num_nodes: int) -> bool:
        """Whether the likeliest `num_nodes` of any row hold one of the newest nodes."""
        return bool((self._likeliest(num_nodes) >= self._num_above).any())

    def expected_by_depth(self, num_nodes: int, max_depth: int) -> Float[Tensor, " depths"]:
        """The expected tokens of all rows at each depth, root first, of trees of the likeliest `num_nodes`."""
        kept = self._likeliest(num_nodes)
        node_probs = self.log_node_probs.gather(1, kept).exp()
        depths = self.depths[kept]
        return node_probs.new_zeros(max_depth + 1).index_add(0, depths.flatten(), node_probs.flatten())

    def best(self, num_nodes: int) -> tuple[Int[Tensor, "rows nodes"], DraftTree]:
        """Tokens and tree of the likeliest `num_nodes` of each row, likeliest first; rows with fewer end in fillers.

        So the first nodes of a tree are the tree of so many nodes.
        """
        kept = self._likeliest(num_nodes)
        is_node = self.log_node_probs.gather(1, kept) > -torch.inf
        above = self.parents.gather(1, kept)

        indices = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        index_of = torch.zeros_like(self.token_ids).scatter(1, kept, indices)  # in the tree, of all nodes considered
        parents = index_of.gather(1, above.clamp(min=0)).where(is_node & (above >= 0), -1)
        ranks = self._layout.ranks[kept].where(is_node, -1)
        return self.token_ids.gather(1, kept), DraftTree(parents, ranks)


def _likeliest_first(log_node_probs: Float[Tensor, "rows nodes"]) -> Int[Tensor, "rows nodes"]:
    return log_node_probs.sort(dim=1, descending=True, stable=True).indices
