"""What of a draft becomes text. Knows nothing of models: the target's choice after a node is asked for by a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class AcceptedPath:
    """The outcome of one step.

    Args:
        path (`tuple[int, ...]`): Kept nodes, root first.
        token_ids (`tuple[int, ...]`): What became text: one token for each node of the path; the last is the bonus token.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Draft tokens kept, without root and bonus token."""
        return len(self.path) - 1

    @property
    def bonus_token(self) -> int:
        """The token that the target added itself."""
        return self.token_ids[-1]


class Walk:
    """The way of one text through a tree: from the root on to the child that holds the token after it, as long as there is one.

    Args:
        parents (`Sequence[int]`): Parent of each node.
        token_ids (`Sequence[int]`): The token at each node.
        is_lookahead (`Sequence[bool]`, *optional*): Nodes that are read but never become text.
    """

    def __init__(
        self, parents: Sequence[int], token_ids: Sequence[int], is_lookahead: Sequence[bool] | None = None
    ) -> None:
        self._children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(parents, token_ids, strict=True))
            if parent >= 0 and not (is_lookahead and is_lookahead[node])
        }
        self._path: list[int] = [0]
        self._committed: list[int] = []

    @property
    def node(self) -> int:
        """Where it stands: the token after this node is asked for next."""
        return self._path[-1]

    def take(self, token: int) -> bool:
        """Commit the token after the node; returns whether the walk can go on from there."""
        self._committed.append(token)
        child = self._children.get((self.node, token))
        if child is not None:
            self._path.append(child)
        return child is not None

    @property
    def verdict(self) -> AcceptedPath:
        """What became text so far."""
        return AcceptedPath(tuple(self._path[: len(self._committed)]), tuple(self._committed))


def lazy_walk(
    parents: Sequence[int],
    token_ids: Sequence[int],
    commit: Callable[[int], tuple[int, bool]],
    is_lookahead: Sequence[bool] | None = None,
) -> AcceptedPath:
    """Follow the target through the tree: commit its token after the root, go to the child that holds it, and so on.

    Nothing is drawn or processed for nodes off the path, so `commit` sees what it would see in decoding without a
    drafter, call by call: the text is the same for the same seed, whatever the tree.

    Args:
        parents (`Sequence[int]`): Parent of each node.
        token_ids (`Sequence[int]`): The token at each node.
        commit (`Callable`): Given a node, commits the target's token after it; returns it and whether the text is complete.
        is_lookahead (`Sequence[bool]`, *optional*): Nodes that are read but never become text.

    Returns:
        [`AcceptedPath`]: the kept path and the committed tokens.

    Example:

    The target wants 7 after the root and 9 after the 7, so the path 0 -> 1 -> 3 is kept:

    ```python
    >>> wanted = {0: 7, 1: 9, 2: 1, 3: 4}
    >>> lazy_walk([-1, 0, 0, 1], [5, 7, 8, 9], lambda node: (wanted[node], False))
    AcceptedPath(path=(0, 1, 3), token_ids=(7, 9, 4))

    ```
    """
    walk = Walk(parents, token_ids, is_lookahead)
    while True:
        token, is_complete = commit(walk.node)
        if not walk.take(token) or is_complete:
            return walk.verdict


def coverage(
    probs: Float[Tensor, "kept vocab"], parents: Sequence[int], token_ids: Sequence[int], path: Sequence[int]
) -> list[float]:
    """How much of the target's distribution after each kept node (`probs`, one row for each) its children hold.

    Example:

    ```python
    >>> coverage(torch.tensor([[0.5, 0.25, 0.25]]), [-1, 0, 0], [9, 0, 2], [0])
    [0.75]

    ```
    """
    children = [[token for token, parent in zip(token_ids, parents, strict=True) if parent == node] for node in path]
    held = [row[offered].sum() for row, offered in zip(probs, children, strict=True)]
    return torch.stack(held).tolist()  # waits for the device once
