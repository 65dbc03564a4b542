"""The shapes of draft trees, as the parent of each node."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DraftTreeError

MAX_NODES = 512  # per row; more would cost any target more than it can bring


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
        return torch.zeros_like(self.parents) if len(self) == 1 else self.ancestor_mask.sum(-1) - 1

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes of the first row from the root to `node`."""
        parents = self.parents[0].tolist()
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])

        return tuple(reversed(path))

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
