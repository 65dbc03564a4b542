"""Trees that grow while they are drafted: the likeliest nodes get children, and the likeliest nodes of all are kept.

Every row has a tree of its own, and nothing loops over nodes. The caller says which nodes get children, so that a pass
of the drafter may give any number of tokens. Source: arXiv 2406.16858, section 4.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Given an offset in blocks, nodes and the block of each: token ids and log-probabilities of what follows them.
Children = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class TreeGrowth:
    """A tree that grows depth by depth: all nodes considered so far, the root first, a child after its parent.

    The probability of a node is the product of the drafter's probabilities along its path. A node is never likelier
    than its parent, so any number of the likeliest nodes is a tree. The roots are the newest committed tokens, and
    nodes of a row that are deeper than its entry of `max_depths` never enter its tree.
    """

    def __init__(self, roots: Int[Tensor, "rows 1"], max_depths: Int[Tensor, " rows"]) -> None:
        self.token_ids = roots  # [rows, nodes]
        self.parents = torch.full_like(roots, -1)  # [rows, nodes]; -1 at the root
        # [rows, nodes] the logarithm of each node's probability; -inf at nodes that must not enter a tree
        self.log_node_probs = torch.zeros(roots.shape, dtype=torch.float, device=roots.device)
        self.depths = torch.zeros_like(roots[0])  # [nodes], in all rows alike

        self._max_depths = max_depths.to(roots.device)[:, None]
        self._depth = 0  # of the newest nodes
        self._first_newest = 0
        # of the nodes that get children in `expand_blocks`: each one's parent among those that got some before
        self.origins = torch.zeros_like(roots)
        self._order: Tensor | None = None  # [rows, nodes] the likeliest first, once somebody asks

    def expand(
        self,
        parents: Int[Tensor, "rows parents"],
        token_ids: Int[Tensor, "rows parents children"],
        log_probs: Float[Tensor, "rows parents children"],
    ) -> None:
        """Give some of the newest nodes children, best first, with the drafter's probabilities; NaN counts as 0."""
        self._depth += 1
        self._first_newest = self.token_ids.shape[1]
        self._order = None

        above = self.log_node_probs.gather(1, parents)[..., None]
        log_node_probs = (above + log_probs.to(above).clamp(max=0)).flatten(1)
        log_node_probs = log_node_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # sorted, NaN is before the root
        log_node_probs = log_node_probs.masked_fill(self._depth > self._max_depths, -torch.inf)

        new_ids = token_ids.flatten(1).to(self.token_ids)
        above_each = parents[..., None].expand_as(token_ids).flatten(1)
        self.token_ids = torch.cat([self.token_ids, new_ids], dim=1)
        self.parents = torch.cat([self.parents, above_each], dim=1)
        self.log_node_probs = torch.cat([self.log_node_probs, log_node_probs], dim=1)
        self.depths = torch.cat([self.depths, torch.full_like(new_ids[0], self._depth)])

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
        blocks = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)

        for offset in range(block_size):
            if offset and pays is not None and not pays():
                return None

            token_ids, log_probs = children(offset, nodes, blocks)
            self.expand(nodes, token_ids, log_probs)
            width = token_ids.shape[-1]
            nodes = self.best_newest(width if offset < block_size - 1 else num_kept)
            self.origins = (nodes - self._first_newest) // width
            blocks = blocks.gather(1, self.origins)

        return nodes, blocks

    def path_up(self, nodes: Int[Tensor, "rows nodes"], num: int) -> Int[Tensor, "rows nodes num"]:
        """The `num` nodes that end at each node, itself the last."""
        path = [nodes]
        while len(path) < num:
            path.append(self.parents.gather(1, path[-1]))

        return torch.stack(path[::-1], dim=-1)

    def best_newest(self, num: int) -> Int[Tensor, "rows nodes"]:
        """The likeliest `num` of the newest nodes, or all if there are fewer, in the order in which they stand."""
        newest = self.log_node_probs[:, self._first_newest :]
        if num >= newest.shape[1]:
            return torch.arange(newest.shape[1], device=newest.device).expand_as(newest) + self._first_newest

        best = _likeliest_first(newest)[:, :num]
        return best.sort(dim=1).values + self._first_newest

    def likeliest(self, num_nodes: int) -> Int[Tensor, "rows nodes"]:
        """The likeliest nodes, likeliest first."""
        if self._order is None:
            self._order = _likeliest_first(self.log_node_probs)
        return self._order[:, :num_nodes]

    def best_tree_size(self, prices: Float[Tensor, " nodes"], weights: Float[Tensor, " depths"]) -> tuple[int, float]:
        """The number of likeliest nodes that brings most above its price, `prices[n]` for n + 1, and its tokens."""
        order = self.likeliest(len(prices))
        gains = self.log_node_probs.gather(1, order).exp()
        gains = gains * weights.to(gains.device)[self.depths[order].clamp(max=len(weights) - 1)]

        net = gains.sum(0).cumsum(0) - len(order) - prices.to(gains.device)[: order.shape[1]]
        best, index = net.max(0)
        return int(index) + 1, float(best)

    def newest_are_kept(self, num_nodes: int) -> bool:
        """Whether the likeliest `num_nodes` of any row hold one of the newest nodes."""
        return bool((self.likeliest(num_nodes) >= self._first_newest).any())

    def expected_by_depth(self, num_nodes: int, max_depth: int) -> Float[Tensor, " depths"]:
        """The expected tokens of all rows at each depth, root first, of trees of the likeliest `num_nodes`."""
        kept = self.likeliest(num_nodes)
        node_probs = self.log_node_probs.gather(1, kept).exp()
        depths = self.depths[kept]
        return node_probs.new_zeros(max_depth + 1).index_add(0, depths.flatten(), node_probs.flatten())

    def best(self, num_nodes: int) -> tuple[Int[Tensor, "rows nodes"], Int[Tensor, "rows nodes"]]:
        """Tokens and parents of the likeliest `num_nodes` of each row, likeliest first; then fillers.

        So the first nodes of a tree are the tree of so many nodes.
        """
        kept = self.likeliest(num_nodes)
        is_node = self.log_node_probs.gather(1, kept) > -torch.inf
        above = self.parents.gather(1, kept)

        indices = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        index_of = torch.zeros_like(self.token_ids).scatter(1, kept, indices)  # in the tree, of all nodes considered
        parents = index_of.gather(1, above.clamp(min=0)).where(is_node & (above >= 0), -1)
        return self.token_ids.gather(1, kept), parents


def _likeliest_first(log_node_probs: Float[Tensor, "rows nodes"]) -> Int[Tensor, "rows nodes"]:
    return log_node_probs.sort(dim=1, descending=True, stable=True).indices
