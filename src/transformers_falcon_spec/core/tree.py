"""The shapes of draft trees, as the parent of each node, and trees that grow while they are drafted.

Where trees grow the likeliest nodes get children, and the likeliest nodes of all are kept. Every row has a tree of its
own, and nothing loops over nodes. The caller says which nodes get children, so that a pass of the drafter may give any
number of tokens. Source: arXiv 2406.16858, section 4.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DraftTreeError
from .verification import TokenTree

MAX_NODES = 512  # per row; more would cost any target more than it can bring

# Given an offset in blocks, nodes and the block of each: token ids and log-probabilities of what follows them.
Children = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The shape of a draft: for each node the index of its parent, and which of the parent's best tokens it takes.

    Node 0 is the root, the newest token of the text; its parent is -1. A parent comes before its child. Rows with
    fewer nodes than others end in filler nodes, whose parent is -1 too. [`DraftTree.from_lists`] checks its lists.

    Example:

    ```python
    >>> tree = DraftTree.from_lists(parents=[-1, 0, 0, 1], ranks=[-1, 0, 1, 0])
    >>> tree.depths.tolist(), tree.path_to(3)
    ([[0, 1, 1, 2]], (0, 1, 3))

    ```
    """

    parents: Int[Tensor, "rows nodes"]  # index of each node's parent
    ranks: Int[Tensor, "rows nodes"]  # 0 for the parent's most likely token, 1 for the second; -1 without a parent

    @classmethod
    def from_lists(cls, parents: Sequence[int], ranks: Sequence[int] | None = None) -> "DraftTree":
        """A checked tree of one row; without `ranks` siblings are ranked in the order in which they stand.

        Raises:
            [`DraftTreeError`]: the root is not first, a node precedes its parent, or siblings share a rank.
        """
        if list(parents[:1]) != [-1]:
            raise DraftTreeError(f"`parents` must start with -1, the root, but it starts with {list(parents[:1])}.")

        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise DraftTreeError(
                    f"Node {node} must come after its parent, but its parent is {parent}. Order nodes from the root "
                    "down."
                )

        if ranks is None:
            ranks = [-1, *(list(parents[:node]).count(parents[node]) for node in range(1, len(parents)))]

        ranks = list(ranks)
        if len(ranks) != len(parents):
            raise DraftTreeError(f"`ranks` needs one entry for each node: {len(parents)}, but it has {len(ranks)}.")

        if ranks[0] != -1 or any(rank < 0 for rank in ranks[1:]):
            raise DraftTreeError(
                f"`ranks` must be -1 at the root and 0 or more elsewhere, but they are {list(ranks)}."
            )

        (parent, rank), num = Counter(zip(parents, ranks, strict=True)).most_common(1)[0]
        if num > 1:
            raise DraftTreeError(f"Siblings must differ in rank, but node {parent} has two children of rank {rank}.")

        return cls(torch.tensor([list(parents)]), torch.tensor([list(ranks)]))

    @classmethod
    def from_json(cls, value: Any) -> "DraftTree":
        """The tree stored by [`DraftTree.to_json`], checked."""
        stored = value.get("parents") if isinstance(value, dict) else None
        if isinstance(stored, list) and len(stored) > MAX_NODES:  # before anything is made of them
            raise DraftTreeError(
                f"A stored tree must have at most {MAX_NODES} nodes, but it has {len(stored)}. Take a smaller one."
            )

        lists = list(value.values()) if isinstance(value, dict) and set(value) == {"parents", "ranks"} else [None]
        if not all(isinstance(each, list) and all(type(entry) is int for entry in each) for each in lists):
            raise DraftTreeError(
                "A stored tree must be an object with `parents` and `ranks`, lists of whole numbers, "
                f"but it is {value!r:.80}."
            )

        return cls.from_lists(value["parents"], value["ranks"])

    def to_json(self) -> dict[str, list[int]]:
        """Lists for a config file; one row only."""
        return {"parents": self.parents[0].tolist(), "ranks": self.ranks[0].tolist()}

    @classmethod
    def chain(cls, num_draft_tokens: int) -> "DraftTree":
        """One token after another, each the most likely one."""
        return cls.from_lists(range(-1, num_draft_tokens))

    @classmethod
    def best_first(cls, acceptance: Float[Tensor, "depths ranks"], num_nodes: int) -> "DraftTree":
        """The tree of the `num_nodes` likeliest nodes; `acceptance[d, r]` is for rank `r` at depth `d + 1`.

        Nodes come in order of their probability. Where acceptance falls with rank, the first n of them are the tree
        with the highest expected acceptance length of all trees of n nodes.

        Raises:
            [`DraftTreeError`]: `num_nodes` is 0 or less, or `acceptance` holds something that is no probability.
        """
        if not acceptance.numel() or not ((acceptance >= 0) & (acceptance <= 1)).all():
            raise DraftTreeError(
                "`acceptance` must hold probabilities from 0 to 1 of at least one depth and rank, but it is "
                f"{acceptance.tolist()!s:.80}."
            )

        if num_nodes < 1:
            raise DraftTreeError(f"`num_nodes` must be at least 1, for the root, but it is {num_nodes}.")

        parents = [-1]
        ranks = [-1]
        node_probs = [1.0]
        depths = [0]
        open_children: dict[tuple[int, int], float] = {}

        while len(parents) < num_nodes:
            newest = len(parents) - 1
            if depths[newest] < acceptance.shape[0]:
                open_children[newest, 0] = node_probs[newest] * float(acceptance[depths[newest], 0])
            if not open_children:
                break

            (parent, rank), prob = max(open_children.items(), key=lambda child: child[1])
            del open_children[parent, rank]
            if rank + 1 < acceptance.shape[1]:
                open_children[parent, rank + 1] = node_probs[parent] * float(acceptance[depths[parent], rank + 1])

            parents.append(parent)
            ranks.append(rank)
            node_probs.append(prob)
            depths.append(depths[parent] + 1)

        return cls.from_lists(parents, ranks)

    def expected_length(self, acceptance: Float[Tensor, "depths ranks"]) -> float:
        """The mean tokens of a step, the bonus token included: the sum of the probabilities of a one-row tree's nodes.

        Example:

        ```python
        >>> DraftTree.from_lists([-1, 0, 0, 1]).expected_length(torch.tensor([[0.5, 0.25], [0.5, 0.25]]))
        2.0

        ```
        """
        shares = acceptance[self.depths[0] - 1, self.ranks[0]].tolist()
        node_probs = [1.0]
        for parent, share in zip(self.parents[0, 1:].tolist(), shares[1:], strict=True):
            node_probs.append(node_probs[parent] * share)

        return sum(node_probs)

    def __len__(self) -> int:
        """Nodes per row, root included."""
        return self.parents.shape[1]

    @cached_property
    def ancestor_mask(self) -> Bool[Tensor, "rows nodes nodes"]:
        """`mask[row, i, j]` is true where node `i` may attend to node `j`: itself and its ancestors."""
        rows, nodes = self.parents.shape
        device = self.parents.device
        mask = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        leap = torch.where(self.parents < 0, torch.arange(nodes, device=device), self.parents)  # 1, 2, 4, .. steps up

        for _ in range((nodes - 1).bit_length()):  # pointer doubling
            mask = mask | mask.gather(1, leap[:, :, None].expand(-1, -1, nodes))
            leap = leap.gather(1, leap)

        return mask

    @cached_property
    def depths(self) -> Int[Tensor, "rows nodes"]:
        """Distance from the root; 0 at fillers."""
        return torch.zeros_like(self.parents) if self.parents.shape[1] == 1 else self.ancestor_mask.sum(-1) - 1

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes of the first row from the root to `node`."""
        return TokenTree(self.parents[0].tolist(), ()).path_to(node)

    def pruned(self, max_depth: int, num_nodes: int, is_chain: bool = False) -> "DraftTree":
        """The part of a one-row tree within the limits: its first nodes, or its path of first children."""
        parents, ranks, depths = (values[0].tolist() for values in (self.parents, self.ranks, self.depths))
        new_index: dict[int, int] = {-1: -1}
        has_child: set[int] = set()

        for node, parent in enumerate(parents):
            is_open = parent in new_index and not (is_chain and parent in has_child)
            if is_open and depths[node] <= max_depth and len(new_index) <= num_nodes:
                new_index[node] = len(new_index) - 1
                has_child.add(parent)

        kept = [node for node in new_index if node >= 0]
        return DraftTree.from_lists([new_index[parents[node]] for node in kept], [ranks[node] for node in kept])


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

        self._max_depths = max_depths.to(roots.device)[:, None]
        self._num_by_depth = [1]  # nodes of each row
        self._first_newest = 0
        self._order: Tensor | None = None  # [rows, nodes] the likeliest first, once somebody asks

    def expand(
        self,
        parents: Int[Tensor, "rows parents"],
        token_ids: Int[Tensor, "rows parents children"],
        log_probs: Float[Tensor, "rows parents children"],
    ) -> None:
        """Give some of the newest nodes children, best first, with the drafter's probabilities; NaN counts as 0."""
        depth = len(self._num_by_depth)
        self._first_newest = self.token_ids.shape[1]
        self._order = None

        above = self.log_node_probs.gather(1, parents)[..., None]
        log_node_probs = (above + log_probs.to(above).clamp(max=0)).flatten(1)
        log_node_probs = log_node_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # sorted, NaN is before the root
        log_node_probs = log_node_probs.masked_fill(self._max_depths < depth, -torch.inf)

        new_ids = token_ids.flatten(1).to(self.token_ids)
        above_each = parents[..., None].expand_as(token_ids).flatten(1)
        self.token_ids = torch.cat([self.token_ids, new_ids], dim=1)
        self.parents = torch.cat([self.parents, above_each], dim=1)
        self.log_node_probs = torch.cat([self.log_node_probs, log_node_probs], dim=1)
        self._num_by_depth.append(new_ids.shape[1])

    @property
    def depths(self) -> Int[Tensor, " nodes"]:
        """The depth of each node, in all rows alike."""
        by_depth = torch.tensor(self._num_by_depth)
        return torch.arange(len(by_depth)).repeat_interleave(by_depth).to(self.parents.device)

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
            # of the nodes that get children next: each one's parent among those that got some before
            self.origins: Tensor = (nodes - self._first_newest) // width
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

        best = newest.sort(dim=1, descending=True, stable=True).indices[:, :num]
        return best.sort(dim=1).values + self._first_newest

    def likeliest(self, num_nodes: int) -> Int[Tensor, "rows nodes"]:
        """The likeliest nodes, likeliest first."""
        if self._order is None:
            self._order = self.log_node_probs.sort(dim=1, descending=True, stable=True).indices
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


# Chains of tokens that join trees: what a tree holds stays where it is, the others get new nodes


def held_nodes(
    token_ids: Int[Tensor, "rows nodes"], parents: Int[Tensor, "rows nodes"], chain: Int[Tensor, "rows tokens"]
) -> Int[Tensor, "rows tokens"]:
    """The node that holds each token of a chain below the root; -1 from the first token on that none holds."""
    num_nodes = token_ids.shape[1]
    numbers = torch.arange(num_nodes, device=token_ids.device)

    # the child of each node that holds each token of the chain, `[rows, tokens, nodes and nobody]`
    is_child = (token_ids[:, None] == chain[:, :, None]) & (parents >= 0)[:, None]
    above = torch.where(is_child, parents[:, None], num_nodes)
    children = above.new_full((*chain.shape, num_nodes + 1), num_nodes)
    children.scatter_reduce_(2, above, numbers.expand_as(above), "amin")
    children[..., num_nodes] = num_nodes

    held = [torch.zeros_like(chain[:, :1])]
    for column in range(chain.shape[1]):
        held.append(children[:, column].gather(1, held[-1]))

    found = torch.cat(held, dim=1)[:, 1:]
    return found.masked_fill(found == num_nodes, -1)


def with_chain(
    token_ids: Int[Tensor, "rows nodes"],
    parents: Int[Tensor, "rows nodes"],
    chain: Int[Tensor, "rows tokens"],
    depth: int,
) -> tuple[Int[Tensor, "rows all"], Int[Tensor, "rows all"], Int[Tensor, "rows 1"]]:
    """Trees of `depth` at most with a node more for each token of a chain that they do not hold, the first ones first.

    A row's `chain` ends in -1 where it is shorter than others. There are as many new nodes as tokens of the chain, the
    last of them fillers, so that shapes do not depend on what is held. Returns tokens and parents of all nodes, and
    how many tokens of each row's chain its tree held.

    Example:

    ```python
    >>> token_ids, parents = torch.tensor([[5, 7, 8]]), torch.tensor([[-1, 0, 0]])
    >>> with_chain(token_ids, parents, torch.tensor([[7, 9, 9]]), depth=1)
    (tensor([[5, 7, 8, 9, 9, 5]]), tensor([[-1,  0,  0,  1,  3, -1]]), tensor([[1]]))

    ```
    """
    num_nodes = token_ids.shape[1]
    num_tokens = chain.shape[1]
    held = held_nodes(token_ids, parents, chain[:, :depth])
    num_held = (held >= 0).sum(1, keepdim=True)

    steps = torch.arange(num_tokens, device=chain.device)
    columns = num_held + steps  # of the chain, by new node
    is_new = columns < (chain >= 0).sum(1, keepdim=True)
    added = chain.gather(1, columns.clamp(max=num_tokens - 1)).where(is_new, token_ids[:, :1])

    root_and_held = torch.cat([torch.zeros_like(num_held), held], dim=1)
    last_held = root_and_held.amax(1, keepdim=True)  # a child comes after its parent
    above = torch.where(steps == 0, last_held, num_nodes + steps - 1).where(is_new, -1)
    return torch.cat([token_ids, added], dim=1), torch.cat([parents, above], dim=1), num_held
