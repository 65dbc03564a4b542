"""Token matching, which decides what nodes of a draft become text, and the trees and paths of all rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class AcceptedPath:
    """The nodes of a row's tree that are accepted in one step, and the tokens that become text."""

    path: tuple[int, ...] = ()  # accepted nodes, the root first; empty for a row that takes no step
    token_ids: tuple[int, ...] = ()  # one new token after each node of the path; the last one is the bonus token

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, without root and bonus token."""
        return len(self.path) - 1

    def cut(self, num_tokens: int) -> "AcceptedPath":
        """The first `num_tokens` nodes and tokens."""
        return AcceptedPath(self.path[:num_tokens], self.token_ids[:num_tokens])

    def __add__(self, other: "AcceptedPath") -> "AcceptedPath":
        """This path, continued by another one of the same row."""
        return AcceptedPath(self.path + other.path, self.token_ids + other.token_ids)


@dataclass(frozen=True)
class TokenTree:
    """The draft of one row as plain lists."""

    parents: Sequence[int]  # -1 at the root and at nodes that must not become text; else a node before the child
    token_ids: Sequence[int]  # siblings differ

    @property
    def is_root_alone(self) -> bool:
        """Whether nothing was drafted."""
        return max(self.parents) < 0

    @cached_property
    def depths(self) -> list[int]:
        """The distance of each node from the root; 0 at nodes that must not become text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)

        return depths

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`; None if there is none."""
        for child, parent in enumerate(self.parents):
            if parent == node and self.token_ids[child] == token:
                return child
        return None

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to `node`."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])

        return tuple(reversed(path))


def match_tokens(
    tree: TokenTree, target_token: Callable[[int], int], start: int = 0, max_tokens: int | None = None
) -> AcceptedPath:
    """Follow the target through the tree: take its token after a node, go to the child that holds it, and repeat.

    The target is asked about nodes of the path only, in their order. So its answers can be those of decoding without a
    drafter, draw by draw, and then the text is the same for the same seed, whatever the tree. The way begins at node
    `start` and ends after `max_tokens` tokens, the bonus token included: n drafted tokens are n + 1.

    Example:

    The target wants 7 after the root and 9 after the 7, so the path 0 -> 1 -> 3 is accepted:

    ```python
    >>> target_tokens = [7, 9, 1, 4]
    >>> match_tokens(TokenTree([-1, 0, 0, 1], [5, 7, 8, 9]), target_tokens.__getitem__)
    AcceptedPath(path=(0, 1, 3), token_ids=(7, 9, 4))

    ```
    """
    path = [start]
    token_ids = [target_token(start)]

    while len(token_ids) != max_tokens:
        child = tree.child(path[-1], token_ids[-1])
        if child is None:
            break

        path.append(child)
        token_ids.append(target_token(child))

    return AcceptedPath(tuple(path), tuple(token_ids))
