"""Trees that grow while they are drafted: the likeliest nodes are expanded, and the likeliest of all are kept.

Tensors alone, every row with a tree of its own, no loop over nodes. How many tokens a pass of the drafter gives does not
matter: whoever drafts says which nodes get children. Source: arXiv 2406.16858, section 4.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tree import DraftTree

# Given a place of blocks, nodes and the block that each stands in: what follows the nodes there.
Children = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class TreeGrowth:
    """All nodes considered so far, node 0 the root; a child comes after its parent.

    The chance of a node is the product of the drafter's probabilities along its path. It falls from parent to child, so
    the likeliest nodes of all always hold their ancestors, and any number of them is a tree.

    Args:
        roots (`torch.Tensor` of shape `(rows, 1)`): The newest committed tokens.
        max_depths (`torch.Tensor` of shape `(rows,)`): Nodes of a row that are deeper than this never enter its tree.

    Example:

    ```python
    >>> growth = TreeGrowth(torch.tensor([[5]]), max_depths=torch.tensor([2]))
    >>> growth.expand(torch.tensor([[0]]), torch.tensor([[[7, 8]]]), torch.tensor([[[0.6, 0.3]]]).log())
    >>> best = growth.best_newest(1)  # node 1
    >>> growth.expand(best, torch.tensor([[[9, 4]]]), torch.tensor([[[0.7, 0.2]]]).log())
    >>> token_ids, tree = growth.best(num_nodes=4)
    >>> token_ids.tolist(), tree.parents.tolist()
    ([[5, 7, 8, 9]], [[-1, 0, 0, 1]])

    ```
    """

    def __init__(self, roots: Int[Tensor, "rows 1"], max_depths: Int[Tensor, " rows"]) -> None:
        self.token_ids = roots
        self.parents = torch.full_like(roots, -1)
        self.ranks = torch.full_like(roots, -1)
        self.depths = torch.zeros_like(roots)
        self.log_chances = torch.zeros(roots.shape, dtype=torch.float, device=roots.device)  # -inf: must not enter
        self._max_depths = max_depths.to(roots.device)
        self.num_newest = 1

    def expand(
        self,
        parents: Int[Tensor, "rows parents"],
        token_ids: Int[Tensor, "rows parents children"],
        log_probs: Float[Tensor, "rows parents children"],
    ) -> None:
        """Give nodes of each row children, best first; they become the newest nodes.

        Args:
            parents (`torch.Tensor` of shape `(rows, parents)`): Nodes without children so far.
            token_ids (`torch.Tensor` of shape `(rows, parents, children)`): The children's tokens; siblings differ.
            log_probs (`torch.Tensor` of shape `(rows, parents, children)`): What the drafter gives them after their parent.
        """
        num_children = token_ids.shape[-1]
        self.num_newest = parents.shape[1] * num_children
        parents = parents.repeat_interleave(num_children, dim=1)
        depths = self.depths.gather(1, parents) + 1
        chances = self.log_chances.gather(1, parents) + log_probs.flatten(1).to(self.log_chances).clamp(max=0)
        chances = chances.masked_fill(depths > self._max_depths[:, None], -torch.inf)
        ranks = torch.arange(num_children, device=parents.device).repeat(token_ids.shape[1]).expand_as(parents)
        self.token_ids = torch.cat([self.token_ids, token_ids.flatten(1).to(self.token_ids)], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.ranks = torch.cat([self.ranks, ranks], dim=1)
        self.depths = torch.cat([self.depths, depths], dim=1)
        self.log_chances = torch.cat([self.log_chances, chances], dim=1)

    def expand_blocks(
        self,
        ends: Int[Tensor, "rows blocks"],
        num_places: int,
        children: Children,
        num_kept: int,
    ) -> tuple[Int[Tensor, "rows nodes"], Int[Tensor, "rows nodes"]]:
        """Give nodes what follows in blocks whose places were drafted at once.

        At each place the likeliest nodes get children, as many as each has.

        Args:
            ends (`torch.Tensor` of shape `(rows, blocks)`): The node that each block follows.
            num_places (`int`): Tokens of a block.
            children (`Callable`): Given a place, nodes `[rows, nodes]` and the block that each stands in, ids and log-probabilities
                `[rows, nodes, children]` of what follows them there, best first.
            num_kept (`int`): How many nodes of the last place are wanted.

        Returns:
            The likeliest `num_kept` nodes of the last place, and for each the block that it stands in.
        """
        nodes, blocks = ends, torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
        for place in range(num_places):
            start, (token_ids, log_probs) = self.token_ids.shape[1], children(place, nodes, blocks)
            self.expand(nodes, token_ids, log_probs)
            width = token_ids.shape[-1]
            nodes = self.best_newest(width if place < num_places - 1 else num_kept)
            blocks = blocks.gather(1, (nodes - start) // width)
        return nodes, blocks

    def path_up(self, nodes: Int[Tensor, "rows nodes"], num: int) -> Int[Tensor, "rows nodes num"]:
        """The `num` nodes that end at each node, itself the last."""
        path = [nodes]
        while len(path) < num:
            path.append(self.parents.gather(1, path[-1]))
        return torch.stack(path[::-1], dim=-1)

    def best_newest(self, num: int) -> Int[Tensor, "rows nodes"]:
        """The likeliest `num` of the newest nodes, or all if there are fewer, in the order in which they stand."""
        start = self.token_ids.shape[1] - self.num_newest
        return _likeliest(self.log_chances[:, start:], num) + start

    def worth(self, prices: Float[Tensor, " nodes"], weights: Float[Tensor, " depths"]) -> tuple[int, float]:
        """How many of the likeliest nodes to keep, of all rows alike, and what they bring above their prices.

        Args:
            prices (`torch.Tensor` of shape `(nodes,)`): Price of the first n + 1 nodes, in tokens.
            weights (`torch.Tensor` of shape `(depths,)`): Factor of chances, by depth; deeper nodes take the last one.
        """
        order = _likeliest_first(self.log_chances)[:, : len(prices)]
        gains = self.log_chances.gather(1, order).exp()
        gains = gains * weights.to(gains.device)[self.depths.gather(1, order).clamp(max=len(weights) - 1)]
        net = gains.sum(0).cumsum(0) - len(order) - prices.to(gains.device)[: order.shape[1]]
        best, place = net.max(0)
        return int(place) + 1, float(best)

    def expected_by_depth(self, num_nodes: int, max_depth: int) -> Float[Tensor, " depths"]:
        """Tokens expected to be kept at each depth by a tree of the likeliest `num_nodes`, of all rows; the root's first."""
        kept = _likeliest(self.log_chances, num_nodes)
        chances, depths = self.log_chances.gather(1, kept).exp(), self.depths.gather(1, kept)
        return chances.new_zeros(max_depth + 1).index_add(0, depths.flatten(), chances.flatten())

    def best_chances(self, num_nodes: int) -> Float[Tensor, "rows nodes"]:
        """The chance of each node of [`TreeGrowth.best`] given that its parent is right; 1 at the root, 0 at fillers."""
        kept = _likeliest(self.log_chances, num_nodes)
        above = self.log_chances.gather(1, self.parents.gather(1, kept).clamp(min=0))
        chances = (self.log_chances.gather(1, kept) - above).exp()
        return chances.nan_to_num(nan=0.0)  # below a node that must not enter: -inf less -inf

    def best(self, num_nodes: int) -> tuple[Int[Tensor, "rows nodes"], DraftTree]:
        """Tokens and tree of the likeliest `num_nodes` of each row, root included; rows with fewer end in fillers."""
        kept = _likeliest(self.log_chances, num_nodes)
        is_node = self.log_chances.gather(1, kept) > -torch.inf
        places = torch.zeros_like(self.parents).scatter(
            1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        )
        above = self.parents.gather(1, kept)
        parents = places.gather(1, above.clamp(min=0)).where(is_node & (above >= 0), -1)
        ranks = self.ranks.gather(1, kept).where(is_node, -1)
        return self.token_ids.gather(1, kept), DraftTree(parents, ranks)


def _likeliest(log_chances: Float[Tensor, "rows nodes"], num: int) -> Int[Tensor, "rows kept"]:
    """Indices of the `num` highest of each row, ascending; of equals the first, which may be an ancestor of the others."""
    return _likeliest_first(log_chances)[:, :num].sort(dim=1).values


def _likeliest_first(log_chances: Float[Tensor, "rows nodes"]) -> Int[Tensor, "rows nodes"]:
    """Indices by falling chance; of equals the first comes first."""
    return log_chances.sort(dim=1, descending=True, stable=True).indices
